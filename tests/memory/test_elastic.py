"""Hot caches beyond their usual size: what they take of the pool, and which rows they keep when they are replaced."""

import random

import pytest
import torch

from memory.elastic import HotCaches, keep_rows
from memory.hot import HotCache
from memory.ledger import Ledger
from memory.pool import Pool, allocated
from tests.memory.memory_world import LAYOUT

CPU = torch.device("cpu")
ROW = LAYOUT.row.row_bytes
POSITIONS, USUAL = 640, 16


def cost(slots: int) -> int:
    """Allocated bytes of caches of so many slots."""
    return sum(allocated(HotCache.bytes_needed(len(group), slots, POSITIONS, ROW)) for group in LAYOUT.groups)


def pool_of(budget: int | None) -> Pool:
    return Pool(CPU, budget, Ledger())


def take(pool: Pool, margin: int | None = 0) -> HotCaches:
    return HotCaches.take(pool, LAYOUT, POSITIONS, USUAL, margin)


def slots_of(found: HotCaches) -> int:
    (slots,) = {cache.slots.shape[1] for cache in found.caches}
    return slots


@pytest.mark.parametrize(("beside", "margin"), [(0, 0), (1 << 20, 0), (5000, 5000)])
def test_with_memory_to_spare_there_is_a_slot_for_every_position(beside: int, margin: int) -> None:
    """Caches as large as the history, beside what a shrink will need and the margin; nothing more is taken."""
    rounding = len(LAYOUT.groups) * 96
    pool = pool_of(cost(POSITIONS) + cost(USUAL) + beside + rounding)
    found = take(pool, margin)
    assert slots_of(found) == POSITIONS
    held = pool.statistics()
    assert (held.allocated_bytes, held.reserved_bytes) == (cost(POSITIONS), cost(USUAL))
    assert found.extra_bytes == cost(POSITIONS)  # usual ones are reserved beside


def test_what_is_spared_bounds_the_slots() -> None:
    """With a little less than a whole history takes there are a few slots less, and the margin stays free to the byte."""
    margin = 4321
    pool = pool_of(cost(500) + cost(USUAL) + margin)
    found = take(pool, margin)
    assert 480 <= slots_of(found) <= 500
    spare = pool.spare_bytes()
    assert spare is not None
    assert spare >= margin


@pytest.mark.parametrize("budget", [cost(USUAL), cost(USUAL) + cost(18), 2 * cost(USUAL) + 100, None])
def test_without_memory_worth_taking_caches_are_the_usual(budget: int | None) -> None:
    """Scarce memory, or a pool without a limit, which says nothing of what is to spare: usual caches, nothing reserved beside them."""
    pool = pool_of(budget)
    found = take(pool)
    assert slots_of(found) == USUAL
    assert found.extra_bytes == 0
    held = pool.statistics()
    assert (held.allocated_bytes, held.reserved_bytes) == (cost(USUAL), 0)
    found.shrink()
    assert slots_of(found) == USUAL


def test_caches_that_are_not_elastic_stay_usual() -> None:
    """No margin given: the usual size whatever there is."""
    assert slots_of(take(pool_of(1 << 30), None)) == USUAL


def fill(cache: HotCache, held: dict[int, tuple[int, int]]) -> None:
    """Map slots: slot -> (position, pin); each row's bytes are its position's."""
    for slot, (position, pin) in held.items():
        cache.slot_of[position], cache.position_of[slot], cache.pin_round[slot] = slot, position, pin
        cache.slots[:, slot] = position % 251


def check_rows(cache: HotCache) -> set[int]:
    """Maps are inverse and each held row is its position's. Returns the positions."""
    cache.check_integrity()
    found = set()
    for slot, position in enumerate(cache.position_of.tolist()):
        if position >= 0:
            assert bool((cache.slots[:, slot] == position % 251).all()), f"slot {slot} does not hold row {position}"
            found.add(position)
    return found


@pytest.mark.parametrize("held", [0, 1, USUAL - 1, USUAL, USUAL + 1, 200, POSITIONS])
def test_a_shrink_keeps_the_rows_used_last(held: int) -> None:
    """With no byte of the pool free: usual caches with the rows pinned last, all else unmapped, and exactly the extra bytes freed."""
    pool, draw = pool_of(cost(POSITIONS) + cost(USUAL) + 5000), random.Random(held)
    found = take(pool)
    expected = []
    for cache in found.caches:
        slots, positions = draw.sample(range(POSITIONS), held), draw.sample(range(POSITIONS), held)
        pins = draw.sample(range(2000), held)
        fill(cache, dict(zip(slots, zip(positions, pins, strict=True), strict=True)))
        empty = next((slot for slot in range(POSITIONS) if slot not in slots), None)
        if empty is not None:  # a cut unmapped it and left its pin, of the last round of all
            cache.pin_round[empty] = 5000
        expected.append({position for _, position in sorted(zip(pins, positions, strict=True))[-USUAL:]} if held else set())
    spare = pool.spare_bytes()
    assert spare is not None
    rest = pool.take(spare // 64 * 64, "somebody")
    extra = found.extra_bytes
    found.shrink()
    assert [check_rows(cache) for cache in found.caches] == expected
    assert pool.spare_bytes() == spare % 64 + extra
    assert (slots_of(found), found.extra_bytes) == (USUAL, 0)
    pool.give(rest)
    found.give()
    held_now = pool.statistics()
    assert (held_now.allocated_bytes, held_now.reserved_bytes) == (0, 0)
    pool.check_integrity()


@pytest.mark.parametrize(("before", "behind"), [(20, 30), (30, 20), (20, 20)])
def test_rows_move_to_caches_of_another_size(before: int, behind: int) -> None:
    """To a longer session's cache, larger or smaller, go the rows that fit, and their pins."""
    old, new = (
        HotCache(2, slots, positions, ROW, take=lambda size, owner: torch.zeros(size, dtype=torch.uint8))
        for slots, positions in ((before, 50), (behind, 70))
    )
    fill(old, {slot: (slot + 20, 100 - slot) for slot in range(before)})
    old.hand.fill_(3)
    keep_rows(old, new)
    assert check_rows(new) == {slot + 20 for slot in range(min(before, behind))}
    assert int(new.pin_round.max()) == 100
    assert int(new.hand) < behind


def test_replacing_gives_the_old_back() -> None:
    """Caches that took another's place leave it with nothing, and the pool holds one set."""
    pool = pool_of(1 << 20)
    found, larger = take(pool, None), HotCaches.take(pool, LAYOUT, 2 * POSITIONS, USUAL, 0)
    fill(found.caches[0], {3: (9, 1)})
    slots = slots_of(larger)
    found.replace(larger)
    assert larger.caches == []
    assert slots_of(found) == slots > USUAL
    assert check_rows(found.caches[0]) == {9}
    larger.give()
    found.give()
    found.give()
    held = pool.statistics()
    assert (held.allocated_bytes, held.reserved_bytes, held.buffers) == (0, 0, 0)
