"""A node as the head has it: whether it can be asked, and what it said last.

Holds the caller of the present connection, if there is one. Outlives connections: what stands on it stays where it is while a node is away.

Invariants:
1. `ask` never raises for the network's sake: without a connection, or over a full one, its event has failed already.
2. A node is lost once for each connection. Whoever joined is told then, with the error, before anything else is asked.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.node.caller import Caller
from engine.node.calls import Facts
from engine.node.hosting import Apart, Broken
from engine.node.passage import Passage
from engine.node.wire import error_of
from memory.placement import PlacementStatistics
from streams import Event, PeerLost, Reason, StreamError, TcpChannel

__all__ = ["Far"]

T = TypeVar("T")


class Far:
    """One node. Loop thread only."""

    def __init__(self, name: str, passage: Passage) -> None:
        """Args: passage: tensors to and from it, over the present channel."""
        self.name = name
        self.passage = passage
        self.facts: Facts | None = None
        self.held: PlacementStatistics | None = None  # heard last
        self.on_broken: Callable[[int, BaseException], None] = lambda memory, error: None
        self.on_lost: Callable[[BaseException], None] = lambda error: None  # of what lay there
        self.on_end: Callable[[BaseException], None] = lambda error: None  # also where it cannot reach a stage beside it
        self._caller: Caller | None = None
        self._error: BaseException = PeerLost(Reason.UNREACHABLE, f"node {name} was never reached")

    @property
    def lost(self) -> BaseException | None:
        """Why it cannot be asked; None: it can."""
        return self._error if self._caller is None else None

    def met(self, channel: TcpChannel, name: str) -> None:
        """There is a connection. Raises PeerLost, Closed: no more."""
        assert self._caller is None, f"node {self.name} is connected"
        self.name = name

        caller: Caller | None = None  # still none if the channel has ended already: then this raises, and nobody was met

        def ended(error: BaseException) -> None:
            if caller is not None and self._caller is caller:
                self.lose(error)

        caller = self._caller = Caller(channel, self._told, lost=ended)
        self.passage.rebind(channel, ended)

    def lose(self, error: BaseException) -> None:
        """The connection is of no use any more; nothing if there is none."""
        if self._caller is None:
            return
        self._caller, self._error = None, error
        self.on_lost(error)
        self.on_end(error)

    def ask(self, name: str, body: object, answer: type[T], *, session: str = "") -> Event[T]:
        """Call; see `Caller.call`."""
        if self._caller is not None:
            try:
                return self._caller.call(name, body, answer, session=session)
            except StreamError as error:  # Full too: it takes calls, but does not answer, and is as good as gone
                self.lose(error)
        failed: Event[T] = Event(name, stream=self.name, session=session)
        failed.settle(None, self._error)
        return failed

    def _told(self, packed: bytes) -> None:
        told = msgspec.msgpack.decode(packed, type=Broken | Apart)
        error = error_of(told.failure, self.name)
        if isinstance(told, Broken):
            self.on_broken(told.memory, error)
        else:
            self.on_end(error)
