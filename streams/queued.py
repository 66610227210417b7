"""What every backend does on the loop's side: limits, order, room, closing, counting, observing.

A backend subclasses `QueuedStream` and `QueuedBackend` and supplies only how an operation gets run; it reports outcomes through
`QueuedBackend.settle`. Knows no threads and no devices.

Invariants:
1. `in_flight` of a stream = operations submitted and not settled; never above `queue_max`.
2. An operation's closure and buffers are dropped in `settle`, on the loop's thread, and nowhere else.
3. A failed event that nobody asked about is counted in `statistics()` and logged once when the backend closes.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import structlog
from torch import Tensor

from streams.clock import Clock
from streams.errors import Closed, DependencyFailed, Full
from streams.event import Event
from streams.stream import QUEUE_MAX, BackendStatistics, Observer, StreamStatistics

__all__ = ["Operation", "QueuedBackend", "QueuedStream"]

T = TypeVar("T")
_FAILURES_MAX = 64  # unobserved failures kept, newest first to stay: each holds its traceback and so its tensors
_log = structlog.get_logger("streams")


class Operation(Event[T]):
    """An event with the work behind it."""

    __slots__ = ("after", "ended_ns", "payload_bytes", "queue", "reads", "started_ns", "waits", "work", "writes")

    def __init__(self, queue: "QueuedStream", work: Callable[[], T], label: str, session: str, number: int) -> None:
        super().__init__(label, stream=queue.name, session=session, number=number)
        self.queue = queue
        self.work: Callable[[], T] | None = work
        self.after: Sequence[Event[Any]] = ()
        self.waits: Sequence[Event[Any]] = ()
        self.reads: Sequence[Tensor] = ()
        self.writes: Sequence[Tensor] = ()
        self.payload_bytes = 0
        self.started_ns = -1  # -1: never ran
        self.ended_ns = -1

    def release(self) -> None:
        """Drop the closure, the buffers and the events before it."""
        self.work = None
        self.after = self.waits = ()
        self.reads = self.writes = ()


class QueuedStream(ABC):
    """The loop's side of a stream. Subclasses supply `make` and `launch`."""

    def __init__(self, backend: "QueuedBackend[Any]", name: str, queue_max: int) -> None:
        assert queue_max >= 1, f"queue_max {queue_max} leaves no room for work"
        self.name = name
        self.queue_max = queue_max
        self.in_flight = 0
        self.backend = backend
        self._closed = False
        self._waits: list[Event[Any]] = []
        self._last: Event[Any] | None = None
        self._room: list[asyncio.Future[None]] = []
        self._submitted = self._completed = self._failed = self._payload_bytes = self._busy_ns = 0

    @abstractmethod
    def make(self, work: Callable[[], T], label: str, session: str, number: int) -> Operation[T]:
        """A new operation of the backend's own kind."""

    @abstractmethod
    def launch(self, operation: Operation[Any]) -> None:
        """Take over a complete operation; called in submission order."""

    def submit(
        self,
        work: Callable[[], T],
        *,
        label: str,
        session: str = "",
        after: Sequence[Event[Any]] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        payload_bytes: int = 0,
    ) -> Event[T]:
        """See `Stream.submit`."""
        backend = self.backend
        backend.bind()
        if self._closed:
            raise Closed(f"{label} was submitted to stream {self.name}, which is closed")
        if self.in_flight >= self.queue_max:
            raise Full(f"{label} does not fit on stream {self.name}: {self.in_flight} operations in flight, at most {self.queue_max}")
        operation = self.make(work, label, session, backend.number())
        operation.after = tuple(after)
        operation.waits, self._waits = self._waits, []
        operation.reads = tuple(reads)
        operation.writes = tuple(writes)
        operation.payload_bytes = payload_bytes
        self.in_flight += 1
        self._submitted += 1
        self._payload_bytes += payload_bytes
        self._last = operation
        backend.announce(operation)
        self.launch(operation)
        return operation

    def wait(self, event: Event[Any]) -> None:
        """See `Stream.wait`."""
        self.backend.bind()
        self._waits.append(event)  # done or not: whether it is must not show on a tape

    async def wait_room(self) -> None:
        """See `Stream.wait_room`."""
        while self.in_flight >= self.queue_max and not self._closed:
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter
        if self._closed:
            raise Closed(f"stream {self.name} is closed")

    async def idle(self) -> None:
        """See `Stream.idle`."""
        if self._last is not None:
            await self._last.wait_done()

    async def close(self) -> None:
        """See `Stream.close`."""
        self.refuse()
        await self.idle()

    def refuse(self) -> None:
        """Refuse new work from now on, and those who wait for room."""
        self._closed = True
        self._wake_room()

    def settled(self, operation: Operation[Any], error: BaseException | None) -> None:
        """Count an outcome; called by the backend just before the event is done."""
        self.in_flight -= 1
        assert self.in_flight >= 0, f"stream {self.name} settled more than was submitted"
        if error is None:
            self._completed += 1
        else:
            self._failed += 1
        if operation.started_ns >= 0:
            self._busy_ns += operation.ended_ns - operation.started_ns
        if self._room:
            self._wake_room()

    def _wake_room(self) -> None:
        waiting, self._room = self._room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def statistics(self) -> StreamStatistics:
        """A frozen snapshot."""
        return StreamStatistics(
            self.name, self._submitted, self._completed, self._failed, self.in_flight, self._payload_bytes, self._busy_ns
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.in_flight} in flight{', closed' if self._closed else ''}>"


