"""How a step finds and reads selected rows, a class a placement, chosen once with it.

A placement that copies gathers the rows of all layers of a group at once, as soon as its plan is there; the step's own rows, which a shared
layer has not written then, are added when they are.

Holds layouts only; everything that changes lies behind the step table. Called inside a step's work, on its streams.

Invariants:
1. Both placements hand the same packed bytes to attention: through the same gather, or by address where a resident device has them.
2. A resident round keeps nothing: no plan, no map, no miss.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.gather import Unwritten, gather_group, gather_round
from kernels.layout import BlockLayout, TableLayout
from kernels.locate import locate_resident
from kernels.place import on_cpu
from kernels.round import RoundPlan, clear_round, plan_round
from kernels.sparse_mla import sparse_mla_addresses, sparse_mla_packed

__all__ = ["OffloadRounds", "Picked", "Query", "ResidentRounds", "Rounds", "attend_gathered"]


@dataclass(frozen=True, slots=True)
class Query:
    """What rows are read for: one layer's queries of a step.

    latent  [T, heads, R]   float  absorbed
    rope    [T, heads, Dr]  float  rotated
    """

    latent: Tensor
    rope: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Picked:
    """The selected rows of one layer: what a plan says of them, and where the step stands.

    table     [places, fields]              int64  device
    place_of  [T]                           int32  device
    """

    table: Tensor
    group: int
    layer_in_group: int
    layer: int  # local to the stage
    place_of: Tensor
    plan: RoundPlan


class Rounds(Protocol):
    """What a step asks of the placement. Shapes as in `kernels/round` and `kernels/gather`."""

    copies: bool  # whether `attend` reads a compact copy, which `gather` must have filled; else it reads rows where they lie

    def plan(self, table: Tensor, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan) -> None:
        """Fill `plan` from its selection."""
        ...

    def gather(self, of: Picked, out: Tensor) -> None:
        """Collect a layer's selected rows into `out`, uint8 [T, k, row_bytes]; fill the slots the plan assigned."""
        ...

    def gather_group(self, of: Picked, out: Tensor, new: Unwritten, addresses: Tensor) -> None:
        """`gather` for all layers of a group: `of` is its first, which alone has the step's own rows. Shapes as in `kernels/gather`."""
        ...

    def attend(self, of: Picked, compact: Tensor, query: Query) -> Tensor:
        """Attend to a layer's selected rows, [T, heads, R]: those in `compact` where the placement copies."""
        ...

    def clear(self, table: Tensor, group: int, place_of: Tensor, plan: RoundPlan) -> None:
        """Unmap what the plan assigned: for a step that did not reach the group's last layer."""
        ...


def attend_gathered(rounds: Rounds, layout: BlockLayout, of: Picked, compact: Tensor, query: Query) -> Tensor:
    """Gather by `rounds`, then attend to the compact rows."""
    rounds.gather(of, compact)
    return _attend(layout, of, compact, query)


def _attend(layout: BlockLayout, of: Picked, compact: Tensor, query: Query) -> Tensor:
    return sparse_mla_packed(query.latent, query.rope, compact, of.plan.selection, layout.row, query.scale)


def _gather(layout: BlockLayout, table_layout: TableLayout, of: Picked, out: Tensor) -> None:
    """The gather of both placements: the plan alone says where a row lies."""
    offset, row_bytes = layout.row_offset(of.layer), layout.row.row_bytes
    gather_round(of.plan, of.table, table_layout, of.place_of, of.group, of.layer_in_group, offset, row_bytes, out, None)


def _gather_group(layout: BlockLayout, table_layout: TableLayout, of: Picked, out: Tensor, new: Unwritten, addresses: Tensor) -> None:
    offset, layer_bytes = layout.row_offset(of.layer), layout.layer_bytes
    gather_group(of.plan, of.table, table_layout, of.place_of, of.group, offset, layer_bytes, out, new, addresses)


class OffloadRounds:
    """Hit from the hot cache, else ring or registered RAM."""

    copies = True

    def __init__(self, layout: BlockLayout, table_layout: TableLayout) -> None:
        self._layout = layout
        self._table_layout = table_layout

    def plan(self, table: Tensor, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan) -> None:
        """See Rounds."""
        plan_round(table, self._table_layout, self._layout, group, place_of, mirrored, plan)

    def gather(self, of: Picked, out: Tensor) -> None:
        """See Rounds."""
        _gather(self._layout, self._table_layout, of, out)

    def gather_group(self, of: Picked, out: Tensor, new: Unwritten, addresses: Tensor) -> None:
        """See Rounds."""
        _gather_group(self._layout, self._table_layout, of, out, new, addresses)

    def attend(self, of: Picked, compact: Tensor, query: Query) -> Tensor:
        """See Rounds. By way of a compact copy: attention by the plan itself (`kernels/sparse_mla/planned.py`) made steps slower."""
        return _attend(self._layout, of, compact, query)

    def clear(self, table: Tensor, group: int, place_of: Tensor, plan: RoundPlan) -> None:
        """See Rounds."""
        clear_round(table, self._table_layout, group, place_of, plan)


class ResidentRounds:
    """Rows are read where they lie on the device."""

    copies = False

    def __init__(self, layout: BlockLayout, table_layout: TableLayout) -> None:
        self._layout = layout
        self._table_layout = table_layout

    def plan(self, table: Tensor, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan) -> None:
        """See Rounds."""
        del group, mirrored
        locate_resident(table, self._table_layout, self._layout, place_of, plan.selection, plan)

    def gather(self, of: Picked, out: Tensor) -> None:
        """See Rounds."""
        _gather(self._layout, self._table_layout, of, out)

    def gather_group(self, of: Picked, out: Tensor, new: Unwritten, addresses: Tensor) -> None:
        """See Rounds."""
        _gather_group(self._layout, self._table_layout, of, out, new, addresses)

    def attend(self, of: Picked, compact: Tensor, query: Query) -> Tensor:
        """See Rounds. A device reads rows where they lie; on the CPU that would be the same copy under another name."""
        if on_cpu("attend", of.table):
            return attend_gathered(self, self._layout, of, compact, query)
        offset = self._layout.row_offset(of.layer)
        return sparse_mla_addresses(query.latent, query.rope, of.plan.source, self._layout.row, query.scale, offset)

    def clear(self, table: Tensor, group: int, place_of: Tensor, plan: RoundPlan) -> None:
        """See Rounds. Nothing was kept."""
        del table, group, place_of, plan
