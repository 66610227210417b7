"""What a step costs the loop, and how long the device had nothing to do, seen while an engine decodes.

`Probe` observes the streams of one backend and counts the loop's rounds; both while it is switched on. Knows no requests.

1. Busy is a time in which an operation of a stream that is not copyback was under way; idle is the rest of the window. On a device an
   operation begins when it was launched or when all before it ended, whichever is later: idle is time the host left the device without
   work. Gaps between kernels of one operation are not seen.
2. The device backend asks its markers from the loop without rest, so a thread's processor time says nothing. What the loop itself does is
   taken from its rounds: one that only asks takes a few microseconds, always the same; what a longer round takes beyond that is work.
3. Between steps the device's own clock is asked: an event is recorded in front of every replayed step and behind it. What lies between the
   end of one and the begin of the next is the read-back of its tokens, and whatever time the host was late.
4. Off, it costs a call an event and nothing a round.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from streams import Event
from streams.queued import Operation

__all__ = ["Probe", "Window", "busy_ns", "step_times", "work_ns"]

_ROUNDS_MAX = 4_000_000
_STEP, _BEHIND = "step", "step.read"  # a replayed step, and what is submitted right behind it
_LONG = 2.0  # a round this many times the median did something


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen between `begin` and `end`."""

    window_ns: int
    device_busy_ns: int  # within the window
    loop_work_ns: int  # the loop's rounds beyond asking; 0 where rounds were not counted
    rounds: int
    steps_us: tuple[float, ...] = ()  # of replayed steps, by the device's clock
    gaps_us: tuple[float, ...] = ()  # from the end of one to the begin of the next

    @property
    def idle_share(self) -> float:
        """Share of the window in which no operation was under way."""
        return 1.0 - self.device_busy_ns / self.window_ns

    @property
    def between_steps(self) -> float | None:
        """Share of the device's time between replayed steps; None where none was seen."""
        steps, gaps = sum(self.steps_us), sum(self.gaps_us)
        return gaps / (steps + gaps) if self.gaps_us else None


@dataclass(slots=True)
class Probe:
    """An observer of a backend. Loop thread only.

    Args: counts_rounds: whether to take the loop's rounds; only where the backend polls, because it makes the loop spin.
    """

    counts_rounds: bool
    _on: bool = False
    _began_ns: int = 0
    _started: int = -1
    _spans: list[tuple[int, int]] = field(default_factory=list)
    _rounds: list[int] = field(default_factory=list)
    _marks: list[tuple[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Watch from now on."""
        self._spans, self._rounds, self._marks, self._on, self._began_ns = [], [], [], True, time.perf_counter_ns()
        if self.counts_rounds:
            self._tick()

    def end(self) -> Window:
        """Stop, and say what was seen."""
        self._on = False
        # What is still under way is seen only when it ends: the window ends where the last thing did that was seen.
        ended = max((end for _, end in self._spans), default=time.perf_counter_ns())
        gaps = [after - before for before, after in pairwise(self._rounds)]
        if self._marks:
            self._marks[-1][1].synchronize()
        steps, between = step_times(self._marks)
        return Window(ended - self._began_ns, busy_ns(self._spans, self._began_ns, ended), work_ns(gaps), len(gaps), steps, between)

    def _tick(self) -> None:
        """Once a round of the loop."""
        if self._on and len(self._rounds) < _ROUNDS_MAX:
            self._rounds.append(time.perf_counter_ns())
            asyncio.get_running_loop().call_soon(self._tick)

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """See `Observer.submitted`; told before the work is launched, so what is recorded here lies in front of it."""
        if self._on and event.label in (_STEP, _BEHIND) and isinstance(event, Operation):
            stream = getattr(event.queue, "stream", None)  # a device's
            if stream is not None:
                mark = torch.cuda.Event(enable_timing=True)
                mark.record(stream)
                self._marks.append((event.label, mark))

    def started(self, event: Event[Any], at_ns: int) -> None:
        """See `Observer.started`."""
        self._started = at_ns

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """See `Observer.completed`."""
        started, self._started = self._started, -1
        if self._on and started >= 0 and not event.stream.endswith("copyback"):
            self._spans.append((started, at_ns))

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """See `Observer.awaited`."""


def step_times(marks: Sequence[tuple[str, Any]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Microseconds of steps, and between them, of (label, device event) in the order of one stream."""
    steps, gaps = [], []
    for (label, mark), (following, later) in pairwise(marks):
        if (label, following) == (_STEP, _BEHIND):
            steps.append(1e3 * float(mark.elapsed_time(later)))
        elif (label, following) == (_BEHIND, _STEP):
            gaps.append(1e3 * float(mark.elapsed_time(later)))
    return tuple(steps), tuple(gaps)


def busy_ns(spans: Sequence[tuple[int, int]], first_ns: int, last_ns: int) -> int:
    """Length of the union of the spans within [first_ns, last_ns]."""
    busy, reached = 0, first_ns
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, last_ns)
        if end > start:
            busy += end - start
            reached = end
    return busy


def work_ns(gaps: Sequence[int]) -> int:
    """What the loop's rounds took beyond one that only asks: the excess over the median of every round that is longer than twice it."""
    if not gaps:
        return 0
    usual = statistics.median_low(gaps)
    return sum(gap - usual for gap in gaps if gap > _LONG * usual)
