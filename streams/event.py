"""`Event`: one piece of submitted work, seen from the loop. It happens once.

Holds the outcome and who waits for it. Does not know what runs the work, nor when.

Invariants:
1. An event is settled once, on the loop's thread, and never changes afterwards; there is no `clear`.
2. Callbacks run synchronously at that moment in the order they were added; tasks that wait are woken in the order they came.
   Both see the event done. Backends settle events in completion order, so callbacks of different events run in that order too.
3. Cancelling a task that waits removes that task's wait and nothing else.
4. A failure counts as observed once somebody asked for it (`result`, `error`, a finished wait, or work ordered `after` it).
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from streams.errors import DependencyFailed

__all__ = ["Event"]

T = TypeVar("T")


class Event(Generic[T]):
    """Happens once; carries a result or an error. Made by `Stream.submit`, or by `completed` where nothing is left to wait for."""

    __slots__ = (
        "__weakref__", "_callbacks", "_done", "_error", "_observed", "_value", "_waiters",
        "awaited", "label", "number", "session", "stream",
    )  # fmt: skip

    def __init__(self, label: str, *, stream: str = "", session: str = "", number: int = -1) -> None:
        self.label = label
        self.stream = stream
        self.session = session
        self.number = number  # order of submission within its backend; -1: no backend made it
        self.awaited: Callable[[Event[T], bool], None] | None = None  # told when a wait begins (False) and has ended (True)
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._observed = False
        self._callbacks: list[Callable[[Event[T]], None]] | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    @classmethod
    def completed(cls, value: T, *, label: str = "completed") -> "Event[T]":
        """An event that has already happened, for work that turned out to be nothing."""
        event = cls(label)
        event._done = True
        event._value = value
        return event

    def done(self) -> bool:
        """Whether the work has completed or failed."""
        return self._done

    def error(self) -> BaseException | None:
        """The failure itself, `DependencyFailed`, or None (also while not done)."""
        self._observed = True if self._done else self._observed
        return self._error

    def result(self) -> T:
        """What the work returned. Asserts `done()`; raises the failure, the very exception the work raised."""
        assert self._done, f"{self!r} is not done"
        self._observed = True
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # settled without an error: the work's own return value

    def on_done(self, callback: Callable[["Event[T]"], None]) -> None:
        """Call `callback(event)` once, on the loop, when the event is done; now if it is. It must not wait and should not raise."""
        if self._done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    async def wait_done(self) -> None:
        """Wait until done, whatever the outcome: raises nothing of the work's. Does not count as observing a failure."""
        await _Wait(self)

    def __await__(self) -> Generator[object, None, T]:
        """Wait for completion and return the result or raise the failure. Cancel: the work goes on and its buffers stay held."""
        if not self._done:
            yield from self._wait()
        return self.result()

    def _wait(self) -> Generator[object, None, None]:
        told = self.awaited
        if told is not None:
            told(self, False)
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            yield from waiter
        finally:
            if not self._done and self._waiters is not None:
                self._waiters.remove(waiter)
            if told is not None:
                told(self, True)

    def settle(self, value: T | None, error: BaseException | None) -> BaseException | None:
        """For backends only, on the loop's thread: make the event done, run its callbacks, wake its waiters.

        Returns: the first exception a callback raised, or None; the other callbacks ran all the same.
        """
        assert not self._done, f"{self!r} was settled twice"
        self._done = True
        self._value = value
        self._error = error
        callbacks, self._callbacks = self._callbacks, None
        waiters, self._waiters = self._waiters, None
        raised: BaseException | None = None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception as failure:
                raised = raised or failure
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        return raised

    def unobserved_failure(self) -> bool:
        """Whether it failed and nobody has asked."""
        return self._error is not None and not self._observed

    def dependency_failure(self, label: str) -> DependencyFailed | None:
        """If this event failed: what work labelled `label`, ordered after it, fails with. Passes the duty to observe on to that work."""
        failure = self.error()
        if failure is None:
            return None
        return follow(failure, failed=self.label, label=label)

    def __repr__(self) -> str:
        state = "pending" if not self._done else "completed" if self._error is None else f"failed with {type(self._error).__name__}"
        return f"<Event {self.number} {self.label!r} on {self.stream!r}: {state}>"


class _Wait:
    """What `wait_done` awaits."""

    __slots__ = ("_event",)

    def __init__(self, event: Event[Any]) -> None:
        self._event = event

    def __await__(self) -> Generator[object, None, None]:
        if not self._event._done:
            yield from self._event._wait()


def follow(failure: BaseException, *, failed: str, label: str) -> DependencyFailed:
    """The failure of `label`, which comes after `failed`: its cause is the first failure of the chain."""
    first = failure.__cause__ if isinstance(failure, DependencyFailed) and failure.__cause__ is not None else failure
    error = DependencyFailed(f"{label} never ran: {failed} before it failed ({type(first).__name__}: {first})")
    error.__cause__ = first
    return error
