"""Requests that decode: the step in flight, what came of it, and who leaves.

Holds who decodes and the step that was not followed yet. Does not decide who steps, and admits nobody.

Invariants:
1. At most one step of a lane is followed late.
2. A session in a step submitted before its stop was seen is rolled back when that step completes, and only then leaves its place.
3. A failed operation ends the requests of its step and their sessions, and no others.
"""

from collections.abc import Callable
from typing import Any

import structlog
from torch import Tensor

from engine.batches import Batches, Flight, reach
from engine.depth import DraftDepth
from engine.errors import ForebayError, SessionBroken
from engine.lanes import Lanes
from engine.request import Request
from engine.scheduler import Turns
from engine.session import Phase
from engine.stage import Stage
from engine.tally import Tally
from streams import Event

__all__ = ["Decoding"]

_log = structlog.get_logger("engine")


class Decoding:
    """Decoding requests of one stage. Loop thread only."""

    def __init__(
        self, stage: Stage, batches: Batches, depth: DraftDepth, tally: Tally, ended: Callable[[Request], None],
        named: Callable[[ForebayError], ForebayError], *, rolls_back: bool,
    ) -> None:  # fmt: skip
        """Args: ended: told of every request that left, once no operation of it is outstanding. named: makes of an error what the request
        ends with. rolls_back: whether the rows of a session that ends with its request are cut to what was said too: somebody may
        continue them."""
        self.requests: list[Request] = []  # in order of their coming
        self.lanes = Lanes(stage.lanes)
        self._flights: list[Flight | None] = [None] * stage.lanes  # of each lane, submitted last and not followed
        self.stage = stage
        self.depth = depth
        self.turns = Turns()
        self._batches = batches
        self._tally = tally
        self._ended, self._named = ended, named
        self._rolls_back = rolls_back

    def add(self, request: Request) -> None:
        """Its prompt has rows and its first token is known."""
        request.session.move(Phase.DECODING)
        self._tally.began(request)
        self.requests.append(request)
        self.turns.join(request)
        self.lanes.join(request)

    @property
    def in_flight(self) -> bool:
        """Whether a step is not followed yet."""
        return any(flight is not None for flight in self._flights)

    def offered(self) -> list[Request]:
        """Those who may step now: it is the next lane's turn."""
        self.lanes.turn(self._flights)
        return self.lanes.offered()

    def submit(self, members: tuple[Request, ...], chosen: tuple[Request, ...]) -> Flight | None:
        """Submit the next step of these requests, if there are any. Returns the step before of their lane, which is to be followed.

        Args: chosen: the same, in the order of the choice, where others may step too.
        """
        lane = self.lanes.current
        previous, self._flights[lane] = self._flights[lane], None
        self.turns.serve(chosen)
        if members:
            self._flights[lane] = self._batches.submit(members, self.depth.choose(len(members)), previous, lane)
        return previous

    def reap(self) -> None:
        """End requests that were aborted or whose session broke, once no step of theirs is in flight."""
        for request in [one for one in self.requests if one.in_flight == 0]:
            if request.aborted:
                request.end("abort")
                self._leave(request)
            elif (broken := request.session.broken) is not None:
                self._break(request, SessionBroken(f"a copy to host memory failed: {broken}"))

    async def wait_room(self) -> None:
        """Nobody may step before a copyback completes: wait for one."""
        for stage in self.stage.before:
            await stage.idle()
        await self.stage.streams.copyback.idle()
        stuck = [one for one in self.requests if one.may_step and not self.may_step(one) and one.session.broken is None]
        assert not stuck, f"no copyback is in flight, yet the ring has no room for {stuck[0].session!r}"

    def may_step(self, request: Request) -> bool:
        """Whether its session has room for a step, and a token of it is still wanted."""
        memory = request.session.memory
        return request.may_step and memory is not None and memory.room(memory.counts.logical, reach(1 + self.depth.most))

    async def follow(self, flight: Flight) -> None:
        """Read a step's tokens and act on them."""
        await flight.events.followed.wait_done()
        failure = flight.events.followed.error()
        if failure is not None:
            self._fail_step(flight, failure)
            return
        self._tally.followed(flight.members)
        output = flight.events.output.result()
        found = output.read()
        for place, request in enumerate(flight.members):
            request.in_flight -= 1
            memory, own = request.session.memory, found[place]
            assert memory is not None, "memory outlives the steps that read it"
            memory.counts.retract(flight.rows[place] - own.accepted)
            if not (request.finished or request.aborted):
                self.depth.note(own.judged, own.accepted - 1)
                logits = None if output.logits is None or not request.wants_logits else output.logits[place]
                run = list(zip(own.tokens, own.bad_layer, strict=True))[: own.accepted]
                if not self._take_run(request, run, own.judged, logits, flight.events.done):
                    continue
            if request.in_flight == 0 and (request.finished or request.aborted):
                request.end("abort")  # nothing if it has finished
                self._leave(request)

    def _take_run(
        self, request: Request, run: list[tuple[int, int]], judged: int, logits: Tensor | None, done: Event[Any]
    ) -> bool:  # fmt: skip
        """Take one step's accepted rows as if each had been a step: the request may end anywhere inside. False: its session broke.

        Args: run: token and first bad layer of each. judged: drafts of the step; all but the last of `run` had been guessed.
            logits: [rows, vocabulary]. done: the step's event.
        """
        memory = request.session.memory
        assert memory is not None, "memory outlives the steps that read it"
        request.judged(judged)
        for row, (token, bad_layer) in enumerate(run):
            if bad_layer >= 0:
                self._break(request, SessionBroken.not_finite(bad_layer, self.stage.model.config.layers))
                return False
            if (broken := request.session.broken) is not None:
                self._break(request, SessionBroken(f"an operation of the session failed: {broken}"))
                return False
            memory.commit(1, self.stage.copyback, done)
            request.take(token, None if logits is None else logits[row], guessed=row + 1 < len(run))
            if request.finished:
                break
        return True

    def _leave(self, request: Request) -> None:
        """Give up the place, once no step of the request is in flight: rows that were not committed are rolled back."""
        session, memory = request.session, request.session.memory
        assert memory is not None
        self.requests.remove(request)
        self.turns.leave(request)
        self.lanes.leave(request)
        if request.broken:
            session.move(Phase.BROKEN)
        else:
            # A last step's refused drafts are taken back by then, and what they had room in is not.
            beyond = memory.counts.logical > memory.counts.committed or request.drafted
            if beyond and (not session.temporary or self._rolls_back):
                memory.truncate(memory.counts.committed, self.stage.streams.compute)
            session.revision += 1
            session.move(Phase.READY)
        self._ended(request)

    def _break(self, request: Request, error: ForebayError) -> None:
        """End a decoding request with an error; its session is broken. It keeps its place while a step of it is in flight."""
        request.fail(self._named(error))
        request.broken = True
        if request.in_flight == 0:
            self._leave(request)

    def _fail_step(self, flight: Flight, failure: BaseException) -> None:
        """End those a failed operation concerns. Members of a step that only came after a failed one lose nothing: none of it ran."""
        for request in flight.members:
            request.in_flight -= 1
        if flight.failed is not None:
            self._retract(flight)
            return
        following = self._flights[flight.lane]
        if following is not None and flight.events.done.error() is not None:
            following.failed = flight.members
        _log.error("step.failed", error=str(failure), sessions=[request.session.id for request in flight.members])
        # The plans speak of places: once the table names other sessions there, they are of no use, and the maps go with their sessions.
        same_table = following is None or following.bucket is not flight.bucket or following.members == flight.members
        same_table = same_table and flight.bucket.names_members
        left = (*self.stage.streams.fences(), *([flight.bucket.step.abort(flight.bucket.table, session="")] if same_table else []))
        if flight.call is not None:
            left += tuple(event for stage in self.stage.before for event in stage.abort(flight.call))
        for request in flight.members:
            assert request.session.memory is not None, "memory outlives the steps that read it"
            for event in left:
                request.session.memory.operations.hold(event)  # until then the session's maps and slots, given back below, are written
            self._break(request, SessionBroken(f"a decode step failed: {failure}"))

    def _retract(self, flight: Flight) -> None:
        """Take back the rows of a step that never ran."""
        for request, rows in zip(flight.members, flight.rows, strict=True):
            memory = request.session.memory
            assert memory is not None, "memory outlives the steps that read it"
            memory.counts.retract(rows)  # the device never advanced
            if request.in_flight == 0 and (request.broken or request.finished or request.aborted):
                request.end("abort")
                self._leave(request)
