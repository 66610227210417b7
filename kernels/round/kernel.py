"""Rounds on a device: the same maps, slots and plan as the reference, bit for bit, in two launches and without the host.

`_look_up` runs over tiles of picks and decides everything that a pick can decide alone: ring, hit or miss, its source, its pin. Missing
picks elect leaders in the slot map itself: a missing position's entry is -1, and an integer atomic minimum puts LEAST + pick there, so
that the first pick in row-major order wins whatever the order of arrival. The minimum's old value tells each program how the leader
counts of rows change, so these are exact when the launch ends, and a leader's number is a sum of counts plus its rank within its row.
`_settle` runs one program a place: it numbers and lists leaders, then walks slots from the hand in windows, a prefix sum in each, and
hands the window's free slots to the next leaders, until no leader waits or the circle is closed.

Invariants:
1. A slot-map entry below -1 exists between the two launches only; every reader in between treats it as missing.
2. No program reads what another one of the same launch writes, except through atomics whose result is free of order.
   Within a program of `_settle`, a barrier stands between what one thread writes and another reads.
3. Counts live in two banks that take turns: `_look_up` counts in one and clears the other, which the plan before has read. Which one it
   is, each launch is told by the one before it, so no program waits for another and nothing is cleared from outside.
4. The reference raises on a position past its session or without a block before anything changes; a device cannot. Such a pick comes
   out unused (source 0, so a zero row) and enters no map, so nothing is read from a wild address.

Bytes, one row of 2,048 picks: 8 KiB selection, 2,048 sectors of 32 B of the slot map at most, 57 KiB of plan, all within L2: 0.05 us at
its bandwidth, so latency rules: 5 dependent loads in the first launch, 6 and two prefix sums in the second.
Refused: a plan of one row by one program in one launch, with barriers in place of the second launch: 9.3 us against 7.5 at 1% misses
on an H200, empty launches taken off. Sixteen programs look 2,048 picks up faster than one.
Scratch: the bank that `_look_up` counts in, the bank that `_settle` reads, two banks of T counts, then picks and positions of leaders in
order, a stretch a place.
Loops with bounds from the device are `while` loops: Triton's interpreter takes no tensor in `range`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, GROUP_FIELDS, RING_BLOCKS, BlockLayout, GroupField, StateField, TableField, TableLayout
from kernels.round.plan import RoundPlan

__all__ = ["begin_round", "clear_round", "plan_round", "unmap_from", "unmap_positions"]

LEAST = tl.constexpr(-(2**31))  # entry of an elected leader: LEAST + its pick, always below -1
MISSING = tl.constexpr(-2)  # plan.miss between the launches; a duplicate is -3 - its leader's pick until that has a number
NO_ROW = tl.constexpr(2**31 - 1)
ROWS = tl.constexpr(TableField.ROWS)
STATE = tl.constexpr(TableField.STATE)
RING = tl.constexpr(TableField.RING)
BLOCKS = tl.constexpr(TableField.BLOCKS)
SLOT_OF = tl.constexpr(GroupField.SLOT_OF)
POSITION_OF = tl.constexpr(GroupField.POSITION_OF)
PIN_ROUND = tl.constexpr(GroupField.PIN_ROUND)
HAND = tl.constexpr(GroupField.HAND)
SLOTS_MAX = tl.constexpr(GroupField.SLOTS_MAX)
LOGICAL = tl.constexpr(StateField.LOGICAL)
ROUND = tl.constexpr(StateField.ROUND)
HITS = tl.constexpr(StateField.HITS)
MISSES = tl.constexpr(StateField.MISSES)
RING_READS = tl.constexpr(StateField.RING_READS)
B_ROWS = tl.constexpr(BLOCK_ROWS)
R_BLOCKS = tl.constexpr(RING_BLOCKS)
INT32 = tl.constexpr(tl.pointer_type(tl.int32))
INT64 = tl.constexpr(tl.pointer_type(tl.int64))


@triton.jit
def _begin(table, places, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fields = table + place.to(tl.int64) * FIELDS
    busy = tl.load(fields + ROWS, mask=place < places, other=0) > 0
    count = tl.load(fields + STATE, mask=busy, other=0).to(INT64) + ROUND
    tl.store(count, tl.load(count, mask=busy, other=0) + 1, mask=busy)


@triton.jit
def _look_up(
    table, place_of, mirrored, selection, slot, fill, miss, source, miss_source, scratch, rows_all, first_field,
    FIELDS: tl.constexpr, PICKS: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < PICKS
    pick = row * PICKS + column
    bank = tl.load(scratch)
    counts_of = scratch + 2 + bank * rows_all
    tl.store(scratch + 2 + (1 - bank) * rows_all + row, 0, mask=tl.program_id(1) == 0)
    tl.store(scratch + 1, bank, mask=(row == 0) & (tl.program_id(1) == 0))
    position = tl.load(selection + pick, mask=inside, other=-1)
    place = tl.load(place_of + row).to(tl.int64)
    fields = table + tl.maximum(place, 0) * FIELDS
    rows = tl.load(fields + ROWS)
    live = (place >= 0) & (rows > 0)
    maps = fields + first_field
    slot_of = tl.load(maps + SLOT_OF, mask=live, other=0).to(INT32)
    pin_round = tl.load(maps + PIN_ROUND, mask=live, other=0).to(INT32)
    blocks = tl.load(fields + BLOCKS, mask=live, other=0).to(INT64)
    ring = tl.load(fields + RING, mask=live, other=0)
    state = tl.load(fields + STATE, mask=live, other=0).to(INT64)
    end = tl.load(state + LOGICAL, mask=live, other=0) + rows
    round_now = tl.load(state + ROUND, mask=live, other=0).to(tl.int32)
    snapshot = tl.load(mirrored + tl.maximum(place, 0), mask=live, other=0)

    used = inside & live & (position >= 0)
    old = used & (position < snapshot)  # snapshot <= end, so the maps are read without waiting for LOGICAL
    recent = used & (position >= snapshot) & (position < end) & (ring != 0)
    entry = tl.load(slot_of + position, mask=old, other=0)
    hit = old & (entry >= 0)
    block = tl.load(blocks + position // B_ROWS, mask=old & (entry < 0), other=0)
    missing = old & (entry < 0) & (block != 0)
    tl.store(pin_round + entry, round_now, mask=hit)

    ranked = LEAST + pick
    before = tl.atomic_min(slot_of + position, ranked, mask=missing, sem="relaxed")
    first = missing & (before == -1)
    displaced = missing & (before < -1) & (before > ranked)
    kinds = hit.to(tl.int64) + (missing.to(tl.int64) << 16) + (recent.to(tl.int64) << 32) + ((first | displaced).to(tl.int64) << 48)
    counts = tl.sum(kinds, axis=0)  # four sums of at most BLOCK each in one reduction
    tl.atomic_add(counts_of + row, (counts >> 48).to(tl.int32), mask=live, sem="relaxed")
    tl.atomic_add(state + HITS, counts & 65535, mask=live, sem="relaxed")
    tl.atomic_add(state + MISSES, (counts >> 16) & 65535, mask=live, sem="relaxed")
    tl.atomic_add(state + RING_READS, (counts >> 32) & 65535, mask=live, sem="relaxed")
    tl.atomic_add(counts_of + (before - LEAST) // PICKS, -1, mask=displaced, sem="relaxed")

    start = tl.where(missing, block, ring + position // B_ROWS % R_BLOCKS * tl.full((), BLOCK_BYTES, tl.int64))
    address = start + (position % B_ROWS * ROW_BYTES).to(tl.int64)
    tl.store(source + pick, tl.where(recent | missing, address, 0), mask=inside)
    tl.store(slot + pick, tl.where(hit, entry, -1), mask=inside)
    tl.store(fill + pick, tl.full((BLOCK,), -1, tl.int32), mask=inside)
    tl.store(miss + pick, tl.where(missing, MISSING, -1), mask=inside)
    tl.store(miss_source + pick, tl.zeros((BLOCK,), tl.int64), mask=inside)


@triton.jit
def _number_leaders(
    slot_of, selection, source, miss, miss_source, picks_of, positions_of, mine, row_of, leaders, PICKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Number and list one place's leaders; returns how many there are, and how many duplicates."""
    count = 0
    duplicates = 0
    row = tl.min(tl.where(mine, row_of, NO_ROW), axis=0)
    while row < NO_ROW:
        number = tl.sum(tl.where(row_of < row, leaders, 0), axis=0)
        for start in range(0, PICKS, BLOCK):
            column = start + tl.arange(0, BLOCK)
            pick = row * PICKS + column
            missing = tl.load(miss + pick, mask=column < PICKS, other=-1) == MISSING
            position = tl.load(selection + pick, mask=column < PICKS, other=0)  # not only of the missing: three loads under way at once
            address = tl.load(source + pick, mask=column < PICKS, other=0)
            leader = tl.load(slot_of + position, mask=missing, other=0) - LEAST
            leads = missing & (leader == pick)
            follows = missing & (leader != pick)
            kinds = leads.to(tl.int32) + (follows.to(tl.int32) << 16)
            order = tl.cumsum(leads.to(tl.int32), axis=0) - 1
            tl.store(miss + pick, tl.where(leads, number + order, -3 - leader), mask=missing)
            tl.store(miss_source + number + order, address, mask=leads)
            tl.store(picks_of + count + order, pick, mask=leads)
            tl.store(positions_of + count + order, position, mask=leads)
            counts = tl.sum(kinds, axis=0)  # two sums of at most BLOCK each in one reduction
            number += counts & 65535
            count += counts & 65535
            duplicates += counts >> 16
        row = tl.min(tl.where(mine & (row_of > row), row_of, NO_ROW), axis=0)
    return count, duplicates


