"""The definition of the gathers, in torch on the CPU. Bytes only; nothing here knows what a row means.

Invariants:
1. Every byte of the output is written: an address of 0 gives a zero row.
2. All reads of a call come before its fills, so a slot filled by a call is never a source in it.
"""

import torch
from torch import Tensor

from kernels.address import rows_at, store_at
from kernels.gather.unwritten import Unwritten
from kernels.layout import BLOCK_ROWS, GroupField, TableLayout
from kernels.place import live_rows
from kernels.round.plan import RoundPlan

__all__ = ["fetch_misses", "gather_blocks", "gather_group", "gather_round", "gather_rows"]


def gather_rows(addresses: Tensor, row_bytes: int, out: Tensor) -> None:
    present = addresses != 0
    if bool(present.all()):
        out.copy_(rows_at(addresses, row_bytes))
        return
    out.zero_()
    out[present] = rows_at(addresses[present], row_bytes)


def gather_blocks(block_addresses: Tensor, offset_bytes: int, rows: int, row_bytes: int, out: Tensor) -> None:
    whole, rest = divmod(rows, BLOCK_ROWS)
    used = block_addresses[: whole + (rest > 0)]
    assert bool((used != 0).all()), "a block of the history is missing"
    out[: whole * BLOCK_ROWS].view(whole, BLOCK_ROWS * row_bytes).copy_(rows_at(used[:whole] + offset_bytes, BLOCK_ROWS * row_bytes))
    if rest:
        out[whole * BLOCK_ROWS : rows].view(1, rest * row_bytes).copy_(rows_at(used[whole:] + offset_bytes, rest * row_bytes))


def fetch_misses(plan: RoundPlan, offset_bytes: int, row_bytes: int, scratch: Tensor) -> None:
    fetched = min(int(plan.misses), scratch.shape[0])
    scratch[:fetched] = rows_at(plan.miss_source[:fetched] + offset_bytes, row_bytes)


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
    left: Tensor | None = None,
) -> None:
    """Args: left: bool [T, k], picks that are left alone."""
    place, live = live_rows(table, place_of)
    hot = table[place, table_layout.group(group, GroupField.SLOTS)]
    hot = hot + layer_in_group * table[place, table_layout.group(group, GroupField.SLOTS_MAX)] * row_bytes
    addresses = torch.where(plan.source != 0, plan.source + offset_bytes, 0)
    if scratch is not None:
        fetched = (plan.miss >= 0) & (plan.miss < scratch.shape[0])
        addresses = torch.where(fetched, scratch.data_ptr() + plan.miss.long() * row_bytes, addresses)
    addresses = torch.where(plan.slot >= 0, hot[:, None] + plan.slot.long() * row_bytes, addresses)
    used = (plan.selection >= 0) & live[:, None]
    flat = out.view(-1, row_bytes)
    if left is not None:
        left = left & used
        used, kept = used & ~left, flat[left.flatten()]
    gather_rows(torch.where(used, addresses, 0).flatten(), row_bytes, flat)
    if left is not None:
        flat[left.flatten()] = kept
    filled = used & (plan.fill >= 0)
    store_at((hot[:, None] + plan.fill.long() * row_bytes)[filled], flat[filled.flatten()])


def gather_group(
    plan: RoundPlan, table: Tensor, table_layout: TableLayout, place_of: Tensor, group: int, offset_bytes: int, layer_bytes: int,
    out: Tensor, new: Unwritten, addresses: Tensor,
) -> None:  # fmt: skip
    first = new.positions.view(-1, new.each)[:, :1].expand(-1, new.each).reshape(-1, 1)
    for layer, copy in enumerate(out):
        left = plan.selection >= first if layer else None
        offset = offset_bytes + layer * layer_bytes
        gather_round(plan, table, table_layout, place_of, group, layer, offset, out.shape[-1], copy, None, left)
    if out.shape[0] > 1:
        _find_new(plan.selection, place_of, new, out[1], addresses)


def _find_new(selection: Tensor, place_of: Tensor, new: Unwritten, copy: Tensor, addresses: Tensor) -> None:
    """Where each row of the step is in the picks of its place's rows."""
    addresses.zero_()
    places = place_of.tolist()
    for row in range(len(places)):
        first = row // new.each * new.each
        for j in range(new.each):
            if places[row] < 0 or places[first + j] != places[row]:
                continue
            at = (selection[first + j] == new.positions[row]).nonzero().flatten().tolist()
            if at:
                addresses[row, j] = copy[first + j, at[-1]].data_ptr()
