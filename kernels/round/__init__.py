"""A round: decide, on the device, where every selected row of a step is read from and which hot slots it fills.

One plan serves all layers of a selection group, for every session of the step in one call. `plan.py` holds its buffers,
`reference.py` is the definition, `kernel.py` the same on a device; `kernels/gather` then moves bytes by the plan, layer by layer.

Rules, for one session (design, section 6):
1. A position at or past the mirrored snapshot is read from the ring; else from its hot slot (a hit); else from the history (a miss).
2. Hits are pinned for the round. The first pick of a missing position in row-major order leads; the others are duplicates.
3. Leaders take victims by a circular hand that skips pinned slots and slots taken in this round; with none free the row is
   read through and not kept.
4. A slot filled in a round is a source in later rounds only: the plan looks up every position before it maps any.
5. Sessions never share maps or slots; positions past the mirrored snapshot never enter a map.

Choices: no reference bits, which were 30 times slower with a full cache. No host readback: all of it can be captured.
"""

from torch import Tensor

from kernels.layout import BlockLayout, TableLayout
from kernels.place import on_cpu
from kernels.round import reference
from kernels.round.plan import RoundPlan

__all__ = ["RoundPlan", "begin_round", "clear_round", "plan_round", "unmap_from", "unmap_positions"]


def begin_round(table: Tensor) -> None:
    """Add 1 to ROUND of every busy place. Once a step, before its first plan.

    table  [places, fields]  int64  device  step table; the states behind it are changed
    """
    if on_cpu("begin_round", table):
        reference.begin_round(table)
    else:
        from kernels.round import kernel

        kernel.begin_round(table)


def plan_round(
    table: Tensor, table_layout: TableLayout, block_layout: BlockLayout, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan
) -> None:
    """Plan one round of `group` for every place. Reads `plan.selection`, overwrites the rest of the plan in full.

    table     [places, fields]  int64  device  maps, pins, hand and counters (HITS, MISSES, RING_READS) behind it are changed
    place_of  [T]               int32  device  place of each query row, in any order; padding rows name a free place or -1
    mirrored  [places]          int64  device  the step's snapshot of MIRRORED
    plan.selection is [T, k]; -1 may stand anywhere; positions of live rows lie below LOGICAL + ROWS.
    Padding rows come out unused: slot, fill, miss -1, source 0. So does, on a device, a pick that the reference refuses by an assertion.
    """
    assert place_of.shape == (plan.rows,), f"{tuple(place_of.shape)} places for {plan.rows} rows"
    assert mirrored.shape == (table.shape[0],), f"mirrored {tuple(mirrored.shape)} for {table.shape[0]} places"
    if on_cpu("plan_round", table):
        reference.plan_round(table, table_layout, block_layout, group, place_of, mirrored, plan)
    else:
        from kernels.round import kernel

        kernel.plan_round(table, table_layout, block_layout, group, place_of, mirrored, plan)


def clear_round(table: Tensor, table_layout: TableLayout, group: int, place_of: Tensor, plan: RoundPlan) -> None:
    """Unmap every slot that the plan assigned, and forget its fills: for a step that did not reach the group's last layer.

    table     [places, fields]  int64  device  as the plan saw it: call before the table is rewritten and before the next plan
    place_of  [T]               int32  device  as the plan saw it
    """
    assert place_of.shape == (plan.rows,), f"{tuple(place_of.shape)} places for {plan.rows} rows"
    if on_cpu("clear_round", table):
        reference.clear_round(table, table_layout, group, place_of, plan)
    else:
        from kernels.round import kernel

        kernel.clear_round(table, table_layout, group, place_of, plan)


def unmap_positions(slot_of: Tensor, position_of: Tensor, position: int) -> None:
    """Unmap every slot that holds a position at or past `position`.

    slot_of      [positions]  int32  device  at least past the largest mapped position
    position_of  [slots]      int32  device
    """
    if on_cpu("unmap_positions", slot_of):
        reference.unmap_positions(slot_of, position_of, position)
    else:
        from kernels.round import kernel

        kernel.unmap_positions(slot_of, position_of, position)


def unmap_from(table: Tensor, table_layout: TableLayout, place: int, position: int) -> None:
    """`unmap_positions` for every group of the session at `place`: a truncation below its mirrored rows.

    table  [places, fields]  int64  device  the maps behind it are changed
    """
    if on_cpu("unmap_from", table):
        reference.unmap_from(table, table_layout, place, position)
    else:
        from kernels.round import kernel

        kernel.unmap_from(table, table_layout, place, position)