@triton.jit
def _number_duplicates(miss, mine, row_of, PICKS: tl.constexpr, BLOCK: tl.constexpr):
    """Give one place's duplicates their leaders' numbers."""
    row = tl.min(tl.where(mine, row_of, NO_ROW), axis=0)
    while row < NO_ROW:
        for start in range(0, PICKS, BLOCK):
            column = start + tl.arange(0, BLOCK)
            code = tl.load(miss + row * PICKS + column, mask=column < PICKS, other=-1)
            number = tl.load(miss - 3 - code, mask=code < MISSING, other=0)
            tl.store(miss + row * PICKS + column, number, mask=code < MISSING)
        row = tl.min(tl.where(mine & (row_of > row), row_of, NO_ROW), axis=0)


# Without alignment hints a thread's elements are a warp apart in every tensor alike, and no layout is converted through shared memory.
@triton.jit(do_not_specialize_on_alignment=["selection", "fill", "miss", "source", "miss_source", "scratch"])
def _settle(
    table, place_of, selection, fill, miss, source, misses, miss_source, scratch, rows, first_field,
    FIELDS: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr, ROWS_PADDED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row_of = tl.arange(0, ROWS_PADDED)
    owner = tl.load(place_of + row_of, mask=row_of < rows, other=-1)
    bank = tl.load(scratch + 1)
    leaders = tl.load(scratch + 2 + bank * rows + row_of, mask=row_of < rows, other=0)
    fields = table + place.to(tl.int64) * FIELDS
    live = tl.load(fields + ROWS) > 0
    maps = fields + first_field
    slot_of = tl.load(maps + SLOT_OF).to(INT32)
    position_of = tl.load(maps + POSITION_OF).to(INT32)
    pin_round = tl.load(maps + PIN_ROUND).to(INT32)
    hand_at = tl.load(maps + HAND).to(INT32)
    state = tl.load(fields + STATE).to(INT64)
    slots = tl.where(live, tl.load(maps + SLOTS_MAX), 0).to(tl.int32)
    round_now = tl.load(state + ROUND, mask=live, other=0).to(tl.int32)
    hand = tl.load(hand_at, mask=slots > 0, other=0)
    step = tl.arange(0, BLOCK)  # the first window of the circle is on its way while leaders are numbered
    slot = tl.where(hand + step >= slots, hand + step - slots, hand + step)
    pinned_in = tl.load(pin_round + slot, mask=step < slots, other=round_now)
    tl.store(misses, tl.sum(leaders, axis=0).to(tl.int64), mask=place == 0)

    tl.store(scratch, 1 - bank, mask=place == 0)

    mine = (owner == place) & live
    earlier = tl.sum(((owner >= 0) & (owner < place)).to(tl.int32), axis=0)
    picks_of = scratch + 2 + 2 * rows + earlier * PICKS  # of leaders in order; room for every pick of this place's rows
    positions_of = picks_of + rows * PICKS
    waiting, duplicates = _number_leaders(
        slot_of, selection, source, miss, miss_source, picks_of, positions_of, mine, row_of, leaders, PICKS, BLOCK)  # fmt: skip
    tl.debug_barrier()  # numbers and list are written, the elections read
    if duplicates > 0:
        _number_duplicates(miss, mine, row_of, PICKS, BLOCK)

    taken = 0
    scanned = 0
    ended = hand
    while (taken < waiting) & (scanned < slots):
        free = pinned_in != round_now
        order = tl.cumsum(free.to(tl.int32), axis=0)  # of a free slot in this window, from 1
        chosen = free & (taken + order <= waiting)
        pick = tl.load(picks_of + taken + order - 1, mask=chosen, other=0)
        position = tl.load(positions_of + taken + order - 1, mask=chosen, other=0)
        held = tl.load(position_of + slot, mask=chosen, other=-1)
        tl.store(slot_of + held, tl.full((BLOCK,), -1, tl.int32), mask=held >= 0)
        tl.store(slot_of + position, slot, mask=chosen)
        tl.store(position_of + slot, position, mask=chosen)
        tl.store(pin_round + slot, round_now, mask=chosen)
        tl.store(fill + pick, slot, mask=chosen)
        # The last slot chosen has the largest step and the largest order: one reduction finds both.
        newest = tl.max(tl.where(chosen, (step - scanned + 1) * 65536 + order, 0), axis=0)
        ended = tl.where(newest > 0, hand + scanned + newest // 65536, ended)
        taken += newest % 65536
        scanned += BLOCK
        step += BLOCK
        slot = tl.where(hand + step >= slots, hand + step - slots, hand + step)
        pinned_in = tl.load(pin_round + slot, mask=(step < slots) & (taken < waiting), other=round_now)
    tl.store(hand_at, ended % tl.maximum(slots, 1), mask=taken > 0)
    while taken < waiting:  # read through, not kept: the election is undone
        order = taken + tl.arange(0, BLOCK)
        position = tl.load(positions_of + order, mask=order < waiting, other=0)
        tl.store(slot_of + position, tl.full((BLOCK,), -1, tl.int32), mask=order < waiting)
        taken += BLOCK


@triton.jit
def _clear(table, place_of, fill, first_field, FIELDS: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    filled = fill + row * PICKS + column
    slot = tl.load(filled, mask=column < PICKS, other=-1)
    tl.store(filled, tl.full((BLOCK,), -1, tl.int32), mask=column < PICKS)
    place = tl.load(place_of + row).to(tl.int64)
    fields = table + tl.maximum(place, 0) * FIELDS
    chosen = (slot >= 0) & (place >= 0) & (tl.load(fields + ROWS) > 0)
    slot_of = tl.load(fields + first_field + SLOT_OF).to(INT32)
    position_of = tl.load(fields + first_field + POSITION_OF).to(INT32)
    position = tl.load(position_of + slot, mask=chosen, other=-1)
    tl.store(slot_of + position, tl.full((BLOCK,), -1, tl.int32), mask=position >= 0)
    tl.store(position_of + slot, tl.full((BLOCK,), -1, tl.int32), mask=chosen)


@triton.jit
def _unmap_span(slot_of, position_of, start, slots, position, BLOCK: tl.constexpr):
    slot = start + tl.arange(0, BLOCK)
    held = tl.load(position_of + slot, mask=slot < slots, other=-1)
    gone = (slot < slots) & (held >= position)
    tl.store(slot_of + held, tl.full((BLOCK,), -1, tl.int32), mask=gone & (held >= 0))
    tl.store(position_of + slot, tl.full((BLOCK,), -1, tl.int32), mask=gone)


@triton.jit(do_not_specialize=["position"])
def _unmap(slot_of, position_of, slots, position, BLOCK: tl.constexpr):
    _unmap_span(slot_of, position_of, tl.program_id(0) * BLOCK, slots, position, BLOCK)


@triton.jit(do_not_specialize=["position"])
def _unmap_place(fields, position, FIRST: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    maps = fields + FIRST + tl.program_id(0) * STRIDE
    slot_of = tl.load(maps + SLOT_OF).to(INT32)
    position_of = tl.load(maps + POSITION_OF).to(INT32)
    slots = tl.load(maps + SLOTS_MAX).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    while start < slots:
        _unmap_span(slot_of, position_of, start, slots, position, BLOCK)
        start += tl.num_programs(1) * BLOCK


PLACES_TILE = 128
PICKS_TILE = 128  # picks a program of the first launch, one a thread: 16 programs a row of 2,048
SETTLE_TILE_MAX = 2048  # picks, and slots, a program of the second launch looks at together
UNMAP_TILE = 1024
UNMAP_PROGRAMS = 32  # a group; they share its slots, whose number only the device knows


def _tile(picks: int, most: int) -> int:
    return min(int(triton.next_power_of_2(picks)), most)


def begin_round(table: Tensor) -> None:
    """See kernels/round."""
    places, fields = table.shape
    _begin[(triton.cdiv(places, PLACES_TILE),)](table, places, fields, PLACES_TILE)


def plan_round(
    table: Tensor, table_layout: TableLayout, block_layout: BlockLayout, group: int, place_of: Tensor, mirrored: Tensor, plan: RoundPlan
) -> None:
    """See kernels/round. Two launches; capturable."""
    if plan.rows == 0 or plan.picks == 0:
        plan.forget()
        return
    assert plan.rows * plan.picks < 2**31 - 3, f"{plan.rows} rows of {plan.picks} picks do not fit 32-bit pick numbers"
    tile = _tile(plan.picks, PICKS_TILE)
    places, fields = table.shape
    first_field = table_layout.group(group, 0)
    _look_up[(plan.rows, triton.cdiv(plan.picks, tile))](
        table, place_of, mirrored, plan.selection, plan.slot, plan.fill, plan.miss, plan.source, plan.miss_source, plan.scratch,
        plan.rows, first_field, fields, plan.picks, block_layout.row.row_bytes, block_layout.block_bytes, tile, num_warps=4,
    )  # fmt: skip
    _settle[(places,)](
        table, place_of, plan.selection, plan.fill, plan.miss, plan.source, plan.misses, plan.miss_source, plan.scratch,
        plan.rows, first_field, fields, plan.picks, _tile(plan.picks, SETTLE_TILE_MAX), triton.next_power_of_2(plan.rows), num_warps=8,
    )  # fmt: skip


def clear_round(table: Tensor, table_layout: TableLayout, group: int, place_of: Tensor, plan: RoundPlan) -> None:
    """See kernels/round."""
    if plan.rows == 0 or plan.picks == 0:
        return
    tile = _tile(plan.picks, PICKS_TILE)
    grid = (plan.rows, triton.cdiv(plan.picks, tile))
    _clear[grid](table, place_of, plan.fill, table_layout.group(group, 0), table.shape[1], plan.picks, tile)


def unmap_positions(slot_of: Tensor, position_of: Tensor, position: int) -> None:
    """See kernels/round. Not captured: `position` is a host value."""
    slots = position_of.shape[0]
    if slots:
        _unmap[(triton.cdiv(slots, UNMAP_TILE),)](slot_of, position_of, slots, position, UNMAP_TILE)


def unmap_from(table: Tensor, table_layout: TableLayout, place: int, position: int) -> None:
    """See kernels/round. Not captured: `position` is a host value."""
    grid = (table_layout.groups, UNMAP_PROGRAMS)
    _unmap_place[grid](table[place], position, TableField.GROUPS, GROUP_FIELDS, UNMAP_TILE)


_FIELDS = TableLayout(22).fields
_MAPS = {"table": "*i64", "place_of": "*i32", "selection": "*i32", "fill": "*i32", "first_field": "i32", "FIELDS": _FIELDS, "PICKS": 2048}
_PLAN = {**_MAPS, "miss": "*i32", "source": "*i64", "miss_source": "*i64", "scratch": "*i32"}
_LOOK_UP = {**_PLAN, "mirrored": "*i64", "slot": "*i32", "ROW_BYTES": 656, "BLOCK_BYTES": 3636736, "BLOCK": PICKS_TILE}
_SETTLE = {**_PLAN, "misses": "*i64", "BLOCK": SETTLE_TILE_MAX, "num_warps": 8}
_BEGIN = {"table": "*i64", "FIELDS": _FIELDS, "BLOCK": PLACES_TILE}
COMPILE = [
    (_begin, {**_BEGIN, "places": "i32"}),
    (_begin, {**_BEGIN, "places": 1}),  # Triton makes a constant of an argument that is 1
    (_look_up, {**_LOOK_UP, "rows_all": "i32"}),
    (_look_up, {**_LOOK_UP, "rows_all": 1}),
    (_settle, {**_SETTLE, "rows": "i32", "ROWS_PADDED": 64}),
    (_settle, {**_SETTLE, "rows": 1, "ROWS_PADDED": 1}),
    (_clear, {**{name: _MAPS[name] for name in _MAPS if name != "selection"}, "BLOCK": PICKS_TILE}),
    (_unmap, {"slot_of": "*i32", "position_of": "*i32", "slots": "i32", "position": "i32", "BLOCK": UNMAP_TILE}),
    (_unmap_place, {"fields": "*i64", "position": "i32", "FIRST": TableField.GROUPS, "STRIDE": GROUP_FIELDS, "BLOCK": UNMAP_TILE}),
]
