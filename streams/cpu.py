"""The CPU backend: one ordered worker thread a stream, so that work of different streams really overlaps.

Knows no rows. Torch releases the interpreter's lock inside its operators, which is where the overlap comes from.

Invariants:
1. A worker takes operations in submission order and waits for their dependencies on its own thread; the loop never waits.
   Dependencies exist before what depends on them, so workers cannot wait in a circle.
2. Outcomes go to the loop through one queue and at most one pending wake-up, in completion order: a finished operation enters the queue
   before anything that depends on it can start.
3. A worker refers to its queue and the outcome queue, never to the backend: a forgotten backend is collected, and its finalizer (also run
   at interpreter exit) stops the workers. Work then still queued is dropped: nobody is left to hear of it.
4. Each worker sets one torch thread and no gradients; the caller's thread is left as it was.
"""

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from streams.clock import RealClock
from streams.errors import Closed
from streams.event import Event, follow
from streams.queued import Operation, QueuedBackend, QueuedStream
from streams.stream import Observer

__all__ = ["CpuBackend", "CpuStream"]

T = TypeVar("T")
_STOP_WAIT_S = 5.0  # for the operation a worker is in when the interpreter exits
_gates = threading.Lock()  # guards `finished` against `waiting` of every operation; held for a few instructions


class _CpuOperation(Operation[T]):
    """An operation with the workers' view of it, which runs ahead of the loop's."""

    __slots__ = ("finished", "outcome", "outcome_error", "waiting")

    def __init__(self, queue: QueuedStream, work: Callable[[], T], label: str, session: str, number: int) -> None:
        super().__init__(queue, work, label, session, number)
        self.finished = False
        self.outcome: T | None = None
        self.outcome_error: BaseException | None = None
        self.waiting: list[threading.Lock] = []

    def finish(self) -> None:
        """Let everything that waits for the outcome go on."""
        with _gates:
            self.finished = True
            waiting, self.waiting = self.waiting, []
        for gate in waiting:
            gate.release()

    def wait_finished(self) -> None:
        """Block this thread until the outcome is there."""
        if self.finished:
            return
        gate = threading.Lock()
        gate.acquire()
        with _gates:
            if self.finished:
                return
            self.waiting.append(gate)
        gate.acquire()


class _Turn:
    """What a worker takes from its queue: an operation, what it comes after, and what had already failed before it."""

    __slots__ = ("after", "failure", "operation", "waits")

    def __init__(self, operation: _CpuOperation[Any]) -> None:
        self.operation = operation
        self.failure: BaseException | None = None
        self.after: list[_CpuOperation[Any]] = []
        for event in operation.after:
            if event.done():
                self.failure = self.failure or event.dependency_failure(operation.label)
            else:
                self.after.append(_on_workers(event))
        self.waits = [_on_workers(event) for event in operation.waits if not event.done()]


