"""When a poller asks next, told from numbers alone."""

import pytest

from streams.pace import REST_MAX_S, REST_S, SLICE_NS, SPIN_NS, Pace

MS = 1_000_000


def test_an_end_that_is_near_is_asked_for_without_rest() -> None:
    """Inside the spin time before the expected end, and as long behind it, no round is left out; then one a millisecond asks."""
    pace = Pace()
    pace.ended("step", 3 * MS)
    pace.expect(10 * MS, [("step", 10 * MS)])
    assert {pace.rest_s(at * MS, found=False) for at in (10, 12, 13, 17)} == {0.0}
    assert pace.rest_s(13 * MS + SPIN_NS, found=False) == REST_S
    assert pace.rest_s(13 * MS + SPIN_NS, found=True) == 0.0


def test_an_unknown_end_is_asked_for_as_if_it_were_near() -> None:
    """Of work that never ran before nothing is expected: it is asked for without rest for the spin time."""
    pace = Pace()
    pace.expect(0, [("never seen", 0)])
    assert pace.rest_s(SPIN_NS - 1, found=False) == 0.0
    assert pace.rest_s(SPIN_NS, found=False) == REST_S


def test_a_far_end_is_rested_for_by_halves() -> None:
    """Each rest takes half of what is left, so that an end that comes early is met late by no more; the last stretch has no rest."""
    pace = Pace()
    pace.ended("step", 100 * MS)
    pace.expect(0, [("step", 0)])
    now_ns, rests = 0, []
    while (rest_s := pace.rest_s(now_ns, found=False)) > 0:
        rests.append(rest_s)
        now_ns += round(rest_s * 1e9)
    assert rests == pytest.approx([0.05, 0.025, 0.0125, 0.00625, 0.003125])
    assert 100 * MS - now_ns <= SPIN_NS
    pace.ended("age", 10**15)
    pace.expect(0, [("age", 0)])
    assert pace.rest_s(0, found=False) == REST_MAX_S  # nor longer than a failure may go unseen


def test_the_next_end_counts() -> None:
    """Of several streams the one that ends first is waited for."""
    pace = Pace()
    pace.ended("step", 100 * MS)
    pace.ended("copy", 2 * MS)
    pace.expect(0, [("step", 0), ("copy", 0)])
    assert pace.rest_s(0, found=False) == 0.0


def test_an_end_seen_late_delays_the_next_by_little() -> None:
    """A time that is much longer than usual may be the host's own lateness: it counts for an eighth more; a shorter one counts at once."""
    pace = Pace()
    for took in (8 * MS, 800 * MS):
        pace.ended("step", took)
    pace.expect(0, [("step", 0)])
    assert pace.rest_s(0, found=False) == pytest.approx(0.0045)
    pace.ended("step", 1 * MS)
    pace.expect(0, [("step", 0)])
    assert pace.rest_s(0, found=False) == 0.0


def test_slices_grow_while_rounds_are_empty() -> None:
    """Round after round with nothing else in it asks longer, up to the limit; one in which others ran asks once and begins anew."""
    pace, now_ns, slices = Pace(), 1_000_000, []
    pace.rest_s(now_ns, found=False)
    for _ in range(9):
        now_ns += 1_000  # an empty round
        slices.append(pace.slice_ns(now_ns))
        now_ns += slices[-1]
        pace.rest_s(now_ns, found=False)
    assert slices == sorted(slices)
    assert slices[0] > 0
    assert slices[-1] == SLICE_NS
    assert pace.slice_ns(now_ns + 5_000) == 0
    pace.rest_s(now_ns + 5_000, found=False)
    assert pace.slice_ns(now_ns + 6_000) == slices[0]


def _asked(pace: Pace, now_ns: int, gap_ns: int, rounds: int) -> tuple[int, list[int]]:
    """Slices of so many rounds that each hold `gap_ns` of something else, and the time after them."""
    slices = []
    for _ in range(rounds):
        now_ns += gap_ns
        slices.append(pace.slice_ns(now_ns))
        now_ns += slices[-1]
        pace.rest_s(now_ns, found=False)
    return now_ns, slices


def test_a_loop_that_is_always_busy_does_not_pass_for_an_empty_one() -> None:
    """Once an empty round was seen, rounds with more in them are busy however many there are; empty ones are known again at once."""
    pace = Pace()
    now_ns, slices = _asked(pace, 0, 3_000, 10)
    assert slices[-1] == SLICE_NS
    now_ns, slices = _asked(pace, now_ns, 8_000, 10_000)
    assert set(slices) == {0}
    assert _asked(pace, now_ns, 3_000, 10)[1][-1] == SLICE_NS
    assert set(_asked(Pace(), 0, 40_000, 1_000)[1]) == {0}  # an empty round does not take that long


def test_labels_are_bounded() -> None:
    """However many labels come, what is remembered stays small, and the newest is among it."""
    pace = Pace()
    for number in range(5_000):
        pace.ended(f"work {number}", 50 * MS)
    assert len(pace._took_ns) <= 1_024
    pace.expect(0, [("work 4999", 0)])
    assert pace.rest_s(0, found=False) == pytest.approx(0.025)
