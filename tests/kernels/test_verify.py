"""Drafted rows: laid out, judged and kept, against what the rule says for each place by itself."""

import random

import pytest
import torch
from torch import Tensor

from kernels.layout import STATE_FIELDS, StateField, TableField
from kernels.verify import accept_rows, keep_drafts, read_standing, spread_rows, write_standing
from tests.kernels.verify_world import VerifyWorld


def spread(world: VerifyWorld, each: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = world.table.shape[0] * each
    place_of = torch.full((rows,), 99, dtype=torch.int32)
    positions, tokens = torch.full((rows,), -9), torch.full((rows,), -9)
    mirrored, judged, bad_layer = torch.full((world.table.shape[0],), -9), torch.full((world.table.shape[0],), -9), torch.full((rows,), -9)
    spread_rows(world.table, place_of, positions, tokens, mirrored, judged, bad_layer)
    busy = world.table[:, TableField.ROWS] > 0
    assert judged.tolist() == ((place_of.view(-1, each) >= 0).sum(1) - 1).clamp_min(0).tolist()
    assert bad_layer.tolist() == [-1] * rows
    assert torch.equal(mirrored, torch.where(busy, world.states[:, StateField.MIRRORED] // 64 * 64, 0))
    return place_of, positions, tokens


def accept(world: VerifyWorld, place_of: Tensor, tokens: Tensor, samples: Tensor, bad: Tensor) -> tuple[list[int], list[int]]:
    accepted, next_of = torch.full((world.table.shape[0],), -9), torch.full_like(place_of, 99)
    accept_rows(world.table, place_of, tokens, samples, bad, world.addresses(), accepted, next_of)
    return accepted.tolist(), next_of.tolist()


def test_rows_follow_token_and_drafts() -> None:
    """Row j feeds draft j at LOGICAL + j; rows past the drafts, past the place's own rows, and of free places are padding."""
    world = VerifyWorld([4, 4, 0, 2, 1], [3, 1, 3, 3, 7])
    place_of, positions, tokens = spread(world, 4)
    assert place_of.view(5, 4).tolist() == [[0] * 4, [1, 1, -1, -1], [-1] * 4, [3, 3, -1, -1], [4, -1, -1, -1]]
    for place, live in ((0, 4), (1, 2), (3, 2), (4, 1)):
        state = world.states[place]
        first = int(state[StateField.LOGICAL])
        assert positions.view(5, 4)[place].tolist() == [first + j if j < live else 0 for j in range(4)]
        fed = [int(state[StateField.TOKEN]), *world.drafts(place)]
        assert tokens.view(5, 4)[place].tolist() == [*fed[:live], *[0] * (4 - live)]
    assert positions.view(5, 4)[2].tolist() == tokens.view(5, 4)[2].tolist() == [0] * 4


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_are_accepted_up_to_the_first_wrong_one(right: int) -> None:
    """A later draft that equals its sample by chance does not count; state and counts move by the accepted rows alone."""
    world = VerifyWorld([1, 4], [0, 3])
    before = world.states.clone()
    place_of, positions, tokens = spread(world, 4)
    samples = torch.arange(8) + 30
    drafts = world.drafts(1)
    samples[4:7] = torch.tensor(drafts)
    if right < 3:
        samples[4 + right] = (drafts[right] + 1) % 50
    accepted, next_of = accept(world, place_of, tokens, samples, torch.full((8,), -1))
    assert accepted == [1, right + 1]
    assert next_of == [-1] * 4 + [1] * (right + 1) + [-1] * (3 - right)  # place 0 may not draft: no row of its follower
    state = world.states[1]
    assert int(state[StateField.TOKEN]) == int(samples[4 + right])
    assert int(state[StateField.LOGICAL]) == int(before[1, StateField.LOGICAL]) + right + 1 == int(positions[4]) + right + 1
    assert int(state[StateField.DRAFT_COUNT]) == 0
    assert int(state[StateField.BAD_LAYER]) == -1
    counted = torch.bincount(samples[4 : 5 + right], minlength=50)
    assert torch.equal(world.counts[1], counted.int())
    assert not world.counts[0].any(), "a place without an address counts nothing"


def test_an_accepted_token_that_repeats_is_counted_twice() -> None:
    """Equal samples of one run add up."""
    world = VerifyWorld([1, 3], [0, 2])
    world.states[1, StateField.DRAFTS : StateField.DRAFTS + 2] = 7
    place_of, _, tokens = spread(world, 3)
    accepted, _ = accept(world, place_of, tokens, torch.full((6,), 7), torch.full((6,), -1))
    assert accepted == [1, 3]
    assert int(world.counts[1, 7]) == 3
    assert int(world.counts.sum()) == 3


def test_a_refused_row_that_is_not_finite_is_nobodys_fault() -> None:
    """BAD_LAYER takes the first bad layer of an accepted row and none of a refused one, and keeps what it had."""
    for accepted_rows, bad, known, wanted in (
        (1, [-1, 4, 5], -1, -1),
        (2, [-1, 4, 2], -1, 4),
        (3, [-1, 4, 2], 9, 9),
        (3, [-1, -1, 0], -1, 0),
    ):
        world = VerifyWorld([3], [2])
        world.states[0, StateField.BAD_LAYER] = known
        place_of, _, tokens = spread(world, 3)
        samples = torch.tensor([*world.drafts(0), 1])
        if accepted_rows < 3:
            samples[accepted_rows - 1] = (samples[accepted_rows - 1] + 1) % 50
        accepted, _ = accept(world, place_of, tokens, samples, torch.tensor(bad))
        assert accepted == [accepted_rows]
        assert int(world.states[0, StateField.BAD_LAYER]) == wanted


def test_a_free_place_is_inert() -> None:
    """Its rows are padding, it accepts none, and not a byte behind it changes."""
    world = VerifyWorld([0, 2, 0], [3, 1, 3])
    before = world.states.clone()
    place_of, _, tokens = spread(world, 2)
    accepted, next_of = accept(world, place_of, tokens, tokens.clone(), torch.full((6,), 3))
    keep_drafts(world.table, torch.ones((3, 2), dtype=torch.int64), torch.tensor([8]))
    assert accepted[0] == accepted[2] == 0
    assert next_of[:2] == next_of[4:] == [-1, -1]
    assert torch.equal(world.states[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    ("token", "drafts", "rows", "kept"),
    [
        (1, [2, 3, 4], 4, [2, 3, 4]),
        (1, [2, 8, 4], 4, [2, 8]),  # nothing is drafted behind an end of text
        (1, [9, 8, 4], 4, [9]),
        (8, [2, 3, 4], 4, []),
        (1, [2, 3, 4], 3, [2, 3]),  # no more than the place's rows can judge
        (1, [2, 3, 4], 1, []),
        (1, [2, 3, 4], 8, [2, 3, 4]),
    ],
)
def test_drafts_are_kept_up_to_an_end(token: int, drafts: list[int], rows: int, kept: list[int]) -> None:
    """The state holds the drafts that the next step may judge, and zeros past them."""
    world = VerifyWorld([rows], [7])
    world.states[0, StateField.TOKEN] = token
    keep_drafts(world.table, torch.tensor([drafts]), torch.tensor([8, 9]))
    assert world.drafts(0) == kept
    assert not world.states[0, StateField.DRAFTS + len(kept) : STATE_FIELDS].any()


def test_a_life_of_steps_gives_what_sampling_one_by_one_gives() -> None:
    """With drafts of any quality, the tokens that places emit over many steps are those of a stepper without drafts."""
    rng = random.Random(5)
    text = [[rng.randrange(4) for _ in range(400)] for _ in range(3)]  # what each place would sample at each position
    world = VerifyWorld([4, 2, 3], [0, 0, 0], vocabulary=50)
    world.states[:, StateField.LOGICAL] = 0
    for place in range(3):
        world.states[place, StateField.TOKEN] = text[place][0]
    emitted: list[list[int]] = [[], [], []]
    for _ in range(100):
        place_of, positions, tokens = spread(world, 4)
        samples = torch.tensor([text[row // 4][int(positions[row]) + 1] for row in range(12)])
        accepted, _ = accept(world, place_of, tokens, samples, torch.full((12,), -1))
        for place, count in enumerate(accepted):
            emitted[place] += samples[4 * place : 4 * place + count].tolist()
        logical = world.states[:, StateField.LOGICAL].tolist()
        guessed = [[text[place][logical[place] + 1 + j] if rng.random() < 0.6 else 3 for j in range(3)] for place in range(3)]
        keep_drafts(world.table, torch.tensor(guessed), torch.tensor([49]))
    assert all(len(one) > 110 for one in emitted), "nothing was ever accepted"
    for place in range(3):
        assert emitted[place] == text[place][1 : 1 + len(emitted[place])]
        assert torch.equal(world.counts[place], torch.bincount(torch.tensor(emitted[place]), minlength=50).int() * (place % 3 > 0))


def test_a_standing_moves_what_the_next_step_begins_with_and_nothing_else() -> None:
    """LOGICAL, TOKEN and the drafts become the other stage's; MIRRORED, rounds and counts of reads stay; a free place stays as it is."""
    moved = [StateField.LOGICAL, StateField.TOKEN, StateField.DRAFT_COUNT, *range(StateField.DRAFTS, STATE_FIELDS)]
    kept = [field for field in range(STATE_FIELDS) if field not in moved]
    there, here = VerifyWorld([2, 0, 4], [1, 5, 3], seed=1), VerifyWorld([1, 0, 4], [0, 2, 1], seed=2)
    before, standing = here.states.clone(), torch.full((3, STATE_FIELDS), -9)
    read_standing(there.table, standing)
    assert not standing[1].any()
    write_standing(here.table, standing)
    for place in (0, 2):
        assert torch.equal(here.states[place, moved], there.states[place, moved])
        assert torch.equal(here.states[place, kept], before[place, kept])
        assert not torch.equal(before[place, moved], there.states[place, moved])
    assert torch.equal(here.states[1], before[1])
