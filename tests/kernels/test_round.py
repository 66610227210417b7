"""Plans of a round against the rules told one pick at a time, and the cases that break a careless plan."""

import pytest
import torch

from kernels.layout import BLOCK_ROWS, GroupField, StateField
from kernels.place import NoKernel
from kernels.round import RoundPlan, begin_round, clear_round, plan_round, unmap_from, unmap_positions
from tests.kernels.round_world import LAYOUT, ROW_BYTES, TABLE_LAYOUT, PlainSession, Step


def session(rows: int = 300, mirrored: int = 256, slots: int = 8, seed: int = 0, positions: int = 512) -> PlainSession:
    made = PlainSession(positions, slots, seed)
    made.grow(rows, mirrored)
    return made


class PlainRound:
    """The rules of one session and group, one pick after another, in plain Python."""

    def __init__(self, slots: int) -> None:
        self.position_in = [-1] * slots
        self.pinned_in = [-1] * slots
        self.hand = 0

    def plan(self, round_now: int, mirrored: int, rows: list[list[int]]) -> tuple[list[int], list[int], list[str]]:
        """Slot, fill and kind (unused, ring, hit, lead, duplicate) of each pick, row-major."""
        held = {position: slot for slot, position in enumerate(self.position_in) if position >= 0}
        picks = [position for row in rows for position in row]
        for position in picks:
            if 0 <= position < mirrored and position in held:
                self.pinned_in[held[position]] = round_now
        slots, fills, kinds = [], [], []
        led: set[int] = set()
        for position in picks:
            slot, fill = -1, -1
            if position < 0:
                kind = "unused"
            elif position >= mirrored:
                kind = "ring"
            elif position in held:
                kind, slot = "hit", held[position]
            elif position in led:
                kind = "duplicate"
            else:
                kind = "lead"
                led.add(position)
                fill = self._victim(round_now, position)
            slots.append(slot)
            fills.append(fill)
            kinds.append(kind)
        return slots, fills, kinds

    def _victim(self, round_now: int, position: int) -> int:
        for step in range(len(self.position_in)):
            slot = (self.hand + step) % len(self.position_in)
            if self.pinned_in[slot] != round_now:
                self.pinned_in[slot], self.position_in[slot] = round_now, position
                self.hand = (slot + 1) % len(self.position_in)
                return slot
        return -1


def test_plans_equal_the_rules_told_pick_by_pick() -> None:
    """Over random selections of two sessions with interleaved rows, every plan field, counter, map and hand is the plain rules'."""
    generator = torch.Generator().manual_seed(5)
    sessions = [session(slots=7, seed=1), session(rows=200, mirrored=128, slots=12, seed=2)]
    plain = [PlainRound(7), PlainRound(12)]
    for _ in range(150):
        place_of = torch.randint(0, 2, (6,), generator=generator).tolist()
        ends = torch.tensor([sessions[place].logical for place in place_of])
        selection = (torch.rand(6, 5, generator=generator) * ends[:, None]).int() // 16 * 16  # few positions: many duplicates
        selection[torch.rand(6, 5, generator=generator) < 0.2] = -1
        before = [item.counters() for item in sessions]
        step = Step([*sessions], place_of, selection).begin()
        plan = step.plan_group(0)
        kinds_of = {}
        for place, item in enumerate(sessions):
            mine = [row for row in range(6) if place_of[row] == place]
            if not mine:
                continue
            round_now = int(item.state[StateField.ROUND])
            slots, fills, kinds = plain[place].plan(round_now, item.mirrored, selection[mine].tolist())
            assert plan.slot[mine].flatten().tolist() == slots
            assert plan.fill[mine].flatten().tolist() == fills
            assert item.hot[0].position_of.tolist() == plain[place].position_in
            assert item.hot[0].pin_round.tolist() == plain[place].pinned_in
            assert int(item.hot[0].hand) == plain[place].hand
            counted = (kinds.count("hit"), kinds.count("lead") + kinds.count("duplicate"), kinds.count("ring"))
            assert tuple(now - was for now, was in zip(item.counters(), before[place], strict=True)) == counted
            kinds_of |= {row: kinds[5 * at : 5 * at + 5] for at, row in enumerate(mine)}
            item.check_maps()
        check_misses(step, kinds_of)


def check_misses(step: Step, kinds_of: dict[int, list[str]]) -> None:
    """Distinct misses are numbered by their leaders in row-major order; duplicates share number and source."""
    plan, number, numbers = step.plan, 0, {}
    for row in range(plan.rows):
        for pick, kind in enumerate(kinds_of[row]):
            key = (int(step.place_of[row]), int(step.selection[row, pick]))
            if kind == "lead":
                numbers[key] = number
                assert int(plan.miss_source[number]) == int(plan.source[row, pick])
                number += 1
            missing = kind in ("lead", "duplicate")
            assert int(plan.miss[row, pick]) == (numbers[key] if missing else -1)
            assert (int(plan.source[row, pick]) != 0) == (missing or kind == "ring")
    assert int(plan.misses) == number
    assert not bool(plan.miss_source[number:].any())


