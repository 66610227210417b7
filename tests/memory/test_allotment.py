"""Allotments: what a session holds and may still take of a store."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from memory.allotment import Allotment, kept_for_cut
from memory.arena import Arena, BlockId
from memory.errors import ArenaFull
from memory.ledger import Ledger
from tests.memory.memory_world import LAYOUT


def arena(blocks: int) -> Arena:
    return Arena(LAYOUT, blocks * LAYOUT.block_bytes, Ledger())


def test_an_admitted_session_never_runs_out() -> None:
    """With the rest of the store taken by others, all units up to the maximum can still be had, and no more."""
    store = arena(5)
    mine = Allotment(store, 3)
    store.take(), store.take()
    with pytest.raises(ArenaFull):
        store.take()
    assert mine.ensure(2) == 0
    assert mine.ensure(3) == 2
    assert len(set(mine.ids)) == 3
    with pytest.raises(AssertionError, match="4 units of an allotment of 3"):
        mine.ensure(4)


def test_cut_units_stay_ours_until_trim() -> None:
    """Cut units stay taken, `trim` frees them, and through both the entitlement to as many stays."""
    store = arena(3)
    mine = Allotment(store, 3)
    mine.ensure(3)
    mine.cut(1)
    assert store.statistics().free == 0
    mine.trim()
    assert (store.statistics().free, store.available) == (2, 0)
    assert mine.ensure(3) == 1
    mine.check_integrity()


def test_shared_units_are_never_reused() -> None:
    """A cut releases a unit that others share, at once, and new rows get another one."""
    store = arena(3)
    mine = Allotment(store, 2)
    mine.ensure(2)
    shared = mine.share(2)
    mine.cut(1)
    assert store.references(shared[1]) == 1
    mine.ensure(2)
    assert mine.ids[1] not in shared
    assert mine.ids[0] == shared[0]
    mine.check_integrity()


def test_room_kept_for_a_cut_leaves_the_entitlement_whole() -> None:
    """A grow that asks with the cut's room is refused where one of the two is missing, and lasts through the cut where both are there."""
    for spare in (0, 1, 2):
        store = arena(5 + spare)
        other = Allotment(store, 2)
        other.ensure(2)
        mine = Allotment(store, 3, other.share(2))
        mine.ensure(3)
        theirs = Allotment(store, 2)
        if spare < 2:
            with pytest.raises(ArenaFull), kept_for_cut(mine, 1, 4):
                mine.grow(4)
            assert (mine.units_max, store.available) == (3, spare)
            continue
        with kept_for_cut(mine, 1, 4):
            mine.grow(4)
        store.release(mine.replace(1))
        mine.cut(2)
        mine.trim()
        assert (mine.ensure(4), mine.lacking, store.available) == (2, 0, 0)
        theirs.check_integrity()
        mine.check_integrity()


def test_without_room_for_a_shared_unit_the_entitlement_shrinks() -> None:
    """If the store cannot replace a shared unit that was cut, the next ensure raises and `grow` asks for it again."""
    store = arena(2)
    mine = Allotment(store, 2)
    mine.ensure(2)
    shared = mine.share(2)
    mine.cut(0)
    with pytest.raises(ArenaFull):
        mine.ensure(1)
    with pytest.raises(ArenaFull):
        mine.grow(2)
    for block in shared:
        store.release(block)
    mine.grow(2)
    assert mine.ensure(2) == 0
    mine.check_integrity()


def test_a_grow_that_fails_or_is_undone_changes_nothing() -> None:
    """After a refused grow, and after an undone one, store and allotment are as before."""
    store = arena(4)
    mine = Allotment(store, 2)
    mine.ensure(1)
    before = store.statistics()
    with pytest.raises(ArenaFull) as caught:
        mine.grow(5)
    assert caught.value.missing_bytes == LAYOUT.block_bytes
    assert store.statistics() == before
    undo = mine.grow(4)
    assert store.available == 0
    undo()
    assert store.statistics() == before
    assert mine.units_max == 2


