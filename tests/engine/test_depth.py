"""The depth of drafts: fixed or chosen from acceptance and company, within what a step's kernels hold."""

import random

import pytest

from engine.depth import DEPTHS, DraftCounts, DraftDepth


def seen(rate: float, *, judged: int = 3, steps: int = 400) -> DraftDepth:
    """Auto, after steps whose drafts were each accepted at `rate`."""
    depth, rng = DraftDepth(None, drafts=True), random.Random(1)
    for _ in range(steps):
        accepted = 0
        while accepted < judged and rng.random() < rate:
            accepted += 1
        depth.note(judged, accepted)
    return depth


def test_one_session_wants_deep_drafts_and_ten_want_one() -> None:
    """At the acceptance of the published run, company makes the drafts shallower."""
    auto = seen(0.77)
    assert auto.choose(1) >= 3
    assert auto.choose(10) == 1
    assert auto.choose(1) >= 3


def test_drafts_that_are_refused_stop_and_are_tried_again() -> None:
    """Where nothing is accepted the depth falls to 0; now and then some steps draft, and good news brings the depth back."""
    auto = seen(0.0)
    chosen = [auto.choose(1) for _ in range(200)]
    assert chosen[0] == 0
    assert set(chosen) == {0, 1}
    looks = chosen.index(1)
    assert chosen[looks : looks + 2] == [1, 1], "a draft made in one step is judged in the next"
    assert chosen.count(0) > 10 * chosen.count(1)
    for _ in range(300):
        auto.note(1, 1)
    assert auto.choose(1) >= 1


def test_a_bad_stretch_is_forgotten() -> None:
    """After runs of which only the first draft was right, text whose every draft is right is drafted as deep as by a new chooser."""
    auto = DraftDepth(None, drafts=True)
    for _ in range(400):
        auto.note(3, 1)
    assert auto.choose(1) == 1
    for _ in range(20_000):
        depth = auto.choose(1)
        auto.note(depth, depth)
    assert auto.choose(1) == 7


def test_looks_are_rare() -> None:
    """Where one draft is all that is ever right, nine steps in ten stay at that depth, and no look goes past the next."""
    auto = DraftDepth(None, drafts=True)
    chosen = []
    for _ in range(4000):
        chosen.append(auto.choose(1))
        auto.note(chosen[-1], min(1, chosen[-1]))
    assert set(chosen[1000:]) == {1, 2}
    assert chosen[1000:].count(1) > 0.9 * 3000


@pytest.mark.parametrize("depth", [None, 0, 1, 3, 7])
def test_a_step_stays_one_of_few_rows(depth: int | None) -> None:
    """Whatever the company, sessions rounded up times rows is at most what kernels of few rows hold, and a fixed depth is kept below it."""
    chooser = DraftDepth(depth, drafts=True)
    for sessions in (1, 2, 3, 15, 16, 17, 63, 64, 65, 128):
        chosen = chooser.choose(sessions)
        assert 0 <= chosen <= chooser.most
        places = 1 << (sessions - 1).bit_length()
        assert places * (chosen + 1) <= 128
        if depth is not None and places * (depth + 1) <= 128:
            assert chosen == depth
        if depth is None:
            assert chosen in DEPTHS


def test_a_model_that_cannot_draft_never_does() -> None:
    """Auto is then 0, and asking for more is the caller's mistake."""
    auto = DraftDepth(None, drafts=False)
    assert auto.most == 0
    assert {auto.choose(sessions) for sessions in range(1, 9)} == {0}
    with pytest.raises(AssertionError, match="drafts nothing"):
        DraftDepth(2, drafts=False)


def test_counts_are_by_place_in_the_run() -> None:
    """A refused draft ends its run: those behind it count as proposed only."""
    counts = DraftCounts().plus(3, 1).plus(2, 2).plus(0, 0)
    assert counts.proposed == (2, 2, 1, 0, 0, 0, 0)
    assert counts.accepted == (2, 1, 0, 0, 0, 0, 0)
    with pytest.raises(AssertionError, match="3 of 2"):
        counts.plus(2, 3)


def test_a_restarted_chooser_is_a_new_one() -> None:
    """What warmed a device up neither counts as drafts nor biases the first choice."""
    worn, new = DraftDepth(None, drafts=True), DraftDepth(None, drafts=True)
    for _ in range(50):
        worn.note(worn.choose(1), 0)
    assert worn.choose(1) != new.choose(1)
    worn.restart()
    assert worn.counts == DraftCounts()
    assert [worn.choose(sessions) for sessions in (1, 4, 16)] == [new.choose(sessions) for sessions in (1, 4, 16)]