def test_duplicates_within_a_row_and_across_rows_share_one_leader() -> None:
    """The first pick of a missing position leads and fills; all others read the same source, fill nothing, and count as misses."""
    one = session()
    plan = Step([one], [0, 0], [[9, 4, 9], [4, -1, 9]]).begin().plan_group()
    assert plan.fill.tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert plan.miss.tolist() == [[0, 1, 0], [1, -1, 0]]
    assert int(plan.source[0, 0]) == int(plan.source[0, 2]) == int(plan.source[1, 2]) == one.blocks[0].data_ptr() + 9 * ROW_BYTES
    assert one.counters() == (0, 5, 0)
    assert one.hot[0].position_of.tolist()[:3] == [9, 4, -1]


def test_a_slot_filled_in_a_round_is_no_hit_in_it() -> None:
    """Within the round a filled position stays a miss on every row; in the next round it is a hit."""
    one = session()
    plan = Step([one], [0, 0, 0], [[7], [7], [7]]).begin().plan_group()
    assert plan.slot.tolist() == [[-1]] * 3
    assert plan.miss.tolist() == [[0]] * 3
    plan = Step([one], [0], [[7]]).begin().plan_group()
    assert plan.slot.tolist() == [[0]]
    assert plan.source.tolist() == [[0]]


def test_a_full_cache_of_hits_reads_misses_through() -> None:
    """When every slot is hit this round, misses are read from RAM, fill nothing, move no hand and evict nobody."""
    one = session(slots=4)
    Step([one], [0], [[0, 1, 2, 3]]).begin().plan_group()
    hand = int(one.hot[0].hand)
    plan = Step([one], [0, 0], [[0, 1, 100], [3, 2, 100]]).begin().plan_group()
    assert plan.slot.tolist() == [[0, 1, -1], [3, 2, -1]]
    assert plan.fill.tolist() == [[-1] * 3] * 2
    assert plan.miss[:, 2].tolist() == [0, 0]
    assert one.hot[0].position_of.tolist() == [0, 1, 2, 3]
    assert int(one.hot[0].hand) == hand
    one.check_maps()


def test_a_hit_that_comes_after_the_misses_is_pinned_before_them() -> None:
    """All hits are pinned before the first victim is taken, wherever they stand in the step."""
    one = session(slots=2)
    Step([one], [0], [[10, 11]]).begin().plan_group()  # slots 0 and 1; the hand is back at 0
    plan = Step([one], [0, 0], [[20, -1], [-1, 10]]).begin().plan_group()
    assert plan.fill.tolist() == [[1, -1], [-1, -1]]
    assert plan.slot.tolist() == [[-1, -1], [-1, 0]]
    assert one.hot[0].position_of.tolist() == [10, 20]


def test_pins_of_an_earlier_round_do_not_hold() -> None:
    """A slot pinned in the round before is a victim now."""
    one = session(slots=2)
    for positions in ([1, 2], [3, 4], [5, 6]):
        plan = Step([one], [0], [positions]).begin().plan_group()
        assert sorted(plan.fill[0].tolist()) == [0, 1]
        one.check_maps()


@pytest.mark.parametrize("picks", [7, 8, 9])
def test_selections_around_the_number_of_slots(picks: int) -> None:
    """hot-1, hot and hot+1 missing positions fill as many slots as there are, in order; the same selection then hits those."""
    one = session(slots=8)
    wanted = list(range(0, 3 * picks, 3))
    plan = Step([one], [0], [wanted]).begin().plan_group()
    assert plan.fill[0].tolist() == (list(range(8)) + [-1] * picks)[:picks]
    plan = Step([one], [0], [wanted]).begin().plan_group()
    assert plan.slot[0].tolist() == (list(range(8)) + [-1] * picks)[:picks]
    assert plan.fill[0].tolist() == [-1] * picks  # every slot is pinned by a hit or, with 7 picks, none is wanted


def test_hot_slots_equal_to_top_k_replace_a_whole_selection() -> None:
    """With exactly top-k slots, two disjoint selections displace one another completely."""
    one = session(slots=4)
    for positions in ([0, 1, 2, 3], [10, 11, 12, 13], [0, 1, 2, 3]):
        plan = Step([one], [0], [positions]).begin().plan_group()
        assert plan.slot[0].tolist() == [-1] * 4
        assert sorted(one.hot[0].position_of.tolist()) == positions
        one.check_maps()


