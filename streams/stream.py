"""The protocols everything above writes against: `Stream`, `Backend`, `Observer`; and their statistics.

Knows no rows, no devices and no threads. Implementations: `cpu.py`, `virtual.py`.

Rules every backend keeps, and `tests/streams/conformance.py` checks:
1. Work of one stream runs and completes in the order it was submitted.
2. Work starts after every event in `after` and every event given to `wait` before it. If one in `after` failed, the work never runs and
   fails with `DependencyFailed`. An event given to `wait`, or a predecessor on the stream, only orders.
3. Events become done on the loop's thread, in completion order, and an event is never done before one it depends on.
4. `reads`, `writes` and the closure are held until the event is done, whoever stopped waiting for it.
5. `submit` and `wait` never block, and are called on the loop's thread only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from streams.clock import Clock
from streams.event import Event

__all__ = ["QUEUE_MAX", "Backend", "BackendStatistics", "Observer", "Stream", "StreamStatistics"]

T = TypeVar("T")

QUEUE_MAX = 4096  # operations in flight on one stream; a decode step of 78 layers submits some hundreds


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Counts of one stream since it was made; `in_flight` now. Failed work is not counted as completed."""

    name: str
    submitted: int
    completed: int
    failed: int
    in_flight: int
    payload_bytes: int
    busy_ns: int  # time spent in work


@dataclass(frozen=True, slots=True)
class BackendStatistics:
    """Sums over the streams, and the streams in the order they were made."""

    submitted: int
    completed: int
    failed: int
    in_flight: int
    unobserved_failures: int  # failed events nobody has asked about so far
    streams: tuple[StreamStatistics, ...]


class Stream(Protocol):
    """A queue of work that runs in order, beside other streams."""

    @property
    def name(self) -> str:
        """Unique within its backend."""
        ...

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
        """Hand over work and get its event; never waits.

        Args:
            work: only touches tensors; runs once, or never if something in `after` failed.
            label: what it is, for errors and tapes; the same from step to step, no numbers that change.
            session: whose work it is; "" if nobody's.
            after: the work starts after these, and fails if one of them fails.
            reads, writes: exactly the parts of buffers the work touches and nothing else may write (reads) or touch (writes) before it
                completes. What the closure captures is held until completion in any case.
            payload_bytes: bytes moved, for statistics, tapes and cost models.
        Raises: Full: at the limit; Closed: after `close`.
        """
        ...

    def wait(self, event: Event[Any]) -> None:
        """The next submitted work, and so all later work of this stream, starts after `event`, completed or failed."""
        ...

    async def wait_room(self) -> None:
        """Wait until `submit` would not raise Full; submit before the next await. Raises: Closed."""
        ...

    async def idle(self) -> None:
        """Wait until everything submitted so far has completed or failed; raises none of those failures."""
        ...

    async def close(self) -> None:
        """Refuse new work at once, then wait for what was submitted. May be called again."""
        ...


class Backend(Protocol):
    """Makes streams, all driven by one loop."""

    observer: "Observer | None"  # told of all its streams' events; `observed` adds one for a while
    lost: Event[None]  # fails with DeviceLost when the device does: nothing on it will complete any more. Otherwise it never happens

    @property
    def clock(self) -> Clock:
        """The time its streams run in."""
        ...

    def stream(self, name: str, *, queue_max: int = QUEUE_MAX) -> Stream:
        """The stream of that name, made by the first call (whose `queue_max` counts). Raises: Closed."""
        ...

    async def close(self) -> None:
        """Close every stream, wait for their work, release threads; then raise the first failure that belongs to no event: an
        `on_done` callback's exception, or a bug that the virtual backend found."""
        ...

    def statistics(self) -> BackendStatistics:
        """A frozen snapshot."""
        ...


class Observer(Protocol):
    """Sees what happens to events, always on the loop's thread; the seam for tapes. Must not raise, wait, or submit."""

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """`event` was submitted; `after` and `waits` as given."""
        ...

    def started(self, event: Event[Any], at_ns: int) -> None:
        """Its work began at `at_ns`; told together with the completion. Not told for work that never ran."""
        ...

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """Its work ended at `at_ns`; told in completion order, just before the event is done."""
        ...

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """A task began to wait for it (`ended` False), or ended its wait: with the outcome, or cancelled (`ended` True).

        Not told of waits for what is done already.
        """
        ...
