"""What streams do, as shares of short bins of time: an observer for whoever looks on.

Holds the last seconds of every stream it has seen work of. Knows no steps and no sessions.

1. Memory and the cost of an event are bounded, whatever the streams do and whoever forgets to take.
2. Work counts for the bins it ran in, and is known when it has ended; so bins are handed out some time after they were over.
"""

from collections.abc import Sequence
from typing import Any, Final

from engine.measures import LaneActivity
from streams import Clock, Event

__all__ = ["Activity"]

BIN_NS: Final = 20_000_000
BINS: Final = 200  # four seconds
DELAY_NS: Final = 400_000_000  # work that takes longer is missing in the bins handed out before it ended
KINDS_MAX: Final = 64


class Activity:
    """An observer of a backend. Loop thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._started_ns = -1
        self._next = self._over()  # the first bin not handed out

    @property
    def bin_ms(self) -> float:
        """Length of a bin in milliseconds."""
        return BIN_NS / 1e6

    def _over(self) -> int:
        return (self._clock.now_ns() - DELAY_NS) // BIN_NS

    def take(self) -> Sequence[LaneActivity]:
        """Bins since the last call; at most the last four seconds."""
        end = self._over()
        first = max(self._next, end - BINS // 2)
        self._next = max(end, first)
        return [LaneActivity(name, lane.busy(first, end), lane.take_kinds()) for name, lane in sorted(self._lanes.items())]

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """See `Observer.submitted`."""

    def started(self, event: Event[Any], at_ns: int) -> None:
        """See `Observer.started`."""
        self._started_ns = at_ns

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """See `Observer.completed`."""
        started_ns, self._started_ns = self._started_ns, -1
        if started_ns < 0:
            return  # it never ran
        lane = self._lanes.get(event.stream)
        if lane is None:
            lane = self._lanes[event.stream] = _Lane()
        lane.add(event.label, started_ns, at_ns)

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """See `Observer.awaited`."""


class _Lane:
    """One stream: nanoseconds of work by bin, in a circle, and by kind of operation."""

    def __init__(self) -> None:
        self._busy_ns = [0] * BINS
        self._newest = -1  # the latest bin that has a place; those BINS before it and older have none
        self._kinds: dict[str, int] = {}
        self._kind_of: dict[str, str] = {}

    def add(self, label: str, started_ns: int, ended_ns: int) -> None:
        """Work ran from `started_ns` to `ended_ns`."""
        first, last = started_ns // BIN_NS, ended_ns // BIN_NS
        if last > self._newest:
            self._reach(last)
        kind = self._kind_of.get(label) or self._name(label)
        self._kinds[kind] = self._kinds.get(kind, 0) + ended_ns - started_ns
        oldest = self._newest - BINS + 1
        if first == last >= oldest:  # nearly all of it
            self._busy_ns[last % BINS] += ended_ns - started_ns
            return
        for place in range(max(first, oldest), last + 1):
            begin, end = max(started_ns, place * BIN_NS), min(ended_ns, (place + 1) * BIN_NS)
            self._busy_ns[place % BINS] += end - begin

    def _reach(self, bin_: int) -> None:
        """Make room up to a bin, which is newer than all so far."""
        for place in range(max(self._newest + 1, bin_ - BINS + 1), bin_ + 1):
            self._busy_ns[place % BINS] = 0
        self._newest = bin_

    def _name(self, label: str) -> str:
        """The kind of an operation: its label without the numbers of layers."""
        kind = ".".join(part for part in label.split(".") if not part.isdigit()) or label
        if len(self._kind_of) >= 16 * KINDS_MAX or (kind not in self._kinds and len(self._kinds) >= KINDS_MAX):
            return "other"
        self._kind_of[label] = kind
        return kind

    def busy(self, first: int, end: int) -> Sequence[int]:
        """Percent of each bin from `first` to before `end`."""
        oldest = self._newest - BINS + 1
        return [
            min(100, round(100 * self._busy_ns[place % BINS] / BIN_NS)) if oldest <= place <= self._newest else 0
            for place in range(first, end)
        ]

    def take_kinds(self) -> dict[str, float]:
        """Seconds by kind since the last call."""
        kinds, self._kinds = self._kinds, {}
        return {kind: spent / 1e9 for kind, spent in sorted(kinds.items(), key=lambda item: -item[1])}
