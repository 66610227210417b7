"""Requests that have not started: who is refused, who waits, who gets memory.

Holds the line and the memories that are given back but still in flight. Does not know what runs, nor how.

Invariants:
1. A request leaves the line exactly once: started, refused with an error, or aborted.
2. What can never fit, with nobody else there, is refused at once; what does not fit now waits while somebody will give memory back.
   Idle sessions give back theirs at once, or leave for the disk meanwhile. Who waits behind may hold what is missing, and goes first then.
3. Everything that depends on the session's tokens is judged when the request starts, not when it was queued.
"""

from collections.abc import Callable

from engine.departures import Departures
from engine.errors import BadRequest, ForebayError, NotAdmitted, SessionBroken
from engine.pressure import Pressure
from engine.request import Request
from engine.scheduler import Turns, in_turn
from engine.session import Phase, Session
from engine.stage import Stage
from engine.stored import Beginning, StoredSessions
from memory.errors import DoesNotFit
from memory.session import SessionMemory

__all__ = ["WaitingLine"]


class WaitingLine:
    """Waiting requests of one stage, in the order in which they are offered memory (`scheduler.in_turn`). Loop thread only."""

    def __init__(
        self, stage: Stage, waiting_max: int, ended: Callable[[Request], None], named: Callable[[ForebayError], ForebayError],
        stored: StoredSessions, departures: Departures, pressure: Pressure, *, spare_rows: int = 0,
    ) -> None:  # fmt: skip
        """Args: ended: told of every request that leaves the line without having started. named: what one that cannot go on is told.
        stored: histories that requests may begin with, and that make room for them. departures: sessions that go to disk for them.
        pressure: running ones whose hot caches are larger than they need be. spare_rows: of drafts, past a session's end."""
        self.requests: list[Request] = []
        self._turns = Turns()
        self._stage = stage
        self._waiting_max = waiting_max
        self._ended, self._named = ended, named
        self._stored = stored
        self._departures = departures
        self._pressure = pressure
        self._spare_rows = spare_rows
        self._closing: list[SessionMemory] = []  # closed, with operations in flight: what they hold is not free yet

    def enqueue(self, request: Request) -> None:
        """Queue a request. Raises NotAdmitted: the line is full; NeverFits."""
        if len(self.requests) >= self._waiting_max:
            raise NotAdmitted(f"{len(self.requests)} requests are waiting already; try later", retry_after_s=1.0)
        self._check_size(request)
        self._turns.join(request)
        self.requests = in_turn([*self.requests, request], self._turns)

    def _check_size(self, request: Request) -> None:
        """Raise NeverFits if the whole stage is too small for the request's session. One that names no limit gets what fits."""
        if request.sampling.max_tokens is None:
            asked = self._tokens_max(request)
            request.max_tokens = max(1, request.max_tokens - asked + self._stage.tokens_fit(asked))
        self._stage.check_size(self._tokens_max(request))

    def _tokens_max(self, request: Request) -> int:
        return len(request.session.tokens) + len(request.appended) + request.max_tokens + self._spare_rows

    def reap(self) -> None:
        """End those that were aborted or whose session is gone."""
        for request in list(self.requests):
            if request.aborted:
                self._leave(request)
                request.end("abort")
                self._ended(request)
            elif request.session.phase in (Phase.BROKEN, Phase.CLOSED):
                ended = SessionBroken(f"session {request.session.id} ended before this request began; create another")
                self._refuse(request, self._named(ended))

    def startable(self, request: Request) -> bool:
        """Whether the request's session can take it now: nobody runs in it and nothing of it is in flight."""
        memory = request.session.memory
        return request.session.idle and (memory is None or memory.operations.outstanding == 0)

    def admit(self, request: Request, *, others_run: bool) -> bool | None:
        """Take memory for a startable request. Returns True: it has left the line and starts; None: it was refused; False: it waits."""
        session = request.session
        broken = None if session.memory is None else session.memory.operations.broken
        try:
            if broken is not None:
                session.move(Phase.BROKEN)
                raise SessionBroken(f"a copy to host memory failed: {broken}")
            request.fit(len(session.tokens))
            if not request.appended and request.history is None and len(session.tokens) == session.rows:
                raise BadRequest("the prompt has no tokens", field="prompt")
            self._check_size(request)
        except ForebayError as error:
            self._refuse(request, error)
            return None
        if not self._take_memory(request, self._tokens_max(request), others_run):
            return False if request in self.requests else None
        self._turns.serve([request])
        self._leave(request)
        return True

    def _take_memory(self, request: Request, tokens_max: int, others_run: bool) -> bool:
        """Memory for a request, with what idle sessions give back for it; False: it waits, or was refused."""
        rests = True  # once: a grow takes hot caches and reservation again
        cuts = False
        while True:
            begins = self._beginning(request, cuts)
            source = None if begins is None else begins.source
            if begins is not None and begins.in_place and begins.source.busy:
                return False
            try:
                self._hold(request.session, tokens_max, begins)
                return True
            except DoesNotFit as error:
                if error.device_missing_bytes and self._pressure.ask(error.device_missing_bytes):
                    return False
                spared = source or request.session
                saves = 0 if begins is None else begins.saves
                gave = self._stored.reclaim(
                    spared, rests=rests, device=error.device_missing_bytes > 0, drops_max=saves if saves else None
                )  # fmt: skip
                if gave is not None:
                    rests = rests and gave is not spared
                    continue
                if saves and self.settling is None:
                    cuts = True  # nobody waits, and no longer history goes, for the sake of a tail
                    continue
                if self.settling is not None or self._departures.begin(source, request.session) or others_run or self._may_free(request):
                    return False
                if source is not None and (self._stored.give_up(source) or self._departures.begin(request.session)):
                    continue
                self._refuse(request, self._no_room(request, tokens_max, error))
                return False

    def _no_room(self, request: Request, tokens_max: int, error: DoesNotFit) -> NotAdmitted:
        """Sessions that callers hold have the rest: idle ones that have no place to go, or those of others that wait, who go first."""
        stay = f"; idle sessions stay in memory: {self._departures.failure}" if self._departures.failure else ""
        self._departures.refused()
        rivals = any(one.session.memory is not None for one in self.requests if one.session is not request.session)
        text = f"a context of {tokens_max} tokens does not fit{' now' if rivals else ''}: {error}; ask for fewer tokens{stay}"
        return NotAdmitted(text, retry_after_s=1.0 if rivals else None)

    def _may_free(self, request: Request) -> bool:
        """Whether memory is held by others that are about to work, and idle afterwards: also who waits behind has its session's rows."""
        behind = self.requests[self.requests.index(request) + 1 :]
        holds = any(one.session.memory is not None and one.session is not request.session for one in behind)
        return holds or self._departures.unsettled

    def _beginning(self, request: Request, cuts: bool) -> Beginning | None:
        """A stored history that begins like the request, which has no session of its own."""
        fresh = request.session.temporary and request.session.memory is None and request.history is None
        return self._stored.find(request, cuts=cuts) if fresh else None

    def _hold(self, session: Session, tokens_max: int, begins: Beginning | None) -> None:
        """Raises DoesNotFit; the session has no memory then, or as much as before."""
        stage, placement = self._stage, self._stage.placement
        if session.memory is not None:
            placement.grow(session.memory, tokens_max)
        elif begins is None:
            session.memory = placement.open(session.id, tokens_max)
        elif begins.in_place:
            memory = begins.source.memory
            assert memory is not None, f"{begins.source!r} was found for its rows"
            placement.grow(memory, tokens_max, cut=begins.rows)
            if begins.rows < memory.counts.logical:
                memory.truncate(begins.rows, stage.streams.compute)
            session.memory = self._stored.take(begins.source)
        else:
            assert begins.source.memory is not None, f"{begins.source!r} was found for its rows"
            session.memory = placement.fork(
                begins.source.memory, session.id, tokens_max, begins.rows, compute=stage.streams.compute, copyback=stage.copyback
            )
            self._stored.left(begins)

    def _leave(self, request: Request) -> None:
        self.requests.remove(request)
        self.requests = in_turn(self.requests, self._turns)
        self._turns.leave(request)
        self._stored.settled(request)

    def _refuse(self, request: Request, error: ForebayError) -> None:
        self._leave(request)
        request.fail(error)
        self._ended(request)

    def closed(self, memory: SessionMemory) -> None:
        """A session's memory was closed: what it held is free once its operations are done."""
        self._closing = [one for one in self._closing if one.operations.outstanding]
        if memory.operations.outstanding:
            self._closing.append(memory)

    @property
    def settling(self) -> SessionMemory | None:
        """Memory whose operations a waiting request may be waiting for: closed, or of a session between two requests."""
        between = (request.session.memory for request in self.requests if request.session.idle)
        found = next((memory for memory in (*self._closing, *between) if memory is not None and memory.operations.outstanding), None)
        return self._stored.settling if found is None else found

    def can_move(self) -> bool:
        """Whether the next turn of the loop would change the line."""
        return self.reaps or any(self.startable(request) for request in self.requests)

    @property
    def reaps(self) -> bool:
        """Whether there is somebody to reap."""
        return any(request.aborted or request.session.phase in (Phase.BROKEN, Phase.CLOSED) for request in self.requests)
