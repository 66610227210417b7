"""The virtual backend: streams on a virtual clock, every interleaving chosen by an `Order` (a seed, or a tape).

It imitates: completion in any order that streams, `after` and `wait` allow; a host that is faster or slower than the device; effects that
appear at completion; failed and late operations. It cannot imitate: work of two streams inside one another (work runs whole, at its
completion), memory models, real durations. It runs the real engine, memory layer and reference kernels.

Invariants:
1. Everything happens on the loop's thread: a callback (`_pump`) is scheduled while something can happen, and completes as many operations
   in a loop round as the order says, often none. With nothing outstanding nothing is scheduled, so an idle loop stays idle. Works on any
   loop that runs ready callbacks first in, first out: asyncio's own and uvloop.
2. An operation starts once everything it is ordered after is done. From its start to its completion its `writes` hold poison and its
   `reads` must not change; then what the writes held is put back and the work runs. One that a fault fails leaves poison behind.
3. Two operations in flight that share bytes, one of them writing, must be ordered: otherwise the later `submit` raises `Unordered`.
   So a race between declared buffers is found under every seed.
4. The clock moves only in `_pump`, forward, to a completion or a timer; timers due before a completion fire before it.
5. Same program, same order, same run: nothing here depends on addresses, hashes, time or threads.

`BufferChanged`, `Unordered` and `TapeMismatch` are bugs of the program under test: each fails what it strikes; `close` raises the first.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from streams.errors import BufferChanged, DependencyFailed, TapeMismatch, Unordered
from streams.event import Event
from streams.guard import Guard, Spans, overlap, spans_of
from streams.order import Order, SeededOrder
from streams.queued import Operation, QueuedBackend, QueuedStream
from streams.stream import Observer

__all__ = ["VirtualBackend", "VirtualClock", "VirtualStream"]

T = TypeVar("T")
_PATIENCE_ROUNDS = 100  # rounds in a row that an order leaves to the host before the next timer fires


class VirtualClock:
    """Integer nanoseconds that pass only when the backend says so."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._timers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._made = 0
        self.arm: Callable[[], None] = lambda: None  # set by the backend: a timer was made

    def now_ns(self) -> int:
        """Virtual nanoseconds since the backend was made."""
        return self._now_ns

    async def wait_ns(self, duration_ns: int) -> None:
        """Wait for `duration_ns` of virtual time (0: let others run once). Cancel: the timer is forgotten."""
        assert duration_ns >= 0, f"duration {duration_ns} ns is negative"
        if duration_ns == 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._timers, (self._now_ns + duration_ns, self._made, future))
        self._made += 1
        self.arm()
        await future

    def next_due_ns(self) -> int | None:
        """When the next timer that somebody waits for is due."""
        while self._timers and self._timers[0][2].done():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def fire(self) -> None:
        """Move to the next timer and wake who waits for it."""
        due_ns, _, future = heapq.heappop(self._timers)
        self.advance(due_ns)
        future.set_result(None)

    def advance(self, to_ns: int) -> None:
        """Move to `to_ns`, never back."""
        self._now_ns = max(self._now_ns, to_ns)


class _VirtualOperation(Operation[T]):
    """An operation with the bytes it claims and the operations in flight it is ordered after."""

    __slots__ = ("before", "failed_before", "guard", "read_spans", "ready", "write_spans")

    def __init__(self, queue: QueuedStream, work: Callable[[], T], label: str, session: str, number: int) -> None:
        super().__init__(queue, work, label, session, number)
        self.ready = False  # everything it is ordered after is done
        self.guard: Guard | None = None
        self.failed_before: DependencyFailed | None = None
        self.before: frozenset[int] = frozenset()
        self.read_spans: Spans = ()
        self.write_spans: Spans = ()


class VirtualStream(QueuedStream):
    """A stream of a virtual backend."""

    def __init__(self, backend: "VirtualBackend", name: str, queue_max: int) -> None:
        super().__init__(backend, name, queue_max)
        self.line: deque[_VirtualOperation[Any]] = deque()
        self._virtual = backend

    def make(self, work: Callable[[], T], label: str, session: str, number: int) -> Operation[T]:
        """See `QueuedStream.make`."""
        return _VirtualOperation(self, work, label, session, number)

    def launch(self, operation: Operation[Any]) -> None:
        """See `QueuedStream.launch`."""
        assert isinstance(operation, _VirtualOperation)
        self._virtual.take(self, operation)


