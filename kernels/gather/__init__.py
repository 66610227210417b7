"""Collect packed rows into compact buffers: by address, over a block table, or by a round's plan.

Copies, bit for bit; nothing is unpacked here. `reference.py` is the definition, `kernel.py` the same on a device.

Choices:
1. One launch a layer, or a group of layers, over all sessions and picks; per-row copies were 468 operations a token.
2. A miss scratch smaller than the distinct misses is no error: what does not fit is read from its source by the gather itself.
"""

import torch
from torch import Tensor

from kernels.gather import reference
from kernels.gather.unwritten import Unwritten
from kernels.layout import BLOCK_ROWS, TableLayout
from kernels.place import on_cpu
from kernels.round.plan import RoundPlan

__all__ = ["Unwritten", "fetch_misses", "gather_blocks", "gather_group", "gather_round", "gather_rows"]


def _check_rows(name: str, rows: Tensor, row_bytes: int) -> None:
    assert rows.dtype == torch.uint8, f"{name} is {rows.dtype}, not uint8"
    assert rows.is_contiguous(), f"{name} is not contiguous"
    assert rows.shape[-1] == row_bytes, f"{name} has rows of {rows.shape[-1]} bytes, not {row_bytes}"


def gather_rows(addresses: Tensor, row_bytes: int, out: Tensor) -> None:
    """Copy the row at each address.

    addresses  [n]             int64  device  0: a zero row
    out        [n, row_bytes]  uint8  device  written in full
    """
    _check_rows("out", out, row_bytes)
    assert out.shape[0] == addresses.shape[0], f"{addresses.shape[0]} addresses for {out.shape[0]} rows"
    if on_cpu("gather_rows", out):
        reference.gather_rows(addresses, row_bytes, out)
    else:
        from kernels.gather import kernel

        kernel.gather_rows(addresses, row_bytes, out)


def gather_blocks(block_addresses: Tensor, offset_bytes: int, rows: int | Tensor, row_bytes: int, out: Tensor) -> None:
    """Copy rows 0 .. rows - 1 of one layer from the blocks that hold them.

    block_addresses  [blocks]             int64  device  not 0 in the ceil(rows / 64) that are read
    offset_bytes                          distance from a block's start to the layer (`BlockLayout.row_offset(layer)`)
    rows                                  a count, or int64 [1] on the device: then one captured launch serves any count that fits
    out              [>= rows, row_bytes]  uint8  device  rows past `rows` are left alone
    """
    _check_rows("out", out, row_bytes)
    if on_cpu("gather_blocks", out):
        rows = int(rows)
    if isinstance(rows, int):
        assert rows <= out.shape[0], f"{rows} rows do not fit {out.shape[0]}"
        assert rows <= block_addresses.shape[0] * BLOCK_ROWS, f"{rows} rows are more than {block_addresses.shape[0]} blocks hold"
    if on_cpu("gather_blocks", out):
        reference.gather_blocks(block_addresses, offset_bytes, int(rows), row_bytes, out)
    else:
        from kernels.gather import kernel

        kernel.gather_blocks(block_addresses, offset_bytes, rows, row_bytes, out)


def fetch_misses(plan: RoundPlan, offset_bytes: int, row_bytes: int, scratch: Tensor) -> None:
    """Copy each distinct miss's row of one layer to its place in the scratch: the prefetch of a shared layer.

    offset_bytes                           distance from layer 0 to this layer (`BlockLayout.row_offset(layer)`)
    scratch  [misses_max, row_bytes]  uint8  device  rows 0 .. min(misses, misses_max) - 1 are written
    """
    _check_rows("scratch", scratch, row_bytes)
    if on_cpu("fetch_misses", scratch):
        reference.fetch_misses(plan, offset_bytes, row_bytes, scratch)
    else:
        from kernels.gather import kernel

        kernel.fetch_misses(plan, offset_bytes, row_bytes, scratch)


def gather_round(
    plan: RoundPlan,
    table: Tensor,
    table_layout: TableLayout,
    place_of: Tensor,
    group: int,
    layer_in_group: int,
    offset_bytes: int,
    row_bytes: int,
    out: Tensor,
    scratch: Tensor | None,
) -> None:
    """Collect every selected row of one layer, then fill the hot slots that the plan assigned.

    table           [places, fields]         int64  device  as the plan saw it; the hot slots behind it are filled
    place_of        [T]                      int32  device  as the plan saw it
    layer_in_group                           0 for the group's full layer
    offset_bytes                             distance from layer 0 to this layer (`BlockLayout.row_offset(layer)`)
    out             [T, k, row_bytes]        uint8  device  written in full; unused picks and padding rows are zero
    scratch         [misses_max, row_bytes]  uint8  device  what `fetch_misses` brought for this layer; None: read every source
    """
    _check_rows("out", out, row_bytes)
    assert out.shape[:2] == plan.selection.shape, f"out {tuple(out.shape)} for a plan of {tuple(plan.selection.shape)}"
    if scratch is not None:
        _check_rows("scratch", scratch, row_bytes)
    if on_cpu("gather_round", out):
        reference.gather_round(plan, table, table_layout, place_of, group, layer_in_group, offset_bytes, row_bytes, out, scratch)
    else:
        from kernels.gather import kernel

        kernel.gather_round(plan, table, table_layout, place_of, group, layer_in_group, offset_bytes, row_bytes, out, scratch)


def gather_group(
    plan: RoundPlan, table: Tensor, table_layout: TableLayout, place_of: Tensor, group: int, offset_bytes: int, layer_bytes: int,
    out: Tensor, new: Unwritten, addresses: Tensor,
) -> None:  # fmt: skip
    """`gather_round` of all layers of a group at once, when only the first has written the step's own rows.

    Picks of those rows are left alone in the copies of the other layers, and no slot is filled by them; whoever writes such a row stores it
    there too. A position stands at most once in a row's selection.

    offset_bytes                                 distance from layer 0 to the group's first (`BlockLayout.row_offset(layer)`)
    layer_bytes                                  from a layer to the next
    out           [layers, T, k, row_bytes]  uint8  device
    new                                          the step's rows, T of them
    addresses     [T, each]                  int64  device  of row r in the picks of its place's j-th row, in the second layer's copy, or 0.
                                                            Written in full, unless the group has one layer
    """
    _check_rows("out", out, out.shape[-1])
    assert out.shape[1:3] == plan.selection.shape, f"copies {tuple(out.shape)} for a plan of {tuple(plan.selection.shape)}"
    assert addresses.shape == (plan.rows, new.each), f"{tuple(addresses.shape)} addresses for {plan.rows} rows, {new.each} a place"
    assert new.positions.shape == place_of.shape, f"{tuple(new.positions.shape)} positions for {tuple(place_of.shape)} rows"
    if on_cpu("gather_group", out):
        reference.gather_group(plan, table, table_layout, place_of, group, offset_bytes, layer_bytes, out, new, addresses)
    else:
        from kernels.gather import kernel

        kernel.gather_group(plan, table, table_layout, place_of, group, offset_bytes, layer_bytes, out, new, addresses)
