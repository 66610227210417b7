"""Appends, a few units in flight and one chunk open: there is one append ring a stage.

Holds the running appends and the units in flight. Does not know what follows an append, nor decide whose chunk is next.

Invariants:
1. At most one chunk is open; whose the next one is, is asked anew at each chunk's end, so that a short prompt passes a long one.
2. Units beside a step cost no more than the step allows. One that costs more goes alone, and is paid for by turns without any. One that
   would wait for another stream is not submitted before that is done, or it would hold up the steps. Those of one turn may be in flight
   when the next come: they lie between the steps in flight.
3. An append of a session that broke ends at its next turn, whatever its own operations say.
4. An append is stopped only when no operation of it is in flight; it keeps the rows of finished chunks.
"""

from collections.abc import Iterator
from typing import Any

from engine.append import AppendOutput, AppendRun
from engine.append_scratch import Scratch
from engine.joint import id_of
from engine.pair_append import PairSyntheticRun, append_run
from engine.request import Request
from engine.scheduler import Turns
from engine.stage import Stage
from engine.stage_calls import FollowerAppend
from engine.synthetic import SyntheticRun
from engine.unit import Unit
from memory.session import SessionMemory
from streams import Event

__all__ = ["AppendQueue"]


class AppendQueue:
    """Running appends. Loop thread only."""

    def __init__(self, stage: Stage) -> None:
        self.requests: list[Request] = []  # in order of their coming
        self.turns = Turns()
        self.unit: Event[Any] | None = None  # of the open chunk, what is done last or stands before the next unit
        self._stage = stage
        self._scratch = Scratch()
        self._units: dict[Request, Iterator[Unit]] = {}
        self._next: dict[Request, Unit] = {}  # taken and not submitted
        self._open: Request | None = None  # whose chunk is open
        self._ends_chunk = False  # whether it is over once `unit` is done
        self._submitted: list[list[Event[Any]]] = []  # a turn each, in flight or failed
        self._credit = 0
        self._failure: BaseException | None = None  # of the open chunk, until nothing of it is in flight

    @property
    def choosable(self) -> tuple[Request, ...]:
        """Those whose chunk may be next; empty while one is open."""
        over = self._open is None or (self._ends_chunk and self.unit is not None and self.unit.done())
        return tuple(self.requests) if over else ()

    def start(self, request: Request) -> None:
        """Begin to append the tokens of the request's session that have no rows."""
        session = request.session
        assert session.memory is not None, "memory is admitted before an append starts"
        memory, history, scratch = session.memory, request.history, self._scratch
        append: AppendRun
        if history is None:
            first, own = memory.counts.logical, request.appended
            tokens = own if first + len(own) == len(session.tokens) else session.tokens[first:]  # a million are not copied
            before = self._before(memory, session.id, len(tokens))
            append = append_run(self._stage, memory, tokens, request.state, session.id, scratch, before)
        else:
            made_up = SyntheticRun if self._stage.peer is None else PairSyntheticRun
            rest, before = session.tokens[history.rows :], self._before(memory, session.id, len(session.tokens))
            append = made_up(self._stage, memory, rest, request.state, session.id, history, scratch, before)
        request.append = append
        self._units[request] = append.units()
        self.requests.append(request)
        self.turns.join(request)

    def _before(self, memory: SessionMemory, session: str, rows: int) -> list[FollowerAppend]:
        """The append's parts on the stages before."""
        return [stage.append(id_of(memory), session, rows) for stage in self._stage.before]

    def turn(self, chosen: Request | None, allowance: int | None) -> tuple[Request, AppendOutput, BaseException | None] | None:
        """Follow the open chunk's units once they are done and submit more.

        Args: chosen: whose chunk is next, where none is open or it is over. allowance: what may run beside the step that is in flight, in
            bytes that it could read; None: nobody decodes, a layer at a time.
        Returns: the request whose append has ended now, what it gave, and what it failed with, if it did; None while it goes on.
        """
        waits = self.unit is not None and not self.unit.done()
        if waits and (allowance is None or self._ends_chunk or len(self._in_turns()) > 1):
            return None
        request = self._open or chosen
        if request is None:
            return None
        # What the session's rows stand on may have failed while the append waited for its turn, or beside it: nobody reads on from there.
        self._failure = self._failure or self._first_failure() or request.session.broken
        if self._failure is None and self._open is not None and self._ends_chunk:
            if not self._has_more(request):
                return request, self._drop(request, abandon=False), None
            self._open = self.unit = None
            if chosen is None:
                return None
            request, self._failure = chosen, chosen.session.broken
        if self._failure is None:
            self._failure = self._submit(request, allowance)
        return None if self._failure is None else self._fail(request)

    def _in_turns(self) -> list[list[Event[Any]]]:
        """Turns of which something is in flight."""
        return [events for events in self._submitted if not events[-1].done()]

    def _first_failure(self) -> BaseException | None:
        errors = (event.error() for events in self._submitted for event in events if event.done())
        return next((error for error in errors if error is not None), None)

    def _has_more(self, request: Request) -> bool:
        unit = next(self._units[request], None)
        if unit is not None:
            self._next[request] = unit
        return unit is not None

    def _fail(self, request: Request) -> tuple[Request, AppendOutput, BaseException | None] | None:
        """End it, once nothing of it is in flight."""
        self._open, self.unit, failure = request, self._in_flight(request), self._failure
        return None if self.unit is not None else (request, self._drop(request, abandon=True), failure)

    def _in_flight(self, request: Request) -> Event[Any] | None:
        assert request.append is not None, f"request {request.id} does not append"
        return next((event for events in self._submitted for event in events if not event.done()), request.append.fetching)

    def _submit(self, request: Request, allowance: int | None) -> BaseException | None:
        """Submit what may run now; returns what the memory layer refuses, which ends this append and not the loop."""
        if self._open is None:
            self._open = request
            self.turns.serve([request])
        self._submitted = self._in_turns()
        self._ends_chunk = False
        self._credit = 0 if allowance is None else min(self._credit + allowance, allowance)
        events: list[Event[Any]] = []
        assert request.append is not None, f"request {request.id} does not append"
        try:
            request.append.bring_ahead()
            while True:
                if request not in self._next and not self._has_more(request):
                    raise AssertionError(f"request {request.id} has a chunk without an end")
                unit = self._next[request]
                if allowance is not None and self._credit < min(unit.cost, allowance):
                    break
                if allowance is not None and unit.needs is not None and not unit.needs.done():
                    self.unit = unit.needs
                    break
                del self._next[request]
                self.unit = unit.submit()
                events.append(self.unit)
                if len(events) == 1:
                    self._submitted.append(events)
                self._credit -= unit.cost
                self._ends_chunk = unit.ends_chunk
                if unit.ends_chunk or (allowance is None and unit.rests):
                    break
        except Exception as error:
            return error
        return None

    def may_stop(self, request: Request) -> bool:
        """Whether no operation of the request's append is in flight."""
        return request is not self._open or self._in_flight(request) is None

    def stop(self, request: Request) -> None:
        """Forget an append that `may_stop`."""
        assert self.may_stop(request), f"request {request.id} has a unit in flight"
        self._drop(request, abandon=True)

    def _drop(self, request: Request, *, abandon: bool) -> AppendOutput:
        """Let go of the append; only how far it came, and its output, outlive it."""
        append = request.append
        assert append is not None, f"request {request.id} does not append"
        if abandon:
            append.abandon()
        if request is self._open:
            self._open, self.unit, self._ends_chunk, self._failure = None, None, False, None
            self._submitted.clear()
        self.requests.remove(request)
        self.turns.leave(request)
        if not self.requests:
            self._scratch = Scratch()  # nobody's now: device memory of two layers
        del self._units[request]
        self._next.pop(request, None)
        request.append, request.appended_rows = None, append.done_rows
        return append.output