class VirtualBackend(QueuedBackend[VirtualStream]):
    """Streams in virtual time. `order` decides everything; an int is short for `SeededOrder(int)`."""

    def __init__(self, order: Order | int = 0, *, observer: Observer | None = None) -> None:
        self.virtual_clock = VirtualClock()
        super().__init__(self.virtual_clock, observer)
        self.order: Order = SeededOrder(order) if isinstance(order, int) else order
        self.virtual_clock.arm = self._timer_made
        self._armed = False
        self._held: set[int] = set()
        self._outstanding: dict[int, _VirtualOperation[Any]] = {}
        self._chosen: _VirtualOperation[Any] | None = None
        self._passed = 0
        self._abandoned: Exception | None = None

    def open_stream(self, name: str, queue_max: int) -> VirtualStream:
        """See `QueuedBackend.open_stream`."""
        return VirtualStream(self, name, queue_max)

    def shut(self) -> None:
        """See `QueuedBackend.shut`; also ends the order, which may find that the run fell short of its tape."""
        assert not self._outstanding, f"{len(self._outstanding)} operations outlived their streams"
        if self._abandoned is None:
            try:
                self.order.finish()
            except TapeMismatch as mismatch:
                self.report(mismatch)

    def hold(self, event: Event[Any]) -> None:
        """Keep the event's operation, not yet done, from completing until `release`."""
        assert event.number in self._outstanding, f"{event!r} is not in flight here"
        self._held.add(event.number)

    def release(self, event: Event[Any]) -> None:
        """Let a held operation complete when its turn comes."""
        self._held.discard(event.number)
        self._arm()

    def take(self, stream: VirtualStream, operation: _VirtualOperation[Any]) -> None:
        """Take over a submitted operation: check it against what is in flight, start it if nothing is before it."""
        refused = self._refused(stream, operation)
        stream.line.append(operation)
        self._outstanding[operation.number] = operation
        if refused is not None:
            self._drop(operation, refused)
            if not isinstance(refused, Unordered):
                self._abandon(refused)
            raise refused
        for event in (*operation.after, *operation.waits):
            if event.number not in self._outstanding or self._outstanding[event.number] is not event:
                event.on_done(lambda _: self._wake())  # another backend's: nothing of ours will tell us
        self._wake()

    # what is in flight together

    def _refused(self, stream: VirtualStream, operation: _VirtualOperation[Any]) -> Exception | None:
        """Why the submission is a bug of the program, if it is one."""
        if self._abandoned is not None:
            return self._abandoned
        try:
            self.order.submitted(operation)
            self._claim(stream, operation)
        except (TapeMismatch, Unordered) as bug:
            self.report(bug)
            return bug
        return None

    def _claim(self, stream: VirtualStream, operation: _VirtualOperation[Any]) -> None:
        """Find what the operation is ordered after, and refuse it if it shares bytes with anything else in flight."""
        before: set[int] = set()
        last = (stream.line[-1],) if stream.line else ()
        for event in (*operation.after, *operation.waits, *last):
            known = self._outstanding.get(event.number)
            if known is not None and known is event:
                before.add(event.number)
                before.update(number for number in known.before if number in self._outstanding)
        operation.before = frozenset(before)
        operation.read_spans = spans_of(operation.reads)
        operation.write_spans = spans_of(operation.writes)
        for number, other in self._outstanding.items():
            if number not in before and _conflict(operation, other):
                raise Unordered(
                    f"{operation.label} on {operation.stream} shares a buffer with {other.label} on {other.stream}, "
                    "which is in flight; neither is ordered before the other"
                )

    def _start_ready(self) -> None:
        """Start every head of a line that nothing holds back any more."""
        for stream in self._streams.values():
            if not stream.line:
                continue
            head = stream.line[0]
            if not head.ready and all(event.done() for event in (*head.after, *head.waits)):
                head.ready = True
                for event in head.after:
                    head.failed_before = head.failed_before or event.dependency_failure(head.label)
                if head.failed_before is None:
                    head.started_ns = self.virtual_clock.now_ns()
                    head.guard = Guard(head.reads, head.writes)

    # what happens next

    def _timer_made(self) -> None:
        self.bind()  # a wait may be the first thing that ever happens here
        self._arm()

    def _wake(self) -> None:
        self._start_ready()
        self._arm()

    def _arm(self) -> None:
        if not self._armed and self.loop is not None and (self._runnable() or self.virtual_clock.next_due_ns() is not None):
            self._armed = True
            self.loop.call_soon(self._pump)

    def _runnable(self) -> list[_VirtualOperation[Any]]:
        heads = (stream.line[0] for stream in self._streams.values() if stream.line)
        return [head for head in heads if head.ready and head.number not in self._held]

    def _pump(self) -> None:
        """One round: complete operations and fire timers until the order leaves the rest of it to the host."""
        self._armed = False
        try:
            while self.order.ready() and self._step():
                pass
        except Exception as bug:  # the order's or our own; without an end of the run everybody would wait for ever
            self.report(bug)
            self._abandon(bug)
        self._arm()

    def _step(self) -> bool:
        """Complete one operation or fire one timer; returns whether there was one."""
        runnable = self._runnable()
        due_ns = self.virtual_clock.next_due_ns()
        if not runnable:
            if due_ns is not None:
                self.virtual_clock.fire()
            return due_ns is not None
        if self._chosen is None or self._chosen not in runnable:
            chosen = self.order.choose(runnable)
            assert chosen is None or isinstance(chosen, _VirtualOperation)
            self._chosen = chosen
        if self._chosen is None:
            self._passed += 1
            if self._passed > _PATIENCE_ROUNDS and due_ns is not None:
                self.virtual_clock.fire()  # the order waits for the host, and the host for time
            return False
        self._passed = 0
        starts_ns = max(self._chosen.started_ns, 0)
        ends_ns = 0 if self._chosen.failed_before is not None else starts_ns + self.order.duration_ns(self._chosen)
        if due_ns is not None and due_ns <= ends_ns:
            self.virtual_clock.fire()
            return True
        chosen_now, self._chosen = self._chosen, None
        self.virtual_clock.advance(ends_ns)
        self._complete(chosen_now)
        return True

    def _complete(self, operation: _VirtualOperation[Any]) -> None:
        """Make the effects appear, then publish the outcome."""
        value, error = None, self._before_work(operation)
        if error is None:
            assert operation.work is not None
            try:
                with torch.no_grad():
                    value = operation.work()
            except BaseException as failure:  # the event carries it, as on a device
                error = failure
        self.order.completed(operation, error)
        self._publish(operation, value, error)

    def _before_work(self, operation: _VirtualOperation[Any]) -> BaseException | None:
        """Lift the guard; returns why the work must not run, if so."""
        if operation.failed_before is not None:
            return operation.failed_before
        assert operation.guard is not None
        changed = operation.guard.changed()
        if changed is not None:
            bug = BufferChanged(f"{operation.label} on {operation.stream} was in flight when somebody wrote its {changed}")
            self.report(bug)
            return bug
        failure = self.order.failure(operation)
        if failure is None:
            operation.guard.restore()
        return failure

    def _publish(self, operation: _VirtualOperation[Any], value: object, error: BaseException | None) -> None:
        stream = operation.queue
        assert isinstance(stream, VirtualStream)
        stream.line.remove(operation)
        del self._outstanding[operation.number]
        self._held.discard(operation.number)
        operation.guard = None
        operation.ended_ns = self.virtual_clock.now_ns()
        self.settle(operation, value, error)
        self._start_ready()

    def _drop(self, operation: _VirtualOperation[Any], error: BaseException) -> None:
        """Fail an operation whose turn will not come, leaving its buffers as they were."""
        if operation.guard is not None:
            operation.guard.restore()
        operation.started_ns = -1
        self._publish(operation, None, error)
        operation.error()  # observed: it was raised from `submit`, or ends the whole run

    def _abandon(self, bug: Exception) -> None:
        """The run has left its tape, or cannot go on: fail everything in flight, and every later submission."""
        self._abandoned = bug
        while self._outstanding:
            self._drop(next(iter(self._outstanding.values())), bug)


def _conflict(one: _VirtualOperation[Any], two: _VirtualOperation[Any]) -> bool:
    return (
        overlap(one.write_spans, two.write_spans)
        or overlap(one.write_spans, two.read_spans)
        or overlap(one.read_spans, two.write_spans)
    )  # fmt: skip