@pytest.mark.parametrize("mirrored", [0, 1, 63, 64, 65, 128, 200])
def test_the_snapshot_divides_ring_from_history(mirrored: int) -> None:
    """Positions below the snapshot are misses from their block, the others ring reads from their place in the ring."""
    one = session(rows=201, mirrored=mirrored)
    positions = [0, 1, 62, 63, 64, 65, 127, 128, 199, 200]
    plan = Step([one], [0], [positions]).begin().plan_group()
    for pick, position in enumerate(positions):
        block, row = divmod(position, BLOCK_ROWS)
        if position < mirrored:
            assert int(plan.source[0, pick]) == one.blocks[block].data_ptr() + row * ROW_BYTES
        else:
            assert int(plan.source[0, pick]) == one.ring.data_ptr() + block % 4 * LAYOUT.block_bytes + row * ROW_BYTES
            assert int(plan.fill[0, pick]) == -1
            assert int(plan.miss[0, pick]) == -1
    assert one.counters() == (0, sum(position < mirrored for position in positions), sum(position >= mirrored for position in positions))


def test_the_snapshot_rules_even_after_mirrored_rose() -> None:
    """A copyback that completes under a step changes nothing for it: the snapshot still sends its rows to the ring."""
    one = session(rows=260, mirrored=192)
    step = Step([one], [0], [[200, 100]])
    one.grow(260, 256)
    plan = step.begin().plan_group()
    assert plan.miss.tolist() == [[-1, 0]]
    assert int(plan.source[0, 0]) == one.ring.data_ptr() + 3 * LAYOUT.block_bytes + 8 * ROW_BYTES


def test_all_unused_changes_nothing() -> None:
    """A selection of -1 only leaves maps, hand and counters alone and every plan field unused."""
    one = session()
    before = [part.clone() for part in (one.hot[0].buffer, one.state)]
    step = Step([one], [0, 0], [[-1, -1], [-1, -1]])
    plan = step.plan_group()
    assert torch.equal(one.hot[0].buffer, before[0])
    assert torch.equal(one.state, before[1])
    assert bool((torch.stack([plan.slot, plan.fill, plan.miss]) == -1).all())
    assert not bool(plan.source.any())
    assert int(plan.misses) == 0


@pytest.mark.parametrize("padding", [1, -1])
def test_padding_rows_are_inert_whatever_they_hold(padding: int) -> None:
    """Rows of a free place or of place -1, with wild positions, come out unused and touch no session."""
    one, alone = session(seed=3), session(seed=3)
    wild = [2**31 - 1, 0, 5]
    plan = Step([one, None], [padding, 0, padding], [wild, [5, -1, 299], wild]).begin().plan_group()
    expected = Step([alone], [0], [[5, -1, 299]]).begin().plan_group()
    for name in ("slot", "fill", "miss"):
        assert torch.equal(getattr(plan, name)[1:2], getattr(expected, name))
        assert bool((getattr(plan, name)[[0, 2]] == -1).all())
    assert not bool(plan.source[[0, 2]].any())
    assert torch.equal(one.state, alone.state)
    assert torch.equal(one.hot[0].slot_of, alone.hot[0].slot_of)


def test_a_place_does_not_depend_on_its_company() -> None:
    """Two sessions in one call, rows interleaved and places permuted, plan as each does alone."""
    generator = torch.Generator().manual_seed(9)
    together = [session(slots=6, seed=1), session(slots=5, seed=2)]
    alone = [session(slots=6, seed=1), session(slots=5, seed=2)]
    for trial in range(30):
        selection = torch.randint(-1, 40, (4, 6), generator=generator).int()
        order = [1, 0, 1, 0] if trial % 2 else [0, 0, 1, 1]
        places = list(together) if trial % 3 else list(reversed(together))
        plan = Step([*places], order, selection).begin().plan_group()
        for place, item in enumerate(places):
            mine = [row for row in range(4) if order[row] == place]
            single = Step([alone[together.index(item)]], [0, 0], selection[mine]).begin().plan_group()
            assert torch.equal(plan.slot[mine], single.slot)
            assert torch.equal(plan.fill[mine], single.fill)
            assert torch.equal(plan.miss[mine] >= 0, single.miss >= 0)
    for mine, other in zip(together, alone, strict=True):
        assert torch.equal(mine.hot[0].slot_of, other.hot[0].slot_of)
        assert torch.equal(mine.state, other.state)


def test_groups_keep_maps_of_their_own() -> None:
    """Planning one group leaves the other's maps alone; both count in the session's state."""
    one = session()
    step = Step([one], [0], [[3, 4]]).begin()
    step.plan_group(0)
    assert bool((one.hot[1].position_of == -1).all())
    step.plan_group(1)
    assert one.hot[1].position_of.tolist()[:2] == [3, 4]
    assert one.counters() == (0, 4, 0)


