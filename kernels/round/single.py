"""The plan of a step of one row in one launch: look-up and settling by one program, with a barrier where `kernel.py` has two launches.

Decoding one session without drafts plans this way; results are those of `kernel.py` and of the reference, bit for bit.

Invariants:
1. Between the election and the reading of its outcome, and between lists and their readers, stands a barrier; the slot map is read past
   the first-level cache, because the election's atomics work behind it.
2. No two threads store to one address of the plan between two barriers.

Latency is all there is to it: what two launches load twice (table, selection, codes) stays in registers here.
"""

import triton
import triton.language as tl

from kernels.layout import BLOCK_ROWS, RING_BLOCKS, GroupField, StateField, TableField, TableLayout

__all__ = ["PICKS_MAX", "plan_row"]

PICKS_MAX = 4096  # picks that one program holds in registers
LEAST = tl.constexpr(-(2**31))
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
def _take_victims(slot_of, position_of, pin_round, hand_at, fill, picks_of, positions_of, waiting, slots, round_now, hand,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Hand free slots, from the hand on, to the leaders in order; those that get none leave the map."""
    step = tl.arange(0, BLOCK)
    taken = 0
    scanned = 0
    ended = hand
    while (taken < waiting) & (scanned < slots):
        slot = tl.where(hand + step >= slots, hand + step - slots, hand + step)
        pinned_in = tl.load(pin_round + slot, mask=step < slots, other=round_now)
        held = tl.load(position_of + slot, mask=step < slots, other=-1)
        free = pinned_in != round_now
        order = tl.cumsum(free.to(tl.int32), axis=0)  # of a free slot in this window, from 1
        chosen = free & (taken + order <= waiting)
        pick = tl.load(picks_of + taken + order - 1, mask=chosen, other=0)
        position = tl.load(positions_of + taken + order - 1, mask=chosen, other=0)
        tl.store(slot_of + held, tl.full((BLOCK,), -1, tl.int32), mask=chosen & (held >= 0))
        tl.store(slot_of + position, slot, mask=chosen)
        tl.store(position_of + slot, position, mask=chosen)
        tl.store(pin_round + slot, round_now, mask=chosen)
        tl.store(fill + pick, slot, mask=chosen)
        newest = tl.max(tl.where(chosen, (step - scanned + 1) * 65536 + order, 0), axis=0)
        ended = tl.where(newest > 0, hand + scanned + newest // 65536, ended)
        taken += newest % 65536
        scanned += BLOCK
        step += BLOCK
    tl.store(hand_at, ended % tl.maximum(slots, 1), mask=taken > 0)
    while taken < waiting:  # read through, not kept: the election is undone
        order = taken + tl.arange(0, BLOCK)
        position = tl.load(positions_of + order, mask=order < waiting, other=0)
        tl.store(slot_of + position, tl.full((BLOCK,), -1, tl.int32), mask=order < waiting)
        taken += BLOCK


# Without alignment hints a thread's elements are a warp apart in every tensor alike, and no layout is converted through shared memory.
@triton.jit(do_not_specialize_on_alignment=["selection", "slot", "fill", "miss", "source", "miss_source", "scratch"])
def plan_row(
    table, place_of, mirrored, selection, slot, fill, miss, source, misses, miss_source, scratch, first_field, FIELDS: tl.constexpr,
    PICKS: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pick = tl.arange(0, BLOCK)
    inside = pick < PICKS
    position = tl.load(selection + pick, mask=inside, other=-1)
    place = tl.load(place_of).to(tl.int64)
    fields = table + tl.maximum(place, 0) * FIELDS
    rows = tl.load(fields + ROWS)
    live = (place >= 0) & (rows > 0)
    maps = fields + first_field
    slot_of = tl.load(maps + SLOT_OF, mask=live, other=0).to(INT32)
    position_of = tl.load(maps + POSITION_OF, mask=live, other=0).to(INT32)
    pin_round = tl.load(maps + PIN_ROUND, mask=live, other=0).to(INT32)
    hand_at = tl.load(maps + HAND, mask=live, other=0).to(INT32)
    slots = tl.load(maps + SLOTS_MAX, mask=live, other=0).to(tl.int32)
    blocks = tl.load(fields + BLOCKS, mask=live, other=0).to(INT64)
    ring = tl.load(fields + RING, mask=live, other=0)
    state = tl.load(fields + STATE, mask=live, other=0).to(INT64)
    snapshot = tl.load(mirrored + tl.maximum(place, 0), mask=live, other=0)
    end = tl.load(state + LOGICAL, mask=live, other=0) + rows
    round_now = tl.load(state + ROUND, mask=live, other=0).to(tl.int32)
    hand = tl.load(hand_at, mask=slots > 0, other=0)

    used = inside & live & (position >= 0)
    old = used & (position < snapshot)
    recent = used & (position >= snapshot) & (position < end) & (ring != 0)
    entry = tl.load(slot_of + position, mask=old, other=0, cache_modifier=".cg")
    hit = old & (entry >= 0)
    block = tl.load(blocks + position // B_ROWS, mask=old & (entry < 0), other=0)
    missing = old & (entry < 0) & (block != 0)
    tl.store(pin_round + entry, round_now, mask=hit)
    tl.atomic_min(slot_of + position, LEAST + pick, mask=missing, sem="relaxed")
    start = tl.where(missing, block, ring + position // B_ROWS % R_BLOCKS * tl.full((), BLOCK_BYTES, tl.int64))
    address = start + (position % B_ROWS * ROW_BYTES).to(tl.int64)
    tl.store(source + pick, tl.where(recent | missing, address, 0), mask=inside)
    tl.store(slot + pick, tl.where(hit, entry, -1), mask=inside)
    tl.store(fill + pick, tl.full((BLOCK,), -1, tl.int32), mask=inside)
    tl.debug_barrier()  # every election is over, every hit is pinned

    leader = tl.load(slot_of + position, mask=missing, other=0, cache_modifier=".cg") - LEAST
    leads = missing & (leader == pick)
    follows = missing & (leader != pick)
    number = tl.cumsum(leads.to(tl.int32), axis=0) - 1
    kinds = leads.to(tl.int64) + (follows.to(tl.int64) << 16) + (hit.to(tl.int64) << 32) + (recent.to(tl.int64) << 48)
    counts = tl.sum(kinds, axis=0)  # four sums of at most BLOCK each in one reduction
    waiting = (counts & 65535).to(tl.int32)
    duplicates = (counts >> 16) & 65535
    picks_of, positions_of = scratch + 4, scratch + 4 + PICKS
    tl.store(miss + pick, tl.where(leads, number, -1), mask=inside & (follows == 0))
    tl.store(miss_source + number, address, mask=leads)
    tl.store(miss_source + pick, tl.zeros((BLOCK,), tl.int64), mask=inside & (pick >= waiting))
    tl.store(picks_of + number, pick, mask=leads)
    tl.store(positions_of + number, position, mask=leads)
    tl.store(misses, waiting.to(tl.int64))
    tl.atomic_add(state + HITS, (counts >> 32) & 65535, mask=live, sem="relaxed")
    tl.atomic_add(state + MISSES, waiting.to(tl.int64) + duplicates, mask=live, sem="relaxed")
    tl.atomic_add(state + RING_READS, (counts >> 48) & 65535, mask=live, sem="relaxed")
    tl.debug_barrier()  # numbers and lists are written
    if duplicates > 0:
        tl.store(miss + pick, tl.load(miss + leader, mask=follows, other=0), mask=follows)
    if waiting > 0:
        _take_victims(slot_of, position_of, pin_round, hand_at, fill, picks_of, positions_of, waiting, slots, round_now, hand, BLOCK)


_PLAN = {
    **dict.fromkeys(("place_of", "selection", "slot", "fill", "miss", "scratch"), "*i32"),
    **dict.fromkeys(("table", "mirrored", "source", "misses", "miss_source"), "*i64"),
    "first_field": "i32",
}
COMPILE = [
    (plan_row, {**_PLAN, "FIELDS": TableLayout(22).fields, "PICKS": 2048, "ROW_BYTES": 656, "BLOCK_BYTES": 3636736, "BLOCK": 2048,
                "num_warps": 8}),
]  # fmt: skip
