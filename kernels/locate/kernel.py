"""Addresses of new and resident rows on a device. Reads tables only; writes addresses only.

A missing block or page, which the reference asserts against, gives address 0: nothing is stored or read there.

Bytes: 8 a new row and key layer; 32 a resident pick of 4 read. One launch each, three dependent loads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, RING_BLOCKS, WHOLE, BlockLayout, PageShare, TableField, TableLayout
from kernels.round.plan import RoundPlan

__all__ = ["locate_new", "locate_resident"]

ROWS = tl.constexpr(TableField.ROWS)
RING = tl.constexpr(TableField.RING)
BLOCKS = tl.constexpr(TableField.BLOCKS)
PAGES = tl.constexpr(TableField.PAGES)
PAGES_MAX = tl.constexpr(TableField.PAGES_MAX)
B_ROWS = tl.constexpr(BLOCK_ROWS)
R_BLOCKS = tl.constexpr(RING_BLOCKS)
P_KEYS = tl.constexpr(PAGE_KEYS)
INT64 = tl.constexpr(tl.pointer_type(tl.int64))


@triton.jit
def _live_fields(table, place_of, row, wanted, FIELDS: tl.constexpr):
    """Fields of each row's place, and whether the row is live."""
    place = tl.load(place_of + row, mask=wanted, other=-1).to(tl.int64)
    fields = table + tl.maximum(place, 0) * FIELDS
    return fields, wanted & (place >= 0) & (tl.load(fields + ROWS) > 0)


@triton.jit
def _locate_new(
    table, place_of, positions, row_out, key_out, page_out, rows, FIELDS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    KEYS_OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, RUN_BYTES: tl.constexpr, KEY_STEP: tl.constexpr, TILE: tl.constexpr,
    DEVICES: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wanted = row < rows
    fields, live = _live_fields(table, place_of, row, wanted, FIELDS)
    position = tl.load(positions + row, mask=live, other=0)
    pages = tl.load(fields + PAGES, mask=live, other=0).to(INT64) + layer * tl.load(fields + PAGES_MAX, mask=live, other=0)
    number = position // P_KEYS
    page = tl.load(pages + number // DEVICES, mask=live & (number % DEVICES == DEVICE), other=0)
    inside = position % B_ROWS
    key = tl.where(page != 0, page + position % P_KEYS // B_ROWS * RUN_BYTES + inside * KEY_STEP, 0)
    tl.store(page_out + layer.to(tl.int64) * rows + row, key, mask=wanted)
    if layer == 0:
        ring = tl.load(fields + RING, mask=live, other=0)
        resident = live & (ring == 0)
        blocks = tl.load(fields + BLOCKS, mask=resident, other=0).to(INT64)
        block = tl.load(blocks + position // B_ROWS, mask=resident, other=0)
        block = tl.where(ring != 0, ring + position // B_ROWS % R_BLOCKS * BLOCK_BYTES, block)
        tl.store(row_out + row, tl.where(block != 0, block + inside * ROW_BYTES, 0), mask=wanted)
        tl.store(key_out + row, tl.where(block != 0, block + KEYS_OFFSET + inside * KEY_STEP, 0), mask=wanted)


@triton.jit
def _locate_resident(
    table, place_of, selection, chosen, slot, fill, miss, source, misses, miss_source, picks_all, FIELDS: tl.constexpr,
    PICKS: tl.constexpr, ROW_BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pick = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = pick < picks_all
    fields, live = _live_fields(table, place_of, pick // PICKS, inside, FIELDS)
    position = tl.load(selection + pick, mask=inside, other=-1)
    used = live & (position >= 0)
    blocks = tl.load(fields + BLOCKS, mask=used, other=0).to(INT64)
    block = tl.load(blocks + position // B_ROWS, mask=used, other=0)
    tl.store(source + pick, tl.where(block != 0, block + (position % B_ROWS * ROW_BYTES).to(tl.int64), 0), mask=inside)
    unused = tl.full((TILE,), -1, tl.int32)
    tl.store(slot + pick, unused, mask=inside)
    tl.store(fill + pick, unused, mask=inside)
    tl.store(miss + pick, unused, mask=inside)
    tl.store(miss_source + pick, tl.zeros((TILE,), tl.int64), mask=inside)
    tl.store(chosen + pick, position, mask=inside)  # onto itself when the selection is the plan's own
    tl.store(misses, tl.program_id(0).to(tl.int64), mask=tl.program_id(0) == 0)


NEW_TILE = 32
PICKS_TILE = 128


def locate_new(
    table: Tensor, block_layout: BlockLayout, place_of: Tensor, positions: Tensor, share: PageShare = WHOLE
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See kernels/locate. One launch; capturable (the outputs come from the graph's own memory)."""
    rows, layers = positions.shape[0], block_layout.key_layers
    row_out, key_out = torch.empty_like(positions), torch.empty_like(positions)
    page_out = torch.empty((layers, rows), dtype=torch.int64, device=positions.device)
    if rows:
        _locate_new[(triton.cdiv(rows, NEW_TILE), layers)](
            table, place_of, positions, row_out, key_out, page_out, rows, table.shape[1], block_layout.block_bytes,
            block_layout.keys_offset, block_layout.row.row_bytes, block_layout.key.run_bytes, block_layout.key.step_bytes, NEW_TILE,
            share.devices, share.device,
        )  # fmt: skip
    return row_out, key_out, page_out


def locate_resident(table: Tensor, block_layout: BlockLayout, place_of: Tensor, selection: Tensor, plan: RoundPlan) -> None:
    """See kernels/locate. One launch; capturable."""
    picks_all = plan.rows * plan.picks
    if picks_all == 0:
        plan.forget()
        return
    _locate_resident[(triton.cdiv(picks_all, PICKS_TILE),)](
        table, place_of, selection.contiguous(), plan.selection, plan.slot, plan.fill, plan.miss, plan.source, plan.misses,
        plan.miss_source, picks_all, table.shape[1], plan.picks, block_layout.row.row_bytes, PICKS_TILE,
    )  # fmt: skip


_FIELDS = TableLayout(22).fields
_TABLE = {"table": "*i64", "place_of": "*i32", "FIELDS": _FIELDS, "ROW_BYTES": 656}
_NEW = {
    "positions": "*i64",
    "row_out": "*i64",
    "key_out": "*i64",
    "page_out": "*i64",
    "rows": "i32",
    "TILE": NEW_TILE,
    "DEVICES": 1,
    "DEVICE": 0,
}
_PLAN = dict.fromkeys(("selection", "chosen", "slot", "fill", "miss"), "*i32") | {"source": "*i64", "miss_source": "*i64"}
_NEW_AT = {"BLOCK_BYTES": 3636736, "KEYS_OFFSET": 3274752, "RUN_BYTES": 16384, "KEY_STEP": 256}
COMPILE = [
    (_locate_new, {**_TABLE, **_NEW, **_NEW_AT}),
    (_locate_new, {**_TABLE, **_NEW, **_NEW_AT, "rows": 1}),  # Triton makes a constant of an argument that is 1
    (_locate_new, {**_TABLE, **_NEW, **_NEW_AT, "DEVICES": 2, "DEVICE": 1}),
    (_locate_resident, {**_TABLE, **_PLAN, "misses": "*i64", "picks_all": "i32", "PICKS": 2048, "TILE": PICKS_TILE}),
]
