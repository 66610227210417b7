"""One append on a stage of another machine. See `remote.py`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from engine.append import query_tiles
from engine.append_cost import AppendCost, LayerSizes
from engine.node import calls
from engine.node.far_session import FarSession
from engine.node.handover import Handover
from engine.node.hosting import AFTER, CHUNKS, TOKEN
from engine.node.passage import together
from engine.protocol import SyntheticHistory
from engine.stage_calls import Carried
from engine.unit import Unit
from streams import Event, StreamError

__all__ = ["RemoteAppend"]


class RemoteAppend:
    """See FollowerAppend."""

    def __init__(self, session: FarSession, handover: Handover, cost: AppendCost, sizes: Sequence[LayerSizes]) -> None:
        """Args: cost, sizes: of the stage's layers; what units take is counted here."""
        self._held, self._handover, self._cost, self._sizes = session, handover, cost, sizes
        self._far, self._memory = session.far, session.number
        self._number = -1
        self._rows = 0
        self._last: Event[Any] = Event.completed(None)  # of the open chunk's units, the one that was submitted last
        self._carried: Carried | None = None
        self._ends = False  # its last chunk's end was asked for: the node lets go of it by itself

    @property
    def carried(self) -> Carried:
        """See FollowerAppend. The first time for a chunk the node is told to hand it on: whoever asks is there to take it."""
        if self._carried is None:
            if not (self._last.done() and self._last.error()):
                self._held.ask("append.pass", calls.Memory(self._memory), type(None))
            self._carried = self._handover.handed_on(self._handover.chunk, self._rows, CHUNKS, self._number, self._last)
        return self._carried

    @property
    def fetching(self) -> Event[Any] | None:
        """See FollowerAppend. What the node fetches it waits for itself."""
        return None

    def units(self, tokens: Sequence[int], arrived: Carried | None) -> Iterator[Unit]:
        """See FollowerAppend."""
        self._number, self._rows, self._carried = self._handover.number_of(arrived), len(tokens), None
        own = tuple(tokens) if arrived is None else ()
        body = calls.AppendUnits(self._memory, self._number, self._rows, own)
        rows, end, cost = self._rows, self._held.logical + self._rows, self._cost
        yield Unit(partial(self._submit, body), cost.begin(rows))
        for layer in self._sizes:
            yield Unit(self._submit, cost.write(layer, rows))
            for start, stop in query_tiles(rows, end) if layer.full else ():
                yield Unit(self._submit, cost.select(stop - start, end))
            yield Unit(self._submit, cost.attend(layer, rows, end))
            yield Unit(self._submit, cost.forward(layer, rows), rests=True)

    def _submit(self, opens: calls.AppendUnits | None = None) -> Event[Any]:
        if opens is not None:
            self._held.chunk_open = True
            self._held.told.hold(self._held.ask("append.units", opens, type(None)))
        self._last = self._held.ask("append.unit", calls.Memory(self._memory), bool)
        return self._last

    def finish(self, after: Event[Any], *, last: bool) -> Event[Any]:
        """See FollowerAppend."""
        self._handover.is_read(self._handover.chunk, CHUNKS, after)
        self._ends = last
        return self._counted("append.finish", calls.AppendEnd(self._memory, last), self._rows, after)

    def fill(self, rows: int, history: SyntheticHistory) -> Event[Any]:
        """See FollowerAppend."""
        return self._counted("append.fill", calls.AppendFill(self._memory, rows, history.seed, history.rows), rows, None)

    def _counted(self, name: str, body: object, rows: int, after: Event[Any] | None) -> Event[Any]:
        """A call behind which a chunk's rows count."""
        finished = self._held.ask(name, body, calls.Held)
        if after is not None and not finished.done():
            try:
                self._far.passage.word(AFTER, self._number, after)
            except StreamError as error:
                self._far.lose(error)
        finished.on_done(partial(self._over, rows))
        self._held.follow(finished, copies=True)
        return finished

    def _over(self, rows: int, finished: Event[calls.Held]) -> None:
        self._held.chunk_open = False
        if finished.error() is None:
            self._held.counted(rows)

    def stand(self, token: Tensor, event: Event[Any]) -> Event[None]:
        """See FollowerAppend."""
        stood = self._held.ask("append.stand", calls.AppendStand(self._memory, self._number), type(None))
        if not stood.done():
            try:
                self._far.passage.send(token, "token", TOKEN, self._number, event)
            except StreamError as error:
                self._far.lose(error)
        self._held.told.hold(stood)
        return together((stood,), "stand")

    def abandon(self) -> None:
        """See FollowerAppend."""
        if not self._ends or self._held.chunk_open:
            self._held.chunk_open = False
            self._held.told.hold(self._held.ask("append.abandon", calls.Memory(self._memory), type(None)))
