"""The hot cache: one buffer, maps that stay whole through any life, and checks that notice when they are not."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from kernels.layout import GROUP_FIELDS, GroupField, StateField
from kernels.round import clear_round, unmap_from
from memory.hot import HotCache
from tests.kernels.round_world import LAYOUT, TABLE_LAYOUT, PlainSession, Step, take

SLOTS = 4


class HotCacheLife(RuleBasedStateMachine):
    """A session that grows, is copied back, decodes, fails, is truncated and cleared; the maps are checked after every step.

    Every completed step compares each pick of each layer with the row itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.session = PlainSession(160, SLOTS, seed=3)
        self.session.grow(1, 0)

    @rule(rows=st.integers(1, 70))
    def grow(self, rows: int) -> None:
        self.session.grow(min(self.session.logical + rows, 159), self.session.mirrored)

    @rule(part=st.floats(0, 1))
    def mirror(self, part: float) -> None:
        mirrored = self.session.mirrored + int(part * (self.session.logical - self.session.mirrored))
        self.session.grow(self.session.logical, mirrored)

    def _step(self, picks: list[int], rows: int) -> Step:
        """Picks as draws in 0..15: near the end, near the start, or unused."""
        end = self.session.logical
        positions = [-1 if pick == 15 else (end - 1 - pick) % end if pick < 5 else pick % end for pick in picks]
        width = max(len(positions) // rows, 1)
        padded = positions + [-1] * rows * width
        return Step([self.session], [0] * rows, [padded[row * width : (row + 1) * width] for row in range(rows)])

    @rule(picks=st.lists(st.integers(0, 15), max_size=12), rows=st.integers(1, 3), scratch_rows=st.sampled_from([None, 0, 2, 12]))
    def decode(self, picks: list[int], rows: int, scratch_rows: int | None) -> None:
        self._step(picks, rows).run(scratch_rows)

    @rule(picks=st.lists(st.integers(0, 15), max_size=12), layers=st.integers(0, 2))
    def fail(self, picks: list[int], layers: int) -> None:
        """A step that gathers some layers and stops: its plans are cleared, as a failed step's are."""
        step = self._step(picks, 1).begin()
        for group, members in enumerate(LAYOUT.groups):
            step.plan_group(group)
            for layer_in_group, layer in enumerate(members):
                if layer < layers:
                    step.gather(group, layer_in_group)
            if layers <= members[-1]:
                clear_round(step.table.tensor, TABLE_LAYOUT, group, step.place_of, step.plan)

    @precondition(lambda self: self.session.mirrored > 0)
    @rule(part=st.floats(0, 1), through_table=st.booleans())
    def truncate(self, part: float, through_table: bool) -> None:
        kept = int(part * self.session.mirrored)
        if through_table:
            unmap_from(Step([self.session], [0], [[-1]]).table.tensor, TABLE_LAYOUT, 0, kept)
        else:
            for hot in self.session.hot:
                hot.unmap_from(kept)
        self.session.state[: StateField.MIRRORED + 1] = kept
        self.session.check()
        self.session.truth[:, kept:] += 1  # other rows follow: a stale slot would serve the old ones
        self.session.grow(max(kept, 1), kept)

    @rule()
    def clear(self) -> None:
        for hot in self.session.hot:
            hot.clear()

    @invariant()
    def maps_are_whole_and_slots_hold_their_rows(self) -> None:
        self.session.check()


def test_maps_survive_any_life() -> None:
    """No order of growth, copyback, steps, failures, truncations and clears breaks a map or serves another row."""
    run_state_machine_as_test(HotCacheLife, settings=settings(max_examples=25, stateful_step_count=16, deadline=None, derandomize=True))


def cache(slots: int = 5, positions: int = 100) -> HotCache:
    return HotCache(2, slots, positions, 32, take=take)


def test_the_buffer_is_taken_once_at_its_exact_size() -> None:
    """One call of `take`, for the bytes that `bytes_needed` says, under the owner's name; parts are aligned and do not overlap."""
    calls = []

    def counted(size: int, owner: str) -> Tensor:
        calls.append((size, owner))
        return take(size, owner)

    made = HotCache(2, 5, 101, 48, take=counted, owner="session 7")
    assert calls == [(2 * 5 * 48 + 416 + 32 + 32 + 16, "session 7")]
    assert calls[0][0] == HotCache.bytes_needed(2, 5, 101, 48) == made.buffer.numel()
    parts = [made.slots, made.slot_of, made.position_of, made.pin_round, made.hand]
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    for part, end in zip(parts[1:], ends, strict=False):
        assert part.data_ptr() % 16 == 0
        assert end <= part.data_ptr()
    assert ends[-1] <= made.buffer.data_ptr() + made.buffer.numel()


def test_a_cache_that_finds_no_room_raises_what_take_raised() -> None:
    """An allocator's refusal passes through."""

    def refuse(size: int, owner: str) -> Tensor:
        raise MemoryError(f"{size} bytes for {owner}")

    with pytest.raises(MemoryError, match="bytes for hot"):
        HotCache(1, 1, 1, 16, take=refuse)


def test_fields_stand_in_table_order() -> None:
    """The table's fields are the addresses of the parts and the slot count."""
    made = cache()
    fields = made.table_fields()
    assert len(fields) == GROUP_FIELDS
    assert fields[GroupField.SLOTS] == made.slots.data_ptr()
    assert fields[GroupField.SLOT_OF] == made.slot_of.data_ptr()
    assert fields[GroupField.POSITION_OF] == made.position_of.data_ptr()
    assert fields[GroupField.PIN_ROUND] == made.pin_round.data_ptr()
    assert fields[GroupField.HAND] == made.hand.data_ptr()
    assert fields[GroupField.SLOTS_MAX] == 5


def test_maps_are_int32() -> None:
    """Positions pass 32,767 in maps of a million."""
    made = cache(positions=2**20)
    made.slot_of[2**20 - 1], made.position_of[0] = 0, 2**20 - 1
    made.check_integrity(mirrored=2**20)
    assert made.slot_of.dtype == made.position_of.dtype == made.pin_round.dtype == torch.int32
    assert made.statistics(1).map_bytes == 4 * 2**20 + 32 + 32 + 16


def test_statistics_count_what_is_held() -> None:
    """Slots, mapped slots and the bytes of each part; clearing maps nothing."""
    made = cache()
    for slot, position in ((0, 7), (4, 99)):
        made.slot_of[position], made.position_of[slot] = slot, position
    held = made.statistics(int(made.mapped()))
    assert (held.slots, held.mapped, held.row_bytes, held.map_bytes) == (5, 2, 2 * 5 * 32, 400 + 32 + 32 + 16)
    made.hand.fill_(3)
    made.clear()
    assert int(made.mapped()) == 0
    assert int(made.hand) == 0
    made.check_integrity(mirrored=0, round_now=0)


def test_unmap_from_keeps_earlier_positions() -> None:
    """Positions below the cut stay, the cut and later ones go."""
    made = cache()
    for slot, position in enumerate((7, 3, 8)):
        made.slot_of[position], made.position_of[slot] = slot, position
    made.unmap_from(7)
    assert made.position_of.tolist() == [-1, 3, -1, -1, -1]
    made.check_integrity(mirrored=7)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda made: made.slot_of.__setitem__(9, 1), "2 positions are mapped, 1 slots hold one"),
        (lambda made: made.slot_of.__setitem__(7, -1), r"slots \[0\] hold positions that are mapped elsewhere"),
        (lambda made: made.position_of.__setitem__(1, 7), r"slots \[1\] hold positions that are mapped elsewhere"),
        (lambda made: made.position_of.__setitem__(0, 100), "position_of holds 100 of 100 positions"),
        (lambda made: made.position_of.__setitem__(2, -2), "position_of holds -2"),
        (lambda made: made.slot_of.__setitem__(3, 5), "slot_of holds 5 of 5 slots"),
        (lambda made: made.slot_of.__setitem__(3, -7), "slot_of holds -7"),
        (lambda made: made.hand.fill_(5), "hand 5 of 5 slots"),
        (lambda made: made.hand.fill_(-1), "hand -1 of 5 slots"),
        (lambda made: made.pin_round.fill_(3), "pinned in round 3, it is 2"),
    ],
)
def test_integrity_notices_each_kind_of_damage(damage: object, message: str) -> None:
    """A map that is not its inverse, a value out of range, a wild hand or a pin from the future raises and names the numbers."""
    made = cache()
    made.slot_of[7], made.position_of[0] = 0, 7
    made.check_integrity(mirrored=8, round_now=2)
    damage(made)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        made.check_integrity(mirrored=8, round_now=2)


def test_integrity_notices_a_position_that_is_not_mirrored() -> None:
    """A slot may not hold the first row that is not in RAM."""
    made = cache()
    made.slot_of[7], made.position_of[0] = 0, 7
    with pytest.raises(AssertionError, match="position 7 is mapped, 7 rows are mirrored"):
        made.check_integrity(mirrored=7)
