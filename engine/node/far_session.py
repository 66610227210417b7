"""What the head knows of one session on one node: rows, what is in flight for it, and whether it is lost.

Invariants:
1. Counts of logical and committed rows move here by the same calls as there; mirrored and submitted rows by what the node says alone, so
   they are never ahead of it.
2. Calls that put something in flight are held in `told` until they are answered. One that fails breaks the session.
3. Once its node was lost nothing is asked about it any more, whoever is at that address then.
"""

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from engine.node import calls
from engine.node.far import Far
from memory.counts import CountsSnapshot
from memory.operations import Operations
from memory.session import SessionStatistics
from streams import Event

__all__ = ["FarSession", "failed"]

T = TypeVar("T")


def failed(label: str, error: BaseException) -> Event[Any]:
    """An event that has failed already."""
    event: Event[Any] = Event(label)
    event.settle(None, error)
    return event


class FarSession:
    """One session's. Loop thread only."""

    def __init__(self, far: Far, number: int, name: str, told: Operations, rows: int) -> None:
        """Args: number: of its memory. rows: that it begins with, all committed."""
        self.far, self.number, self.name, self.told = far, number, name, told
        self.logical = self.committed = rows
        self.chunk_open = self.closed = False
        self.frozen = 0  # barriers that have not come back
        self.copying = 0  # unanswered calls that may have copies in flight
        self.gone: BaseException | None = None  # why it is lost, if it is
        self.reads, self.extra_bytes = (0, 0, 0), 0
        self._heard = SessionStatistics(CountsSnapshot(0, 0, 0, 0, 0), 0, 0, 0, 0, ())

    @property
    def held(self) -> SessionStatistics:
        """What it holds, as far as is known."""
        heard = self._heard.counts
        mirrored, submitted = min(heard.mirrored, self.committed), min(heard.submitted, self.committed)
        return replace(self._heard, counts=CountsSnapshot(self.logical, self.committed, submitted, mirrored, heard.epoch))

    def ask(self, name: str, body: object, answer: type[T]) -> Event[T]:
        """A call about it; has failed where it is lost."""
        if self.gone is not None:
            return failed(name, self.gone)
        return self.far.ask(name, body, answer, session=self.name)

    def follow(self, event: Event[Any], *, copies: bool, holds: bool = True) -> None:
        """Take what the answer to a call says that it holds.

        Args: copies: whether it may put copies to RAM in flight; only these keep a cut waiting, because the node begins calls in order.
            holds: whether it is in flight for the session until then.
        """
        self.copying += copies
        event.on_done(partial(self._answered, copies))
        if holds:
            self.told.hold(event)

    def _answered(self, copies: bool, event: Event[calls.Held | None]) -> None:
        self.copying -= copies
        error = event.error()
        if error is None:
            held = event.result()
            if held is not None:
                self.hear(held)
        elif not self.closed:
            self.told.break_with(error)

    def hear(self, held: calls.Held) -> None:
        """What the node says that it holds."""
        self._heard, self.reads, self.extra_bytes = held.session, held.reads, held.extra_bytes
        self.far.held = held.stage

    def lose(self, error: BaseException) -> None:
        """Its node is gone, and it with it."""
        self.gone = self.gone or error
        self.told.break_with(error)

    def stepped(self, rows: int, submitted: Event[None]) -> None:
        """A step of `rows` rows was submitted."""
        self.logical += rows
        self.told.hold(submitted)

    def counted(self, rows: int) -> None:
        """A chunk of `rows` rows is over."""
        self.logical += rows
        self.committed += rows
