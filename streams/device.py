"""The device backend: streams of a GPU through `torch.cuda`, which is CUDA on NVIDIA cards and HIP on AMD ones.

Knows no rows. Work is launched on the loop's thread, in submission order of its stream; a marker event recorded behind it says when it
completed, and one poller a loop asks the markers.

Invariants:
1. An operation is settled only when its marker has happened and everything it comes after is settled.
2. Order between device streams is a device-side wait; the host waits for nothing. An event of another backend holds its stream's launches
   back until the loop sees it done.
3. Work that raises while it is launched fails alone, in its stream's order; what comes `after` it never launches. A failure that the
   device reports is the device's, and so is a silence of `silence_s_max`: every outstanding operation fails with `DeviceLost`, nothing more
   is launched, and `lost` happens. What those operations touch a device that hangs may touch still: end the process, free nothing.
4. The poller runs only while something is outstanding, and `pace.py` says how: without rest while an end is near, never longer in one
   round of the loop than others there can bear. Measured on an H200: polling from the loop wakes after 19 us at the median, a driver
   callback after 79, a waiting thread after 90.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import structlog
import torch

from streams.clock import RealClock
from streams.errors import DeviceLost
from streams.event import Event, follow
from streams.pace import Pace
from streams.queued import Operation, QueuedBackend, QueuedStream
from streams.stream import Observer

__all__ = ["DeviceBackend", "DeviceStream"]

T = TypeVar("T")
_log = structlog.get_logger("streams")


class _DeviceOperation(Operation[T]):
    """An operation with its marker on the device."""

    __slots__ = ("happened", "issued", "marker", "on_issue", "outcome", "outcome_error")

    def __init__(self, queue: QueuedStream, work: Callable[[], T], label: str, session: str, number: int) -> None:
        super().__init__(queue, work, label, session, number)
        self.issued = self.happened = False
        self.marker: torch.cuda.Event | None = None
        self.outcome: T | None = None
        self.outcome_error: BaseException | None = None
        self.on_issue: list[Callable[[], None]] = []


class DeviceStream(QueuedStream):
    """One device stream."""

    def __init__(self, backend: "DeviceBackend", name: str, queue_max: int, priority: int) -> None:
        super().__init__(backend, name, queue_max)
        self.stream = torch.cuda.Stream(backend.device_of(name), priority=priority)
        self._no_grad = torch.no_grad()  # one for all launches: making it costs as much as entering it
        self.outstanding: deque[_DeviceOperation[Any]] = deque()  # launched, not settled
        self._device_backend = backend
        self._ended_ns = -1  # of the operation settled last
        self._queued: deque[_DeviceOperation[Any]] = deque()  # not launched: something before them is not on the device yet

    def make(self, work: Callable[[], T], label: str, session: str, number: int) -> Operation[T]:
        """See `QueuedStream.make`."""
        return _DeviceOperation(self, work, label, session, number)

    def launch(self, operation: Operation[Any]) -> None:
        """See `QueuedStream.launch`."""
        assert isinstance(operation, _DeviceOperation)
        self._queued.append(operation)
        if len(self._queued) == 1:
            self.advance()

    def advance(self) -> None:
        """Launch queued operations up to the first that must wait for the host."""
        while self._queued:
            operation = self._queued[0]
            blocker = _blocker(operation)
            if blocker is not None:
                if isinstance(blocker, _DeviceOperation):
                    blocker.on_issue.append(self.advance)
                else:
                    blocker.on_done(lambda _: self.advance())
                return
            self._issue(operation)
            self._queued.popleft()
        self._device_backend.poll()

    def _issue(self, operation: _DeviceOperation[Any]) -> None:
        """Put one operation on the device and record its marker behind it."""
        began = time.perf_counter_ns()
        failure = self._device_backend.lost.error() or _first_failure(operation)
        with self.stream, self._no_grad:
            for events in (operation.after, operation.waits):
                for event in events:
                    if isinstance(event, _DeviceOperation) and event.queue is not self and event.marker is not None and not event.done():
                        self.stream.wait_event(event.marker)
            operation.started_ns = began if failure is None else -1
            if failure is None:
                assert operation.work is not None
                try:
                    operation.outcome = operation.work()
                except BaseException as error:  # the event carries whatever the work raised, an exit too, as on every backend
                    failure = error
            operation.outcome_error = failure
            if not self._device_backend.lost.done():
                operation.marker = torch.cuda.Event(enable_timing=self._device_backend.timed)
                try:
                    operation.marker.record(self.stream)
                except RuntimeError as error:
                    operation.outcome_error = self._device_backend.reported(operation, error)
        operation.issued = True
        self.outstanding.append(operation)
        self._device_backend.launch_ns += time.perf_counter_ns() - began
        if operation.on_issue:
            waiting, operation.on_issue = operation.on_issue, []
            for callback in waiting:
                callback()

    def begin(self, operation: _DeviceOperation[Any]) -> None:
        """Say when an ended operation can have begun: not when it was launched but when all before it had been seen to end."""
        if operation.started_ns >= 0:
            operation.started_ns = self.begun_ns(operation)
        self._ended_ns = operation.ended_ns

    def begun_ns(self, operation: _DeviceOperation[Any]) -> int:
        """When the oldest outstanding operation can have begun, all before it having ended."""
        begun = max(operation.started_ns, self._ended_ns)
        for events in (operation.after, operation.waits):
            for event in events:
                if isinstance(event, Operation) and event.ended_ns > begun:
                    begun = event.ended_ns
        return begun


class DeviceBackend(QueuedBackend[DeviceStream]):
    """Streams of one device, or of several of one process, polled from the loop that first submits to them."""

    def __init__(
        self, device: torch.device | str = "cuda", observer: Observer | None = None, *, timed: bool = False,
        elsewhere: Mapping[str, torch.device] | None = None, silence_s_max: float = 0.0,
    ) -> None:  # fmt: skip
        """Args: timed: markers keep the device's time, for an observer that compares them. elsewhere: other devices, by what the names of
        their streams contain. silence_s_max: where something is outstanding and nothing ends for so long, the device is lost; 0: never."""
        super().__init__(RealClock(), observer)
        self.device = torch.device(device)
        self._elsewhere = dict(elsewhere or {})
        self.timed = timed
        self.launch_ns = 0  # the loop's time in launching work, so far
        self.asking_ns = 0  # the loop's time in asking in vain, so far, rounds that held nothing else included
        self._silence_ns_max = round(silence_s_max * 1e9)
        self._silent_ns = -1  # since when nothing has ended, as far as was asked; -1: something has
        self._polling = False
        self._changed = True  # something was launched or has ended since the pace was told
        self._resting: asyncio.TimerHandle | None = None
        self._pace = Pace()
        self._turn: list[DeviceStream] = []

    def device_of(self, name: str) -> torch.device:
        """Where the stream of that name is."""
        return next((device for part, device in self._elsewhere.items() if part in name), self.device)

    def open_stream(self, name: str, queue_max: int) -> DeviceStream:
        """See `QueuedBackend.open_stream`. Decode's streams run before bulk work: everything but copies, transfers and what an append
        brings of a long history, a launch of thousands of programs that would otherwise stand before a step's."""
        urgent = not name.rpartition(".")[2].startswith(("copyback", "transfer", "prefetch"))
        stream = DeviceStream(self, name, queue_max, -1 if urgent else 0)
        self._turn.append(stream)
        return stream

    def shut(self) -> None:
        """See `QueuedBackend.shut`. Nothing is outstanding; streams go with their last reference."""

    def poll(self) -> None:
        """Ask the markers from the loop's next round on, if anything is outstanding; called when something was launched."""
        self._changed = True
        if self._resting is not None:
            self._resting.cancel()  # what was launched now may end sooner than what the rest was for
            self._resting, self._polling = None, False
        if not self._polling and any(stream.outstanding for stream in self._turn):
            assert self.loop is not None
            self._polling = True
            self.loop.call_soon(self._ask)

    def _ask(self) -> None:
        """One round over the streams' oldest markers; again and again while the loop has nothing else and an end is near."""
        self._polling, self._resting = False, None
        began = time.perf_counter_ns()
        found = self._collect()
        if not found:
            if self._changed:
                self._expect()
            slice_ns = self._pace.slice_ns(began)
            happened = slice_ns > 0 and self._spin(began + slice_ns)
            self.asking_ns += time.perf_counter_ns() - (self._pace.left_ns if slice_ns > 0 else began)
            found = happened and self._collect()
            found = found or self._gave_up(began)
        if found:
            self._silent_ns = -1
        if self._polling or not any(stream.outstanding for stream in self._turn):
            return
        assert self.loop is not None
        self._polling = True
        rest_s = self._pace.rest_s(time.perf_counter_ns(), found=found)
        if rest_s == 0.0:
            self.loop.call_soon(self._ask)
        else:
            self._resting = self.loop.call_later(rest_s, self._ask)

    def _gave_up(self, now_ns: int) -> bool:
        """Whether nothing has ended for so long that nothing will: then everything outstanding has failed by now.

        Since the first question in vain, not since a launch: a loop that was held up says nothing of the device, which is asked before.
        """
        if self._silent_ns < 0:
            self._silent_ns = now_ns
        if not self._silence_ns_max or now_ns - self._silent_ns <= self._silence_ns_max:
            return False
        oldest = min((stream.outstanding[0] for stream in self._turn if stream.outstanding), key=lambda one: one.number)
        seconds = self._silence_ns_max / 1e9
        self._lose(DeviceLost(f"{self.device} has ended nothing for {seconds:g} s, the oldest being {oldest.label} on {oldest.stream}"))
        return self._collect()

    def _expect(self) -> None:
        """Tell the pace what can end next. Not in a round that settles: those who wait come first."""
        self._changed = False
        heads = ((stream, stream.outstanding[0]) for stream in self._turn if stream.outstanding)
        began = ((operation.label, stream.begun_ns(operation)) for stream, operation in heads if _in_turn(operation))
        self._pace.expect(time.perf_counter_ns(), began)

    def _spin(self, until_ns: int) -> bool:
        """Ask what can happen next until something may have, or the time is up: False. Settles nothing."""
        heads = (stream.outstanding[0] for stream in self._turn if stream.outstanding)
        asked: list[tuple[_DeviceOperation[Any], Callable[[], bool]]]
        asked = [(head, head.marker.query) for head in heads if head.marker is not None and _in_turn(head)]
        try:
            while time.perf_counter_ns() < until_ns:
                for head, query in asked:
                    if query():
                        head.happened = True
                        return True
        except RuntimeError:
            return True  # the device's: `_collect` meets it again and says so
        return False

    def _collect(self) -> bool:
        """Settle what has completed; returns whether anything has."""
        any_settled, settled = False, True
        while settled:  # an operation may wait only for one that another stream settles in the same round
            settled = False
            for stream in self._turn:
                while stream.outstanding and self._completed(stream.outstanding[0]):
                    operation = stream.outstanding.popleft()
                    operation.ended_ns = time.perf_counter_ns()
                    stream.begin(operation)
                    if operation.started_ns >= 0:
                        self._pace.ended(operation.label, operation.ended_ns - operation.started_ns)
                    self.settle(operation, operation.outcome, operation.outcome_error)
                    settled = any_settled = True
        self._changed = self._changed or any_settled
        return any_settled

    def _completed(self, operation: _DeviceOperation[Any]) -> bool:
        if not _in_turn(operation):
            return False
        if operation.happened:
            return True
        if operation.marker is None or self.lost.done():
            operation.outcome_error = operation.outcome_error or self.lost.error()
            return True
        try:
            return bool(operation.marker.query())
        except RuntimeError as error:
            operation.outcome_error = operation.outcome_error or self.reported(operation, error)
            return True

    def reported(self, operation: _DeviceOperation[Any], error: RuntimeError) -> BaseException | None:
        """The device reported an error when it was asked about an operation; returns what everything fails with."""
        lost = DeviceLost(f"{self.device} reported an error near {operation.label}: {str(error).splitlines()[0]}")
        lost.__cause__ = error
        self._lose(lost)
        return self.lost.error()

    def _lose(self, lost: DeviceLost) -> None:
        """The device has failed; the first failure is the one that is told."""
        if self.lost.done():
            return
        _log.error("device.lost", reason=str(lost))
        raised = self.lost.settle(None, lost)
        if raised is not None:
            self.report(raised)


def _blocker(operation: _DeviceOperation[Any]) -> Event[Any] | None:
    """The first event that keeps the operation off the device: the host must see it done, or launched, before."""
    for events in (operation.after, operation.waits):
        for event in events:
            if not (event.done() or (isinstance(event, _DeviceOperation) and event.issued)):
                return event
    return None


def _in_turn(operation: _DeviceOperation[Any]) -> bool:
    """Whether everything the operation comes after is settled."""
    for events in (operation.after, operation.waits):
        for event in events:
            if not event.done():
                return False
    return True


def _first_failure(operation: _DeviceOperation[Any]) -> BaseException | None:
    """What the operation fails with before it runs."""
    for event in operation.after:
        failure = _failure(event, operation.label)
        if failure is not None:
            return failure
    return None


def _failure(event: Event[Any], label: str) -> BaseException | None:
    """What work ordered after `event` fails with, known as soon as the event's work was refused at launch."""
    if event.done():
        return event.dependency_failure(label)
    if isinstance(event, _DeviceOperation) and event.outcome_error is not None:
        return follow(event.outcome_error, failed=event.label, label=label)
    return None
