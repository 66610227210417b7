"""What streams do, by bins of time."""

from types import SimpleNamespace
from typing import Any

from engine.activity import BIN_NS, BINS, DELAY_NS, KINDS_MAX, Activity

START = 1_000 * BIN_NS


class _Clock:
    def __init__(self) -> None:
        self.ns = START + DELAY_NS

    def now_ns(self) -> int:
        return self.ns

    async def wait_ns(self, duration_ns: int) -> None:
        raise AssertionError("an observer waits for nothing")


def _run(activity: Activity, stream: str, label: str, begin: float, end: float) -> None:
    """Work from `begin` to `end`, in bins since the beginning."""
    event: Any = SimpleNamespace(stream=stream, label=label)
    activity.started(event, START + round(begin * BIN_NS))
    activity.completed(event, None, START + round(end * BIN_NS))


def _taken(activity: Activity) -> dict[str, list[int]]:
    return {lane.stream: list(lane.busy) for lane in activity.take()}


def test_work_counts_for_the_bins_it_ran_in() -> None:
    """An operation within a bin, one over an edge and one over several: each bin has its own share."""
    clock = _Clock()
    activity = Activity(clock)
    _run(activity, "compute", "a", 0.25, 0.5)
    _run(activity, "compute", "a", 0.9, 1.2)
    _run(activity, "copyback", "b", 1.5, 4.25)
    clock.ns += 6 * BIN_NS
    assert _taken(activity) == {"compute": [35, 20, 0, 0, 0, 0], "copyback": [0, 50, 100, 100, 25, 0]}
    assert _taken(activity) == {"compute": [], "copyback": []}


def test_bins_are_handed_out_once_and_late_enough_for_their_work() -> None:
    """Work that ends after the last look, in a bin that was not handed out yet, is seen by the next one."""
    clock = _Clock()
    activity = Activity(clock)
    clock.ns += 2 * BIN_NS
    _run(activity, "compute", "a", 0, 1)
    assert _taken(activity) == {"compute": [100, 0]}
    _run(activity, "compute", "a", 2, 3.5)
    clock.ns += 3 * BIN_NS
    assert _taken(activity) == {"compute": [100, 50, 0]}


def test_who_looks_late_gets_the_last_of_it() -> None:
    """After a long pause as many bins are handed out as are kept, all of them right; older work does not come back in them."""
    clock = _Clock()
    activity = Activity(clock)
    _run(activity, "compute", "a", 0, 8)
    late = 3 * BINS + 10
    _run(activity, "compute", "a", late - 1, late)
    clock.ns += late * BIN_NS
    bins = _taken(activity)["compute"]
    assert len(bins) == BINS // 2
    assert bins == [0] * (BINS // 2 - 1) + [100]


def test_an_operation_longer_than_all_bins_fills_them() -> None:
    """Work of minutes costs no more than the bins there are."""
    clock = _Clock()
    activity = Activity(clock)
    _run(activity, "compute", "a", 0, 50_000)
    clock.ns += 50_000 * BIN_NS
    assert set(_taken(activity)["compute"]) == {100}


def test_work_that_never_ran_counts_nothing() -> None:
    """An operation that failed before it began has no time, and the one after it keeps its own."""
    activity = Activity(_Clock())
    event: Any = SimpleNamespace(stream="compute", label="a")
    activity.completed(event, RuntimeError(), START)
    assert activity.take() == []


def test_kinds_are_labels_without_layers_and_bounded() -> None:
    """Seconds add up over layers, the most first; endless labels end in one kind."""
    activity = Activity(_Clock())
    _run(activity, "compute", "append.3.attend", 0, 1)
    _run(activity, "compute", "append.77.attend", 1, 2)
    _run(activity, "compute", "step", 2, 2.5)
    kinds = activity.take()[0].kinds
    assert list(kinds) == ["append.attend", "step"]
    assert kinds == {"append.attend": 2 * BIN_NS / 1e9, "step": BIN_NS / 2e9}
    for number in range(3_000):
        _run(activity, "compute", f"made{number}up", 3, 3.1)
    assert len(activity.take()[0].kinds) <= KINDS_MAX + 1