class _Workers:
    """The threads of one backend and the outcomes on their way to its loop. Threads append; the loop drains."""

    def __init__(self) -> None:
        self.stopped = False
        self.wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._finished: list[_CpuOperation[Any]] = []
        self._waking = False
        self._threads: list[tuple[threading.Thread, SimpleQueue[_Turn | None]]] = []

    def start(self, name: str) -> "SimpleQueue[_Turn | None]":
        """Start a worker; returns the queue it takes turns from."""
        turns: SimpleQueue[_Turn | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(turns, self), name=f"stream-{name}", daemon=True)
        thread.start()
        self._threads.append((thread, turns))
        return turns

    def append(self, operation: _CpuOperation[Any]) -> None:
        """Hand an outcome to the loop, waking it unless a wake-up is already on its way."""
        with self._lock:
            self._finished.append(operation)
            waking, self._waking = self._waking, True
        if not waking:
            with contextlib.suppress(RuntimeError):  # the loop was closed under us: nobody is left to tell
                self.wake()

    def drain(self) -> list[_CpuOperation[Any]]:
        """Outcomes since the last call, in completion order."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._waking = False
        return finished

    def stop(self) -> None:
        """End the threads after the operation each is in; drop the rest. Refers to nothing of the backend, which may be gone."""
        self.stopped = True
        threads, self._threads = self._threads, []
        for _, turns in threads:
            turns.put(None)
        for thread, _ in threads:
            if thread is not threading.current_thread():  # a collection may run on a worker
                thread.join(_STOP_WAIT_S)


class CpuStream(QueuedStream):
    """A stream whose work runs on a thread of its own, started by the first submission."""

    def __init__(self, backend: "CpuBackend", name: str, queue_max: int, workers: _Workers) -> None:
        super().__init__(backend, name, queue_max)
        self._workers = workers
        self._turns: SimpleQueue[_Turn | None] | None = None

    def make(self, work: Callable[[], T], label: str, session: str, number: int) -> Operation[T]:
        """See `QueuedStream.make`. The first call starts the worker: if that fails, nothing was counted yet."""
        if self._turns is None:
            self._turns = self._workers.start(self.name)
        return _CpuOperation(self, work, label, session, number)

    def launch(self, operation: Operation[Any]) -> None:
        """See `QueuedStream.launch`."""
        assert isinstance(operation, _CpuOperation)
        assert self._turns is not None
        self._turns.put(_Turn(operation))


class CpuBackend(QueuedBackend[CpuStream]):
    """Streams on the CPU, beside the loop that first submits to them."""

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__(RealClock(), observer)
        self._workers = _Workers()
        weakref.finalize(self, self._workers.stop)

    def open_stream(self, name: str, queue_max: int) -> CpuStream:
        """See `QueuedBackend.open_stream`."""
        return CpuStream(self, name, queue_max, self._workers)

    def bind(self) -> None:
        """See `QueuedBackend.bind`; the first call also says where outcomes go."""
        if self.loop is None:
            loop, backend = asyncio.get_running_loop(), weakref.ref(self)
            self._workers.wake = lambda: loop.call_soon_threadsafe(_drain, backend)
        super().bind()

    def drain(self) -> None:
        """Settle what the workers have finished; runs on the loop."""
        for operation in self._workers.drain():
            self.settle(operation, operation.outcome, operation.outcome_error)

    def shut(self) -> None:
        """See `QueuedBackend.shut`."""
        self._workers.stop()


def _drain(backend: "weakref.ref[CpuBackend]") -> None:
    alive = backend()
    if alive is not None:
        alive.drain()


def _on_workers(event: Event[Any]) -> _CpuOperation[Any]:
    """The event as something a worker can wait for; one of another backend, or of none, is mirrored when the loop sees it done."""
    if isinstance(event, _CpuOperation):
        return event
    mirror: _CpuOperation[Any] = _CpuOperation.__new__(_CpuOperation)
    Event.__init__(mirror, event.label)
    mirror.finished, mirror.waiting, mirror.outcome_error = False, [], None

    def happened(done: Event[Any]) -> None:
        mirror.outcome_error = done.error()
        mirror.finish()

    event.on_done(happened)
    return mirror


def _work(turns: "SimpleQueue[_Turn | None]", workers: _Workers) -> None:
    """The life of a worker thread."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    while True:
        turn = turns.get()
        if turn is None:
            return
        _take(turn, workers)
        workers.append(turn.operation)
        turn.operation.finish()  # also when stopped: another worker may be waiting for it
        del turn  # an idle worker holds no buffers


def _take(turn: _Turn, workers: _Workers) -> None:
    """Wait for the dependencies, run the work unless the workers were stopped, keep the outcome in the operation."""
    operation = turn.operation
    failure = turn.failure
    for event in turn.waits:
        event.wait_finished()
    for event in turn.after:
        event.wait_finished()
        if event.outcome_error is not None and failure is None:
            failure = follow(event.outcome_error, failed=event.label, label=operation.label)
    if failure is None and workers.stopped:
        failure = Closed(f"{operation.label} was dropped: its backend was never closed and is gone")
    if failure is not None:
        operation.outcome_error = failure
        operation.ended_ns = time.perf_counter_ns()
        return
    assert operation.work is not None
    operation.started_ns = time.perf_counter_ns()
    try:
        operation.outcome = operation.work()
    except BaseException as error:  # the worker outlives whatever the work raises; the event carries it
        operation.outcome_error = error
    operation.ended_ns = time.perf_counter_ns()