S = TypeVar("S", bound=QueuedStream)


class QueuedBackend(ABC, Generic[S]):
    """The loop's side of a backend. Subclasses supply `open_stream` and `shut`."""

    def __init__(self, clock: Clock, observer: Observer | None) -> None:
        self.clock = clock
        self.observer = observer
        self.loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, S] = {}
        self._numbers = 0
        self._closed = False
        self._failures: deque[Event[Any]] = deque(maxlen=_FAILURES_MAX)
        self._bug: BaseException | None = None
        self.lost: Event[None] = Event("device")

    @abstractmethod
    def open_stream(self, name: str, queue_max: int) -> S:
        """A new stream of the backend's own kind."""

    @abstractmethod
    def shut(self) -> None:
        """Release what the backend holds besides operations; every stream is closed and idle."""

    def stream(self, name: str, *, queue_max: int = QUEUE_MAX) -> S:
        """See `Backend.stream`."""
        if self._closed:
            raise Closed(f"stream {name} was asked of a closed backend")
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = self.open_stream(name, queue_max)
        return found

    async def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
        for stream in self._streams.values():
            stream.refuse()
        for stream in self._streams.values():
            await stream.idle()
        self.shut()
        lost = [event for event in self._failures if event.unobserved_failure()]
        self._failures.clear()
        if lost:
            _log.warning("operation.failed", unobserved=len(lost), labels=[event.label for event in lost[:8]], first=repr(lost[0].error()))
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def statistics(self) -> BackendStatistics:
        """See `Backend.statistics`."""
        each = tuple(stream.statistics() for stream in self._streams.values())
        return BackendStatistics(
            submitted=sum(one.submitted for one in each),
            completed=sum(one.completed for one in each),
            failed=sum(one.failed for one in each),
            in_flight=sum(one.in_flight for one in each),
            unobserved_failures=sum(event.unobserved_failure() for event in self._failures),
            streams=each,
        )

    def bind(self) -> None:
        """Tie the backend to the loop that first submits; assert that every later call comes from code that this loop runs."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
        running = asyncio._get_running_loop()  # the public form raises where there is none, and costs twice as much
        assert running is self.loop, "streams belong to one loop: submit and wait are called from what it runs, and nowhere else"

    def report(self, bug: BaseException) -> None:
        """Remember the first failure that belongs to no event, for `close` to raise."""
        self._bug = self._bug or bug

    def number(self) -> int:
        """The next operation's number, from 0."""
        self._numbers += 1
        return self._numbers - 1

    def announce(self, operation: Operation[Any]) -> None:
        """Tell the observer of a submission, before it is launched."""
        observer = self.observer
        if observer is not None:
            operation.awaited = self._awaited
            try:
                observer.submitted(operation, operation.after, operation.waits, operation.payload_bytes, self.clock.now_ns())
            except Exception as bug:  # an observer that raises must not change the run: here and below, `close` raises it
                self.report(bug)

    def _awaited(self, event: Event[Any], ended: bool) -> None:
        observer = self.observer
        if observer is None:
            return  # whoever observed its submission has left
        try:
            observer.awaited(event, ended, self.clock.now_ns())
        except Exception as bug:
            self.report(bug)

    def settle(self, operation: Operation[T], value: T | None, error: BaseException | None) -> None:
        """Publish an outcome on the loop's thread: observe, count, release the buffers, then make the event done."""
        observer = self.observer
        if observer is not None:
            try:
                if operation.started_ns >= 0:
                    observer.started(operation, operation.started_ns)
                observer.completed(operation, error, operation.ended_ns)
            except Exception as bug:
                self.report(bug)
        if isinstance(error, DependencyFailed):
            for event in operation.after:
                event.error()  # whoever asks about this operation learns of the first failure
        operation.release()
        operation.queue.settled(operation, error)
        raised = operation.settle(value, error)
        if operation.unobserved_failure():
            self._failures = deque((event for event in self._failures if event.unobserved_failure()), maxlen=_FAILURES_MAX)
            self._failures.append(operation)
        if raised is not None:
            self.report(raised)
            assert self.loop is not None
            self.loop.call_exception_handler({"message": f"a callback of {operation!r} raised", "exception": raised})
