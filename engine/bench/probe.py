"""What a step costs the loop, and how long the device had nothing to do, seen while an engine decodes.

`Probe` observes the streams of one backend while it is switched on. Knows no requests.

1. Busy is a time in which an operation of a stream that is not copyback was under way; idle is the rest of the window. On a device an
   operation begins when it was launched or when all before it ended, whichever is later: idle is time the host left the device without
   work. Gaps between kernels of one operation are not seen.
2. The device backend asks its markers from the loop without rest, so a thread's processor time alone says nothing. What the loop itself
   does is that time less the backend's own count of asking in vain; launching, which is a part of it, is counted by the backend too.
3. Between steps the device's own clock is asked: an event is recorded in front of every replayed step, and the step's marker, where the
   backend was made with timed markers, is the one behind it. What lies between is whatever time the host was late, and two events.
4. Off, it costs a call an event; on, one event a step, which counts as the loop's work.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from streams import Event
from streams.device import DeviceBackend
from streams.queued import Operation

__all__ = ["Probe", "Window", "busy_ns", "step_times"]

_STEP = "step"  # a replayed one, its read-back included


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen between `begin` and `end`."""

    window_ns: int
    device_busy_ns: int  # within the window
    loop_work_ns: int  # processor time of the loop's thread, less asking in vain
    launch_ns: int = 0  # of it, in launching work on a device
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
    """An observer of a backend. Loop thread only."""

    device: DeviceBackend | None = None  # the backend it observes, if that is a device's; set once that is made
    _on: bool = False
    _began_ns: int = 0
    _spent: tuple[int, int] = (0, 0)  # on the loop's work and in launching, when it was switched on
    _started: int = -1
    _spans: list[tuple[int, int]] = field(default_factory=list)
    _fronts: dict[int, Any] = field(default_factory=dict)  # event in front of a step, by the step's number
    _marks: list[tuple[Any, Any]] = field(default_factory=list)  # events in front of each step and behind it

    def begin(self) -> None:
        """Watch from now on."""
        self._spans, self._fronts, self._marks, self._on, self._began_ns = [], {}, [], True, time.perf_counter_ns()
        self._spent = self._spend()

    def end(self) -> Window:
        """Stop, and say what was seen."""
        work, launching = (now - before for now, before in zip(self._spend(), self._spent, strict=True))
        self._on = False
        # What is still under way is seen only when it ends: the window ends where the last thing did that was seen.
        ended = max((end for _, end in self._spans), default=time.perf_counter_ns())
        steps, between = step_times(self._marks)
        return Window(ended - self._began_ns, busy_ns(self._spans, self._began_ns, ended), max(0, work), launching, steps, between)

    def _spend(self) -> tuple[int, int]:
        """Nanoseconds so far: the loop's thread but for asking in vain, and launching."""
        asking, launching = (0, 0) if self.device is None else (self.device.asking_ns, self.device.launch_ns)
        return time.thread_time_ns() - asking, launching

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """See `Observer.submitted`; told before the work is launched, so what is recorded here lies in front of it."""
        if self._on and event.label == _STEP and isinstance(event, Operation):
            stream = getattr(event.queue, "stream", None)  # a device's
            if stream is not None:
                mark = torch.cuda.Event(enable_timing=True)
                mark.record(stream)
                self._fronts[event.number] = mark

    def started(self, event: Event[Any], at_ns: int) -> None:
        """See `Observer.started`."""
        self._started = at_ns

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """See `Observer.completed`."""
        started, self._started = self._started, -1
        if self._on and started >= 0 and not event.stream.endswith("copyback"):
            self._spans.append((started, at_ns))
        front, behind = self._fronts.pop(event.number, None), getattr(event, "marker", None)
        if self._on and front is not None and behind is not None and error is None:
            self._marks.append((front, behind))

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """See `Observer.awaited`."""


def step_times(marks: Sequence[tuple[Any, Any]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Microseconds of steps, and between them, of the device's events in front of each and behind it, in the order of one stream."""
    steps = tuple(1e3 * float(front.elapsed_time(behind)) for front, behind in marks)
    return steps, tuple(1e3 * float(behind.elapsed_time(front)) for (_, behind), (front, _) in pairwise(marks))


def busy_ns(spans: Sequence[tuple[int, int]], first_ns: int, last_ns: int) -> int:
    """Length of the union of the spans within [first_ns, last_ns]."""
    busy, reached = 0, first_ns
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, last_ns)
        if end > start:
            busy += end - start
            reached = end
    return busy
