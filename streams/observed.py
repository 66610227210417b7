"""Observers that come and go while a backend works, beside whoever observes it all along.

Knows nothing of what they do with what they see.

1. Who joins sees what is submitted or ends from then on, and so ends of work whose submission it never saw.
2. While nobody observes, a backend calls nobody: its observer is None, as if nobody ever had.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from streams.event import Event
from streams.stream import Backend, Observer

__all__ = ["observed"]


class _Several:
    """An observer that tells others, in the order they joined."""

    def __init__(self, before: Observer | None) -> None:
        self.told: list[Observer] = [] if before is None else [before]
        self.before = before

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """See `Observer.submitted`."""
        for one in self.told:
            one.submitted(event, after, waits, payload_bytes, at_ns)

    def started(self, event: Event[Any], at_ns: int) -> None:
        """See `Observer.started`."""
        for one in self.told:
            one.started(event, at_ns)

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """See `Observer.completed`."""
        for one in self.told:
            one.completed(event, error, at_ns)

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """See `Observer.awaited`."""
        for one in self.told:
            one.awaited(event, ended, at_ns)


@contextmanager
def observed(backend: Backend, observer: Observer) -> Iterator[None]:
    """`observer` sees what the backend does for the length of the block. Blocks of several observers may end in any order."""
    several = backend.observer
    if not isinstance(several, _Several):
        several = backend.observer = _Several(several)
    several.told.append(observer)
    try:
        yield
    finally:
        several.told.remove(observer)
        if several.told == ([] if several.before is None else [several.before]) and backend.observer is several:
            backend.observer = several.before
