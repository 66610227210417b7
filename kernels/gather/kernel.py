"""Gathers on a device: rows copied by address in 16-byte pieces, from VRAM and from registered host memory alike.

A program moves a tile of rows: their addresses first, then every 16-byte piece of all of them before the first store, so that a read
over the bus hides behind the others. A row of 656 bytes is 41 pieces on 64 lanes; the idle lanes cost issue slots, which a copy has.

Invariants:
1. No slot that a call fills is a source in it: victims are never slots pinned in the round, so fills need not wait for other programs.
2. Rows are moved as 32-bit words, no byte of them is interpreted.
3. A block that the reference asserts to be there and is not gives zero rows: nothing is read from address 0.

Bytes of one layer's gather, 2,048 picks of 656 bytes: 1.28 MiB read, as much written: 0.63 us at 4.3 TB/s, less from L2; 1% misses are
13 KiB over the bus. 16 sessions: 41 MiB, 10 us.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gather.unwritten import Unwritten
from kernels.layout import BLOCK_ROWS, GroupField, TableField, TableLayout
from kernels.round.plan import RoundPlan

__all__ = ["copied_rows", "fetch_misses", "gather_blocks", "gather_group", "gather_round", "gather_rows"]

ROWS = tl.constexpr(TableField.ROWS)
SLOTS = tl.constexpr(GroupField.SLOTS)
SLOTS_MAX = tl.constexpr(GroupField.SLOTS_MAX)
B_ROWS = tl.constexpr(BLOCK_ROWS)
WORD = tl.constexpr(4)  # bytes
INT32 = tl.constexpr(tl.pointer_type(tl.int32))


@triton.jit
def _load_rows(address, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """int32 [rows, PADDED] from addresses int64 [rows], multiples of 16; zeros for address 0."""
    word = tl.arange(0, PADDED)
    start = tl.multiple_of(address.to(INT32), 16)
    return tl.load(start[:, None] + word[None, :], mask=(address != 0)[:, None] & (word < WORDS)[None, :], other=0)


@triton.jit
def _store_rows(address, rows, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Store what `_load_rows` gave; nothing at address 0."""
    word = tl.arange(0, PADDED)
    start = tl.multiple_of(address.to(INT32), 16)
    tl.store(start[:, None] + word[None, :], rows, mask=(address != 0)[:, None] & (word < WORDS)[None, :])


