"""The device backend: streams of a GPU through `torch.cuda`, which is CUDA on NVIDIA cards and HIP on AMD ones.

Knows no rows. Work is launched on the loop's thread, in submission order of its stream; a marker event recorded behind it says when it
completed, and one poller a loop asks the markers.

Invariants:
1. An operation is settled only when its marker has happened and everything it comes after is settled.
2. Order between device streams is a device-side wait; the host waits for nothing. An event of another backend holds its stream's launches
   back until the loop sees it done.
3. Work that raises while it is launched fails alone, in its stream's order; what comes `after` it never launches. A failure that the
   device reports is the device's: every outstanding operation fails with `DeviceLost`, and nothing more is launched.
4. The poller runs only while something is outstanding: it spins for a while after the last progress, then asks once a millisecond, which
   is a loop timer's grain. Measured on an H200: polling from the loop wakes after 19 us at the median, a driver callback after 79.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from streams.clock import RealClock
from streams.errors import DeviceLost
from streams.event import Event, follow
from streams.queued import Operation, QueuedBackend, QueuedStream
from streams.stream import Observer

__all__ = ["DeviceBackend", "DeviceStream"]

T = TypeVar("T")
_SPIN_NS = 5_000_000  # a decode step of a large model takes some milliseconds: spinning through one costs less than waking late
_REST_S = 0.001


class _DeviceOperation(Operation[T]):
    """An operation with its marker on the device."""

    __slots__ = ("issued", "marker", "on_issue", "outcome", "outcome_error")

    def __init__(self, queue: QueuedStream, work: Callable[[], T], label: str, session: str, number: int) -> None:
        super().__init__(queue, work, label, session, number)
        self.issued = False
        self.marker: torch.cuda.Event | None = None
        self.outcome: T | None = None
        self.outcome_error: BaseException | None = None
        self.on_issue: list[Callable[[], None]] = []


class DeviceStream(QueuedStream):
    """One device stream."""

    def __init__(self, backend: "DeviceBackend", name: str, queue_max: int, priority: int) -> None:
        super().__init__(backend, name, queue_max)
        self.stream = torch.cuda.Stream(backend.device, priority=priority)
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
            blocker = next((event for event in (*operation.after, *operation.waits) if not _on_device(event)), None)
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
        failure = self._device_backend.lost or next(filter(None, (_failure(event, operation.label) for event in operation.after)), None)
        with torch.cuda.stream(self.stream), torch.no_grad():
            for event in (*operation.after, *operation.waits):
                if isinstance(event, _DeviceOperation) and event.marker is not None and not event.done() and event.queue is not self:
                    self.stream.wait_event(event.marker)
            operation.started_ns = time.perf_counter_ns() if failure is None else -1
            if failure is None:
                assert operation.work is not None
                try:
                    operation.outcome = operation.work()
                except BaseException as error:  # the event carries whatever the work raised, an exit too, as on every backend
                    failure = error
            operation.outcome_error = failure
            if self._device_backend.lost is None:
                operation.marker = torch.cuda.Event()
                operation.marker.record(self.stream)
        operation.issued = True
        self.outstanding.append(operation)
        waiting, operation.on_issue = operation.on_issue, []
        for callback in waiting:
            callback()

    def begin(self, operation: _DeviceOperation[Any]) -> None:
        """Say when an ended operation can have begun: not when it was launched but when all before it had been seen to end."""
        if operation.started_ns >= 0:
            before = (event.ended_ns for event in (*operation.after, *operation.waits) if isinstance(event, Operation))
            operation.started_ns = max(operation.started_ns, self._ended_ns, *before)
        self._ended_ns = operation.ended_ns


class DeviceBackend(QueuedBackend[DeviceStream]):
    """Streams of one device, polled from the loop that first submits to them."""

    def __init__(self, device: torch.device | str = "cuda", observer: Observer | None = None) -> None:
        super().__init__(RealClock(), observer)
        self.device = torch.device(device)
        self.lost: DeviceLost | None = None
        self._polling = False
        self._progress_ns = 0
        self._turn: list[DeviceStream] = []

    def open_stream(self, name: str, queue_max: int) -> DeviceStream:
        """See `QueuedBackend.open_stream`. Decode's streams run before bulk work: everything but copyback and transfers is urgent."""
        urgent = not name.rpartition(".")[2].startswith(("copyback", "transfer"))
        stream = DeviceStream(self, name, queue_max, -1 if urgent else 0)
        self._turn.append(stream)
        return stream

    def shut(self) -> None:
        """See `QueuedBackend.shut`. Nothing is outstanding; streams go with their last reference."""

    def poll(self) -> None:
        """Ask the markers from the loop's next round on, if anything is outstanding."""
        if not self._polling and any(stream.outstanding for stream in self._turn):
            assert self.loop is not None
            self._polling = True
            self._progress_ns = time.perf_counter_ns()
            self.loop.call_soon(self._ask)

    def _ask(self) -> None:
        """One round over the streams' oldest markers."""
        self._polling = False
        now = time.perf_counter_ns()
        if self._collect():
            self._progress_ns = now
        if self._polling or not any(stream.outstanding for stream in self._turn):
            return
        assert self.loop is not None
        self._polling = True
        if now - self._progress_ns < _SPIN_NS:
            self.loop.call_soon(self._ask)
        else:
            self.loop.call_later(_REST_S, self._ask)

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
                    self.settle(operation, operation.outcome, operation.outcome_error)
                    settled = any_settled = True
        return any_settled

    def _completed(self, operation: _DeviceOperation[Any]) -> bool:
        if not all(event.done() for event in (*operation.after, *operation.waits)):
            return False
        if operation.marker is None or self.lost is not None:
            operation.outcome_error = operation.outcome_error or self.lost
            return True
        try:
            return bool(operation.marker.query())
        except RuntimeError as error:
            self.lost = DeviceLost(f"{self.device} reported an error near {operation.label}: {str(error).splitlines()[0]}")
            self.lost.__cause__ = error
            operation.outcome_error = operation.outcome_error or self.lost
            return True


def _on_device(event: Event[Any]) -> bool:
    """Whether the device can order work behind the event without the host."""
    return event.done() or (isinstance(event, _DeviceOperation) and event.issued)


def _failure(event: Event[Any], label: str) -> BaseException | None:
    """What work ordered after `event` fails with, known as soon as the event's work was refused at launch."""
    if event.done():
        return event.dependency_failure(label)
    if isinstance(event, _DeviceOperation) and event.outcome_error is not None:
        return follow(event.outcome_error, failed=event.label, label=label)
    return None
