"""One step's operations, chained over several streams so that a failed one fails the rest of its step and nothing else.

Holds the last event per stream. Knows nothing of rows or models.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from streams import Event, Stream

__all__ = ["Chain"]

T = TypeVar("T")


class Chain:
    """Submits operations of one step; each depends on the step's previous operation on the same stream and on `after`."""

    def __init__(self, session: str, after: Sequence[Event[Any]] = ()) -> None:
        self._session = session
        self._root = tuple(after)
        self._last: dict[str, Event[Any]] = {}

    def last(self, *streams: Stream) -> tuple[Event[Any], ...]:
        """The step's last operation on each of these streams that has one."""
        return tuple(self._last[stream.name] for stream in streams if stream.name in self._last)

    def submit(
        self, stream: Stream, work: Callable[[], T], *, label: str, after: Sequence[Event[Any]] = (),
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), payload_bytes: int = 0,
    ) -> Event[T]:  # fmt: skip
        """Submit to `stream`; see `Stream.submit`."""
        previous = self._last.get(stream.name)
        needed = (*self._root, *after) if previous is None else (previous, *after)
        event = stream.submit(
            work, label=label, session=self._session, after=needed, reads=reads, writes=writes, payload_bytes=payload_bytes
        )
        self._last[stream.name] = event
        return event

    @property
    def ends(self) -> tuple[Event[Any], ...]:
        """The last operation on each stream: when these are done, nothing that was submitted here is in flight."""
        return tuple(self._last.values())
