"""How long generations waited between their steps, counted a step at a time."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.measures import Tokens
from engine.tally import GAP_BOUNDS_S, Tally

MS = 1_000_000


class _Clock:
    def __init__(self) -> None:
        self.ns = 5 * MS

    def now_ns(self) -> int:
        return self.ns

    async def wait_ns(self, duration_ns: int) -> None:
        raise AssertionError("a tally waits for nothing")


def _request(**fields: Any) -> Any:
    """As much of a request as a tally reads; compared by identity, as requests are."""

    class Request(SimpleNamespace):
        __eq__ = object.__eq__
        __hash__ = object.__hash__

    return Request(followed_ns=0, state=None, append=None, appended_rows=0, cached=0, generated=0, **fields)


def _placed(gaps_ns: list[int]) -> list[int]:
    """Counts by bound, the plain way."""
    counts = [0] * (len(GAP_BOUNDS_S) + 1)
    for gap in gaps_ns:
        counts[sum(gap > round(bound * 1e9) for bound in GAP_BOUNDS_S)] += 1
    return counts


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 400), st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 3))), min_size=1, max_size=30
    )
)
def test_waits_are_those_of_each_generation_alone(steps: list[tuple[int, set[int], set[int]]]) -> None:
    """Whoever steps with whom, and whoever ends or begins between steps: each generation's gaps are counted once, and no others."""
    clock = _Clock()
    tally = Tally(clock)
    running: dict[int, Any] = {}
    last: dict[int, int] = {}
    gaps: list[int] = []
    for wait_ms, members, leaving in steps:
        clock.ns += wait_ms * MS
        for name in members - set(running):
            running[name], last[name] = _request(), clock.ns
            tally.began(running[name])
        clock.ns += 3 * MS
        gaps += [clock.ns - last[name] for name in members]
        last |= dict.fromkeys(members, clock.ns)
        tally.followed(tuple(running[name] for name in sorted(members)))
        for name in leaving & set(running):
            tally.ended(running.pop(name))
    waits = tally.waits()
    assert list(waits.counts) == _placed(gaps)
    assert abs(waits.sum_s - sum(gaps) / 1e9) < 1e-9
    assert tally.stalls == sum(gap > 200 * MS for gap in gaps)


def test_the_edges_of_a_bucket_belong_to_it() -> None:
    """A wait of exactly a bound counts up to it, as Prometheus has it; exactly 200 ms is no stall."""
    clock = _Clock()
    tally, request = Tally(clock), _request()
    tally.began(request)
    for gap in (5 * MS, 200 * MS, 200 * MS + 1):
        clock.ns += gap
        tally.followed((request,))
    bounds = dict(zip((*GAP_BOUNDS_S, "more"), tally.waits().counts, strict=True))
    assert {bound: count for bound, count in bounds.items() if count} == {0.005: 1, 0.2: 1, 0.3: 1}
    assert tally.stalls == 1


def test_an_ended_request_is_not_held() -> None:
    """Nothing refers to a request that has ended, so that its session's memory can go."""
    tally, request, other = Tally(_Clock()), _request(), _request()
    tally.followed((request, other))
    tally.ended(request)
    assert request not in [item for value in vars(tally).values() if isinstance(value, tuple) for item in value]


def test_tokens_are_those_of_ended_and_running_requests() -> None:
    """A prompt that was never begun counts nothing; one that is being read counts what it has; no token counts twice."""
    tally = Tally(_Clock())
    ended = _request()
    ended.state, ended.cached, ended.appended_rows, ended.generated = object(), 10, 5, 7
    reading, waiting = _request(), _request()
    reading.state, reading.cached, reading.append = object(), 64, SimpleNamespace(done_rows=32)
    tally.ended(ended)
    assert tally.tokens([]) == Tokens(15, 10, 7)
    assert tally.tokens([reading, waiting]) == Tokens(15 + 96, 74, 7)
    tally.ended(waiting)
    tally.ended(reading)
    assert tally.tokens([]) == Tokens(111, 74, 7)
    tally.restart()
    assert tally.tokens([]) == Tokens()