def test_begin_round_counts_busy_places_once() -> None:
    """ROUND rises by one for every busy place, whatever its rows, and by nothing else."""
    one, two = session(seed=1), session(seed=2)
    begin_round(Step([one, None, two], [0, 0, 2], [[-1]] * 3).table.tensor)
    assert (int(one.state[StateField.ROUND]), int(two.state[StateField.ROUND])) == (1, 1)


def test_clear_round_unmaps_what_the_plan_assigned_and_no_more() -> None:
    """Fills of the plan are unmapped even when the selection was overwritten since; hits and older slots stay; twice is once."""
    one = session(slots=4)
    Step([one], [0], [[1, 2]]).begin().plan_group()
    step = Step([one, None], [0, 1], [[2, 50, 51], [7, 7, 7]]).begin()
    step.plan_group()
    assert one.hot[0].position_of.tolist() == [1, 2, 50, 51]
    step.plan.selection.fill_(99)
    clear_round(step.table.tensor, TABLE_LAYOUT, 0, step.place_of, step.plan)
    for _ in range(2):
        assert one.hot[0].position_of.tolist() == [1, 2, -1, -1]
        assert bool((step.plan.fill == -1).all())
        one.check_maps()
        clear_round(step.table.tensor, TABLE_LAYOUT, 0, step.place_of, step.plan)
    plan = Step([one], [0], [[1, 2, 50]]).begin().plan_group()
    assert plan.slot.tolist() == [[0, 1, -1]]


@pytest.mark.parametrize("position", [0, 5, 6, 300])
def test_unmap_from_drops_the_tail_of_every_group(position: int) -> None:
    """Positions at or past the cut are unmapped in each group of that place only; earlier ones still hit."""
    one, two = session(seed=1), session(seed=2)
    step = Step([one, two], [0, 1], [[4, 5, 6, 9], [4, 5, 6, 9]]).begin()
    step.plan_group(0)
    step.plan_group(1)
    unmap_from(step.table.tensor, TABLE_LAYOUT, 0, position)
    for group in range(2):
        kept = [held for held in (4, 5, 6, 9) if held < position]
        assert [held for held in one.hot[group].position_of.tolist() if held >= 0] == kept
        assert two.hot[group].position_of.tolist()[:4] == [4, 5, 6, 9]
        one.check_maps()


def test_a_place_without_slots_reads_everything_through() -> None:
    """SLOTS_MAX 0 (a resident session) fills nothing, and unmapping it does nothing."""
    one = session()
    step = Step([one], [0], [[3, 4]])
    step.table.tensor[0, TABLE_LAYOUT.group(0, GroupField.SLOTS_MAX)] = 0
    plan = step.begin().plan_group()
    assert plan.fill.tolist() == [[-1, -1]]
    assert plan.miss.tolist() == [[0, 1]]
    unmap_from(step.table.tensor, TABLE_LAYOUT, 0, 0)


@pytest.mark.parametrize(("position", "message"), [(300, None), (301, "past the rows")])
def test_positions_past_the_session_are_refused_before_anything_changes(position: int, message: str | None) -> None:
    """The row being written may be selected, the one after it may not; a refused plan leaves maps and counters alone."""
    one = session(rows=300)
    step = Step([one], [0], [[3, position]]).begin()
    if message is None:
        step.plan_group()
        return
    with pytest.raises(AssertionError, match=message):
        step.plan_group()
    assert bool((one.hot[0].position_of == -1).all())
    assert one.counters() == (0, 0, 0)


def test_a_missing_block_is_refused_before_anything_changes() -> None:
    """A mirrored position whose block address is 0 raises instead of reading from a wild address, and maps nothing."""
    one = session()
    one.block_table[1] = 0
    with pytest.raises(AssertionError, match="not in the block table"):
        Step([one], [0], [[3, 70]]).begin().plan_group()
    assert bool((one.hot[0].slot_of == -1).all())


def test_unmap_positions_takes_plain_maps() -> None:
    """Empty maps, empty slots and the cut itself are handled."""
    slot_of, position_of = torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([2, 0, -1], dtype=torch.int32)
    unmap_positions(slot_of, position_of, 2)
    assert (slot_of.tolist(), position_of.tolist()) == ([1, -1, -1], [-1, 0, -1])
    unmap_positions(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 0)


def test_a_device_without_a_kernel_is_refused() -> None:
    """A table that is not in host memory raises NoKernel."""
    table = torch.zeros((1, TABLE_LAYOUT.fields), dtype=torch.int64, device="meta")
    with pytest.raises(NoKernel, match="plan_round"):
        plan_round(
            table, TABLE_LAYOUT, LAYOUT, 0, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), RoundPlan.empty(1, 1)
        )