class AllotmentLife(RuleBasedStateMachine):
    """Two allotments of one store that grow, are cut, share with each other and close."""

    def __init__(self) -> None:
        super().__init__()
        self.store = arena(12)
        self.pair = [Allotment(self.store, 4), Allotment(self.store, 4)]
        self.kept: list[BlockId] = []  # references held outside
        self.may_lack = [False, False]  # a unit was cut while somebody shared it

    @rule(which=st.integers(0, 1), units=st.integers(0, 8))
    def ensure(self, which: int, units: int) -> None:
        mine = self.pair[which]
        units = min(units, mine.units_max)
        before = list(mine.ids)
        try:
            first = mine.ensure(units)
        except ArenaFull:
            assert self.may_lack[which], "an allotment whose units nobody shared ran out"
            return
        assert first == len(before)
        assert mine.ids[:first] == before
        assert len(mine.ids) == max(units, len(before))

    @rule(which=st.integers(0, 1), part=st.floats(0, 1))
    def cut(self, which: int, part: float) -> None:
        mine = self.pair[which]
        kept = mine.ids[: int(part * len(mine.ids))]
        self.may_lack[which] |= any(unit in self.kept for unit in mine.ids[len(kept) :])
        mine.cut(len(kept))
        assert mine.ids == kept

    @rule(which=st.integers(0, 1))
    def trim(self, which: int) -> None:
        self.pair[which].trim()

    @rule(which=st.integers(0, 1), part=st.floats(0, 1))
    def share(self, which: int, part: float) -> None:
        mine = self.pair[which]
        self.kept += mine.share(int(part * len(mine.ids)))

    @rule(which=st.integers(0, 1), part=st.floats(0, 0.99))
    def replace(self, which: int, part: float) -> None:
        mine = self.pair[which]
        shared = [index for index, unit in enumerate(mine.ids) if unit in self.kept]
        if not shared:
            return
        index = shared[int(part * len(shared))]
        before = list(mine.ids)
        try:
            self.kept.append(mine.replace(index))
        except ArenaFull:
            assert mine.ids == before
            return
        self.may_lack[which] = True
        assert self.kept[-1] == before[index]
        assert mine.ids[:index] + mine.ids[index + 1 :] == before[:index] + before[index + 1 :]
        assert self.store.references(mine.ids[index]) == 1

    @rule(which=st.integers(0, 1))
    def rest(self, which: int) -> None:
        mine = self.pair[which]
        mine.trim()
        available = self.store.available
        given = mine.rest()
        assert self.store.available == available + given
        assert mine.units_max == len(mine.ids)

    @rule()
    def let_go(self) -> None:
        for block in self.kept:
            self.store.release(block)
        self.kept = []

    @rule(which=st.integers(0, 1), units=st.integers(0, 3))
    def grow(self, which: int, units: int) -> None:
        before = self.store.statistics()
        try:
            self.pair[which].grow(self.pair[which].units_max + units)
        except ArenaFull:
            assert self.store.statistics() == before

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.pair[which].close()
        self.pair[which] = Allotment(self.store, min(3, self.store.available))
        self.may_lack[which] = False

    @invariant()
    def whole(self) -> None:
        self.store.check_integrity()
        for mine in self.pair:
            mine.check_integrity()
        held = [*self.pair[0].ids, *self.pair[1].ids, *self.kept]
        assert all(self.store.references(block) == held.count(block) for block in held)

    def teardown(self) -> None:
        self.let_go()
        for mine in self.pair:
            mine.close()
        self.store.close()


def test_any_life_of_two_allotments_keeps_the_store_whole() -> None:
    """References equal holders after every step, entitlements hold while nobody shares, and closing leaves the store empty."""
    run_state_machine_as_test(AllotmentLife, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