@triton.jit
def copied_rows(source, to, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Copy rows of WORDS 32-bit words between addresses int64 [rows], all of them at once; nothing from or to address 0."""
    _store_rows(to, _load_rows(source, WORDS, PADDED), WORDS, PADDED)


@triton.jit(do_not_specialize=["rows"])
def _gather_rows(addresses, out, rows, WORDS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    address = tl.load(addresses + row, mask=row < rows, other=0)
    to = tl.where(row < rows, out.to(tl.int64) + row.to(tl.int64) * (WORDS * WORD), 0)
    _store_rows(to, _load_rows(address, WORDS, PADDED), WORDS, PADDED)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["block_addresses", "count"])
def _gather_blocks(block_addresses, offset_bytes, rows, count, out, COUNTED: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    block = tl.program_id(0)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if COUNTED:
        rows = tl.minimum(tl.load(count), rows).to(tl.int32)
    while block * B_ROWS < rows:
        wanted = word < tl.minimum(rows - block * B_ROWS, B_ROWS) * WORDS
        address = tl.load(block_addresses + block)
        start = tl.multiple_of((address + offset_bytes).to(INT32), 16)
        packed = tl.load(start + word, mask=wanted & (address != 0), other=0)
        to = tl.multiple_of((out.to(tl.int64) + block.to(tl.int64) * (B_ROWS * WORDS * WORD)).to(INT32), 16)
        tl.store(to + word, packed, mask=wanted)
        block += tl.num_programs(0)


@triton.jit
def _fetch_misses(misses, miss_source, offset_bytes, scratch, scratch_rows, WORDS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    fetched = tl.minimum(tl.load(misses), scratch_rows).to(tl.int32)
    start = tl.program_id(0) * TILE
    while start < fetched:
        row = start + tl.arange(0, TILE)
        source = tl.load(miss_source + row, mask=row < fetched, other=0)
        to = tl.where(row < fetched, scratch.to(tl.int64) + row.to(tl.int64) * (WORDS * WORD), 0)
        _store_rows(to, _load_rows(tl.where(source != 0, source + offset_bytes, 0), WORDS, PADDED), WORDS, PADDED)
        start += tl.num_programs(0) * TILE


@triton.jit
def _find_new(selection, place_of, positions, copy, addresses, by, EACH: tl.constexpr, PICKS: tl.constexpr, PICKS_BLOCK: tl.constexpr,
              ROW_BYTES: tl.constexpr):  # fmt: skip
    """Where the new rows of row `by`'s place are in its picks; 0 where they are not."""
    first = by // EACH * EACH
    place = tl.load(place_of + by)
    pick = tl.arange(0, PICKS_BLOCK)
    wide = by.to(tl.int64)
    chosen = tl.load(selection + wide * PICKS + pick, mask=pick < PICKS, other=-1)
    for number in range(EACH):
        row = first + number
        own = (place >= 0) & (tl.load(place_of + row) == place)
        found = tl.max(tl.where((chosen == tl.load(positions + row)) & own, pick, -1))
        address = tl.where(found >= 0, copy.to(tl.int64) + (wide * PICKS + found) * ROW_BYTES, 0)
        tl.store(addresses + row.to(tl.int64) * EACH + by - first, address)


@triton.jit
def _gather_tile(
    selection, slot, fill, miss, source, table, place_of, positions, scratch, out, tile, picks_all, scratch_rows, first_field,
    layer_in_group, offset_bytes, EACH: tl.constexpr, FIELDS: tl.constexpr, PICKS: tl.constexpr, PREFETCHED: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile's rows of one layer to the compact copy at address `out`, and to the slots they fill."""
    pick = tile * TILE + tl.arange(0, TILE)
    inside = pick < picks_all
    position = tl.load(selection + pick, mask=inside, other=-1)
    from_slot = tl.load(slot + pick, mask=inside, other=-1)
    to_slot = tl.load(fill + pick, mask=inside, other=-1)
    address = tl.load(source + pick, mask=inside, other=0)
    if PICKS % TILE == 0:  # a tile lies within one row: one place for all of it
        place = tl.load(place_of + tile // (PICKS // TILE)).to(tl.int64)
    else:
        place = tl.load(place_of + pick // PICKS, mask=inside, other=-1).to(tl.int64)
    fields = table + tl.maximum(place, 0) * FIELDS
    used = (position >= 0) & (place >= 0) & (tl.load(fields + ROWS) > 0)
    if EACH > 0:
        newest = tl.load(positions + pick // PICKS // EACH * EACH, mask=inside, other=0)
        left = used & (layer_in_group > 0) & (position >= newest)
        used = used & (left == 0)
        inside = inside & (left == 0)
    hot = tl.load(fields + first_field + SLOTS)
    hot += layer_in_group * tl.load(fields + first_field + SLOTS_MAX) * (WORDS * WORD)

    address = tl.where(address != 0, address + offset_bytes, 0)
    if PREFETCHED:
        number = tl.load(miss + pick, mask=inside, other=-1)
        brought = (number >= 0) & (number < scratch_rows)
        address = tl.where(brought, scratch.to(tl.int64) + number.to(tl.int64) * (WORDS * WORD), address)
    address = tl.where(from_slot >= 0, hot + from_slot.to(tl.int64) * (WORDS * WORD), address)
    rows = _load_rows(tl.where(used, address, 0), WORDS, PADDED)
    _store_rows(tl.where(inside, out + pick.to(tl.int64) * (WORDS * WORD), 0), rows, WORDS, PADDED)
    kept = used & (to_slot >= 0)
    _store_rows(tl.where(kept, hot + to_slot.to(tl.int64) * (WORDS * WORD), 0), rows, WORDS, PADDED)


@triton.jit(do_not_specialize=["layer_in_group"])
def _gather_round(
    selection, slot, fill, miss, source, table, place_of, scratch, out, picks_all, scratch_rows, first_field, layer_in_group, offset_bytes,
    FIELDS: tl.constexpr, PICKS: tl.constexpr, PREFETCHED: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    _gather_tile(selection, slot, fill, miss, source, table, place_of, place_of, scratch, out.to(tl.int64), tl.program_id(0), picks_all,
                 scratch_rows, first_field, layer_in_group, offset_bytes, 0, FIELDS, PICKS, PREFETCHED, WORDS, PADDED, TILE)  # fmt: skip


@triton.jit
def _gather_group(
    selection, slot, fill, source, table, place_of, positions, out, addresses, picks_all, first_field, offset_bytes, layer_bytes,
    EACH: tl.constexpr, FIELDS: tl.constexpr, PICKS: tl.constexpr, PICKS_BLOCK: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    tiles = (picks_all + TILE - 1) // TILE
    if tile < tiles:
        to = out.to(tl.int64) + layer * picks_all * (WORDS * WORD)
        _gather_tile(selection, slot, fill, slot, source, table, place_of, positions, out, to, tile, picks_all, 0, first_field, layer,
                     offset_bytes + layer * layer_bytes, EACH, FIELDS, PICKS, False, WORDS, PADDED, TILE)  # fmt: skip
    elif layer == 1:
        copy = out.to(tl.int64) + layer * picks_all * (WORDS * WORD)
        _find_new(selection, place_of, positions, copy, addresses, tile - tiles, EACH, PICKS, PICKS_BLOCK, WORDS * WORD)


WORDS_TILE = 2048  # words a program holds: 4 pieces of 16 bytes a thread of 128
# Of a long history's: 18 programs of packed rows of 656 bytes, so that 0.14 MiB are under way, the fewest that the bus is full with (an
# H200's, docs/benchmarks/fetch_beside.py). More wait in the device's memory system, and who reads its own memory waits behind: beside
# 192 products of weights took 6.3 times as long, beside 18 1.1 times.
BLOCKS_AT_ONCE = 3
FETCH_PROGRAMS_MAX = 264  # most find nothing: misses are few, their room is not; so many have 1.3 MiB under way, the bus needs 0.1


def _row_tile(row_bytes: int) -> tuple[int, int, int]:
    """Words of a row, the same padded to a power of two, rows a program moves."""
    words = row_bytes // 4
    padded = int(triton.next_power_of_2(words))
    return words, padded, max(1, WORDS_TILE // padded)


def _check_alignment(name: str, rows: Tensor) -> None:
    assert rows.data_ptr() % 16 == 0, f"{name} does not begin at a multiple of 16"


def gather_rows(addresses: Tensor, row_bytes: int, out: Tensor) -> None:
    """See kernels/gather."""
    rows = addresses.shape[0]
    if rows == 0:
        return
    _check_alignment("out", out)
    words, padded, tile = _row_tile(row_bytes)
    _gather_rows[(triton.cdiv(rows, tile),)](addresses, out, rows, words, padded, tile)


def gather_blocks(block_addresses: Tensor, offset_bytes: int, rows: int | Tensor, row_bytes: int, out: Tensor) -> None:
    """See kernels/gather. The grid covers `out` when `rows` is a tensor, so that a captured launch serves any count."""
    counted = isinstance(rows, Tensor)
    most = min(out.shape[0], block_addresses.shape[0] * BLOCK_ROWS) if isinstance(rows, Tensor) else rows
    if most == 0:
        return
    _check_alignment("out", out)
    words = row_bytes // 4
    grid = (min(triton.cdiv(most, BLOCK_ROWS), BLOCKS_AT_ONCE), triton.cdiv(BLOCK_ROWS * words, WORDS_TILE))
    _gather_blocks[grid](block_addresses, offset_bytes, most, rows if counted else block_addresses, out, counted, words, WORDS_TILE)


def fetch_misses(plan: RoundPlan, offset_bytes: int, row_bytes: int, scratch: Tensor) -> None:
    """See kernels/gather."""
    rows = scratch.shape[0]
    if rows == 0:
        return
    _check_alignment("scratch", scratch)
    words, padded, tile = _row_tile(row_bytes)
    programs = min(triton.cdiv(rows, tile), FETCH_PROGRAMS_MAX)
    _fetch_misses[(programs,)](plan.misses, plan.miss_source, offset_bytes, scratch, rows, words, padded, tile)


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
    """See kernels/gather. One launch; capturable."""
    picks_all = plan.rows * plan.picks
    if picks_all == 0:
        return
    _check_alignment("out", out)
    brought = scratch if scratch is not None and scratch.shape[0] > 0 else None
    if brought is not None:
        _check_alignment("scratch", brought)
    words, padded, tile = _row_tile(row_bytes)
    _gather_round[(triton.cdiv(picks_all, tile),)](
        plan.selection, plan.slot, plan.fill, plan.miss, plan.source, table, place_of, out if brought is None else brought, out,
        picks_all, 0 if brought is None else brought.shape[0], table_layout.group(group, 0), layer_in_group, offset_bytes,
        table.shape[1], plan.picks, brought is not None, words, padded, tile,
    )  # fmt: skip


def gather_group(
    plan: RoundPlan, table: Tensor, table_layout: TableLayout, place_of: Tensor, group: int, offset_bytes: int, layer_bytes: int,
    out: Tensor, new: Unwritten, addresses: Tensor,
) -> None:  # fmt: skip
    """See kernels/gather. One launch; capturable."""
    layers, rows, picks, row_bytes = out.shape
    if rows * picks == 0:
        return
    _check_alignment("out", out)
    words, padded, tile = _row_tile(row_bytes)
    looking = rows if layers > 1 else 0
    _gather_group[(triton.cdiv(rows * picks, tile) + looking, layers)](
        plan.selection, plan.slot, plan.fill, plan.source, table, place_of, new.positions, out, addresses, rows * picks,
        table_layout.group(group, 0), offset_bytes, layer_bytes, new.each, table.shape[1], picks, triton.next_power_of_2(picks), words,
        padded, tile,
    )  # fmt: skip


_ROW = {"WORDS": 164, "PADDED": 256, "TILE": 8}
_PICKS = dict.fromkeys(("selection", "slot", "fill", "miss", "place_of"), "*i32") | {"source": "*i64", "table": "*i64"}
_HOST = dict.fromkeys(("picks_all", "scratch_rows", "first_field", "layer_in_group", "offset_bytes"), "i32")
_ROUND = {**_PICKS, **_HOST, **_ROW, "scratch": "*u8", "out": "*u8", "FIELDS": TableLayout(22).fields, "PICKS": 2048}
_SPAN = {"block_addresses": "*i64", "offset_bytes": "i32", "rows": "i32", "count": "*i64", "out": "*u8", "WORDS": 164, "TILE": WORDS_TILE}
_FETCH = {"misses": "*i64", "miss_source": "*i64", "offset_bytes": "i32", "scratch": "*u8", "scratch_rows": "i32", **_ROW}
_GROUP = {**_ROUND, "positions": "*i64", "addresses": "*i64", "layer_bytes": "i64", "PICKS_BLOCK": 2048}
_GROUP = {name: value for name, value in _GROUP.items() if name not in ("miss", "scratch", "scratch_rows", "layer_in_group")}
COMPILE = [
    (_gather_rows, {"addresses": "*i64", "out": "*u8", "rows": "i32", **_ROW}),
    (_gather_blocks, {**_SPAN, "COUNTED": False}),
    (_gather_blocks, {**_SPAN, "COUNTED": True}),
    (_fetch_misses, _FETCH),
    (_gather_round, {**_ROUND, "PREFETCHED": False}),
    (_gather_round, {**_ROUND, "PREFETCHED": True}),
    (_gather_round, {**_ROUND, "PREFETCHED": True, "PICKS": 2047}),  # tiles that cross rows
    (_gather_group, {**_GROUP, "EACH": 1}),
    (_gather_group, {**_GROUP, "EACH": 4, "PICKS": 2047}),
]
