"""Appends in order of arrival, one unit in flight at a time: there is one append ring a stage.

Holds the running appends and the unit whose event is awaited. Does not know what follows an append.

Invariants:
1. At most one unit is in flight, always of the oldest append.
2. An append of a session that broke ends at its next turn, whatever its own operations say.
3. An append is stopped only when no operation of it is in flight; it keeps the rows of finished chunks.
"""

from collections.abc import Iterator
from typing import Any

from engine.append import AppendOutput, AppendRun
from engine.request import Request
from engine.stage import Stage
from engine.synthetic import SyntheticRun
from streams import Event

__all__ = ["AppendQueue"]


class AppendQueue:
    """Running appends. Loop thread only."""

    def __init__(self, stage: Stage) -> None:
        self.requests: list[Request] = []
        self.unit: Event[Any] | None = None  # of the oldest
        self._stage = stage
        self._units: dict[Request, Iterator[Event[Any]]] = {}

    def start(self, request: Request) -> None:
        """Begin to append the tokens of the request's session that have no rows."""
        session = request.session
        assert session.memory is not None, "memory is admitted before an append starts"
        memory, history = session.memory, request.history
        append: AppendRun
        if history is None:
            append = AppendRun(self._stage, memory, session.tokens[memory.counts.logical :], request.state, session.id)
        else:
            append = SyntheticRun(self._stage, memory, session.tokens[history.rows :], request.state, session.id, history)
        request.append = append
        self._units[request] = append.units()
        self.requests.append(request)

    def turn(self) -> tuple[Request, AppendOutput, BaseException | None] | None:
        """Follow the oldest append's unit once it is done and submit its next.

        Returns: the request whose append has ended now, what it gave, and what it failed with, if it did; None while it goes on.
        """
        if not self.requests or (self.unit is not None and not self.unit.done()):
            return None
        request = self.requests[0]
        # What the session's rows stand on may have failed while the append waited for its turn, or beside it: nobody reads on from there.
        failure = (None if self.unit is None else self.unit.error()) or request.session.broken
        self.unit = None
        if failure is None:
            try:
                self.unit = next(self._units[request], None)
            except Exception as error:  # what the memory layer refuses ends this append, not the loop
                failure = error
        if self.unit is not None:
            return None
        return request, self._drop(request, abandon=failure is not None), failure

    def may_stop(self, request: Request) -> bool:
        """Whether no operation of the request's append is in flight."""
        return request is not self.requests[0] or self.unit is None or self.unit.done()

    def stop(self, request: Request) -> None:
        """Forget an append that `may_stop`."""
        assert self.may_stop(request), f"request {request.id} has a unit in flight"
        if request is self.requests[0]:
            self.unit = None
        self._drop(request, abandon=True)

    def _drop(self, request: Request, *, abandon: bool) -> AppendOutput:
        """Let go of the append and its scratch; only how far it came, and its output, outlive it."""
        append = request.append
        assert append is not None, f"request {request.id} does not append"
        if abandon:
            append.abandon()
        self.requests.remove(request)
        del self._units[request]
        request.append, request.appended_rows = None, append.done_rows
        return append.output
