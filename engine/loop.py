"""The step loop: admits requests, submits steps and append units between them, follows steps one behind.

Holds who waits, who appends, who decodes, each in a class of its own. Decisions are `scheduler.decide`'s. Only this loop awaits
device work.

Invariants:
1. The next step is submitted before the host has seen the token of the one before; at most one step of a lane is followed late.
2. A session in a step submitted before its stop was seen is rolled back when that step completes, and only then leaves its place.
3. A failed operation ends the requests whose step or append it belonged to, and no others.
4. Whatever ends a request, its chunk queue gets exactly one last item.
"""

import asyncio

from engine.append import AppendOutput
from engine.append_cost import StepCost
from engine.append_queue import AppendQueue
from engine.batches import Batches
from engine.config import EngineConfig
from engine.decoding import Decoding
from engine.departures import Departures
from engine.depth import DraftDepth
from engine.device import device_failure
from engine.errors import DeviceFailed, ForebayError, NodeLost, NotAdmitted, SessionBroken
from engine.pressure import Pressure
from engine.reads import Reads
from engine.request import Request
from engine.scheduler import Decision, decide
from engine.session import Phase, Session
from engine.stage import Stage
from engine.stage_calls import Asked
from engine.stored import StoredSessions, Storing
from engine.tally import Tally
from engine.waiting_line import WaitingLine
from streams import Event

__all__ = ["StepLoop"]


class StepLoop:
    """Runs requests on one stage until closed."""

    def __init__(self, stage: Stage, config: EngineConfig, stores: Storing | None = None) -> None:
        """Args: stores: how histories are kept for later requests; None: they are not."""
        self.stage = stage
        self.depth = DraftDepth(config.draft_depth, drafts=stage.model.mtp is not None)
        self.stored = StoredSessions(stage, stores, self._close_session)
        self.departures = Departures(lambda: self.stored.by_use, self.of, self._close_session, self.wake)
        # A step that was submitted before the last token was seen begins at most that deep past the end, and reaches further.
        self._batches = Batches(stage)
        self.pressure = Pressure(stage.placement, lambda: (*self.appending, *self.decoding), self._batches.forget)
        self._line = WaitingLine(
            stage, config.waiting_max, self._ended, self._named, self.stored, self.departures, self.pressure, spare_rows=3 * self.depth.most
        )  # fmt: skip
        self.reads = Reads()  # of sessions that are closed
        self.tally = Tally(stage.backend.clock)
        self._limit = config.decode_batch_limit
        self._gap = config.append_gap
        self._step_cost = StepCost(stage)
        self._decode = Decoding(stage, self._batches, self.depth, self.tally, self._ended, self._named, rolls_back=self.stored.stores)
        self._appends = AppendQueue(stage)
        self._wake = asyncio.Event()
        self.away = ""  # why part of the model is out of reach: nobody new begins then
        self._held_up = False  # whether somebody startable waits for memory; whoever may give it back wakes the loop
        self._closing = False
        self._dead: BaseException | None = None
        self._over = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def steps(self) -> int:
        """Decode steps submitted so far."""
        return self._batches.steps

    @property
    def waiting(self) -> list[Request]:
        """Requests that have not started, in the order in which they are offered memory."""
        return self._line.requests

    @property
    def appending(self) -> list[Request]:
        """Requests whose prompt is being read, in order of their coming."""
        return self._appends.requests

    @property
    def decoding(self) -> list[Request]:
        """Requests that have their first token, in order of its coming."""
        return self._decode.requests

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request that has not ended."""
        return (*self.waiting, *self.appending, *self.decoding)

    def of(self, session: Session) -> list[Request]:
        """Requests of a session that have not ended."""
        return [request for request in self.requests if request.session is session]

    # What callers do.

    def enqueue(self, request: Request) -> None:
        """Queue a request. Raises NotAdmitted: draining, a full line, or more than the stage can ever hold."""
        self.check_open()
        self._line.enqueue(request)
        self._idle.clear()
        self._wake.set()

    def check_open(self) -> None:
        """Raise NotAdmitted once no request is taken any more."""
        if isinstance(self._dead, DeviceFailed):
            raise self._dead
        if self._dead is not None:
            raise NotAdmitted(f"the engine has stopped: {self._dead}")
        if self.away:
            raise NodeLost(f"{self.away}; try again when it is back")
        if self._closing:
            raise NotAdmitted("the engine is draining; ask another one or try later", retry_after_s=5.0)

    def abort(self, request: Request) -> None:
        """Stop a request within one step. Safe at any time, from the loop's thread."""
        request.aborted = True
        self._wake.set()

    def _named(self, error: ForebayError) -> ForebayError:
        """What a request that cannot go on is told: that the device failed, or while part of the model is away, that."""
        lost = self.stage.backend.lost.error()
        if lost is not None:
            return DeviceFailed(str(lost))
        return NodeLost(f"{self.away}; this request ends, its session goes on when that is back") if self.away else error

    def wake(self) -> None:
        """Look again at who waits: a session or memory became free."""
        self._wake.set()

    def close(self) -> None:
        """Refuse new requests; `run` returns once the running ones have ended."""
        self._closing = True
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until no request waits or runs."""
        await self._idle.wait()

    def release(self, request: Request) -> None:
        """Close the memory of a request's session if it is temporary and not stored, broken, or closed by one who may have given up.

        Not where the device failed: nothing is freed then, and archives are made of what is there.
        """
        session = request.session
        if self.stage.backend.lost.done() or (not (self._closing or session.closing) and self.stored.keep(session)):
            return
        last = session.phase is not Phase.EXPORTING and self.of(session) in ([], [request])
        if (session.temporary or (session.closing and last) or session.phase is Phase.BROKEN) and session.phase is not Phase.CLOSED:
            self._close_session(session)

    def _close_session(self, session: Session) -> None:
        self.drop_memory(session)
        session.move(Phase.CLOSED)

    def drop_memory(self, session: Session) -> None:
        """Close a session's memory, keeping what it counted."""
        self.stored.forget(session)
        if session.memory is not None:
            self.reads = self.reads.plus([session.memory])
            session.memory.close()
            self._line.closed(session.memory)
            session.memory = None

    async def run(self) -> None:
        """Until `close` was called and everything has ended.

        If it dies, every request ends with an error and the cause is raised: DeviceFailed once there is no device any more.
        """
        lost, task = self.stage.backend.lost, asyncio.current_task()

        def end(_: Event[None]) -> None:
            if task is not None and not self._over:
                task.cancel()  # it may wait for another machine

        lost.on_done(end)
        try:
            while not (self._closing and self._nothing_left()):
                await self._run_turn()
        except BaseException as error:
            failed = device_failure(error, lost)
            self._die(failed or error)
            if failed is not None:
                raise failed from error
            raise
        finally:
            self._over = True
            self.pressure.close()
            self._idle.set()

    def _nothing_left(self) -> bool:
        left = bool(self.decoding or self.appending or self.waiting) or self._decode.in_flight
        if not left:
            self._idle.set()
        return not left

    def _die(self, error: BaseException) -> None:
        self._dead = error
        for request in self.appending:  # what a prompt brought that was not read to its end is not in its session
            request.session.cut(request.prompt_tokens - len(request.appended))
        for request in self.requests:
            _end_with(request, error)
        for line in (self.waiting, self.appending, self.decoding):
            line.clear()

    async def _run_turn(self) -> None:
        """Decide, admit, submit, follow."""
        self._reap()
        self._nothing_left()
        self.pressure.turn()
        decision = decide(
            self.waiting, self._decode.offered(), session_idle=self._line.startable, may_step=self._may_step,
            decode_batch_limit=self._limit, steps=self._decode.turns, chunks=self._appends.turns,
            appending=tuple(one for one in self._appends.choosable if not self.pressure.holds(one.session)),
        )  # fmt: skip
        waiting, held_up = len(self.waiting), False
        for request in () if self.away else decision.admit:
            # Two requests of one session may both have been offered. Behind one that is held up, who has memory may start if nobody runs.
            may = self._line.startable(request) and not (held_up and request.session.memory is None)
            held_up |= may and not self._admit(request)
            if held_up and (self.appending or self.decoding):
                break
        # Otherwise somebody left the line and may have made room, or runs and will: who is held up is asked again.
        self._held_up = bool(self.away and self.waiting) or (
            held_up and len(self.waiting) == waiting and not (self.appending or self.decoding)
        )
        await self._turn(decision)
        await asyncio.sleep(0)  # readers get a turn even when every event was done already

    def _may_step(self, request: Request) -> bool:
        return not self.pressure.holds(request.session) and self._decode.may_step(request)

    async def _turn(self, decision: Decision[Request]) -> None:
        """Submit what was decided, then follow what was in flight."""
        previous = self._decode.submit(decision.decode, decision.chosen)
        self._append_turn(decision.append, self._allowance(decision.decode))
        if previous is not None:
            await self._decode.follow(previous)
        elif self._decode.in_flight:
            return
        elif self._appends.unit is not None:
            await self._appends.unit.wait_done()
        elif self.decoding:
            await self._decode.wait_room()
        elif not self.appending:
            await self._wait_work()

    async def _wait_work(self) -> None:
        """Nothing runs: wait for a session's last operations, or for a caller."""
        if self.waiting and (settling := self._line.settling) is not None:
            return await settling.operations.settle()
        self._wake.clear()
        if self._line.reaps:  # behind a session that ended in this turn, while who waits for memory or a node is held up
            return
        if self._held_up or (not self._line.can_move() and not (self._closing and not self.waiting)):
            await self._wake.wait()

    def _reap(self) -> None:
        """End requests that were aborted or whose session broke, once no operation is in flight for them."""
        self._line.reap()
        for request in [one for one in self.appending if one.aborted and self._appends.may_stop(one)]:
            self._appends.stop(request)
            self._end_append(request, None)
        self._decode.reap()

    # Admission and append.

    def _admit(self, request: Request) -> bool:
        """Start a request's append if its memory can be had; returns False if it must wait for memory."""
        try:
            admitted = self._line.admit(request, others_run=bool(self.appending or self.decoding))
        except Asked as asked:  # another machine will say whether there is memory
            asked.event.on_done(lambda _: self.wake())
            return False
        except NodeLost:  # it is away by now
            return False
        if admitted:
            try:
                self._start(request)
            except BaseException as error:
                _end_with(request, error)  # it is in no line by which the dying loop could find it
                raise
        return admitted is not False

    def _start(self, request: Request) -> None:
        """Begin the append of a request that has its memory."""
        session = request.session
        assert session.memory is not None, "admitted with memory"
        request.cached = session.memory.counts.logical if request.history is None else request.history.rows
        session.tokens.extend(request.appended)
        self.stored.note(session)  # what it begins with may be shared while it reads the rest
        request.begin(self.stage.model.config.vocabulary, self.stage.device)
        session.move(Phase.APPENDING)
        self._appends.start(request)

    def _allowance(self, members: tuple[Request, ...]) -> int | None:
        """What units of appends may run beside a step of these requests, in bytes that it could read; None: nobody decodes."""
        if not self.appending or (not members and not self._decode.in_flight):
            return None
        held = (request.session.memory for request in members)
        rows = (memory.counts.logical for memory in held if memory is not None)
        return max(1, int((self._gap - 1.0) * self._step_cost.step(rows, self.depth.most)))

    def _append_turn(self, chosen: Request | None, allowance: int | None) -> None:
        """Follow the append whose chunk is open, and submit more of it or of the next one."""
        ended = self._appends.turn(chosen, allowance)
        if ended is None:
            return
        request, output, failure = ended
        if failure is not None:
            self._end_append(request, self._named(SessionBroken(f"appending failed: {failure}")))
        elif output.bad_layer >= 0:
            self._end_append(request, SessionBroken.not_finite(output.bad_layer, self.stage.model.config.layers))
        elif request.aborted:
            self._end_append(request, None)
        else:
            self._begin_decode(request, output)

    def _begin_decode(self, request: Request, output: AppendOutput) -> None:
        """The whole prompt has rows: its last row's token is the first of the generation."""
        session = request.session
        session.move(Phase.READY)
        self.stored.note(session)
        request.take(output.token, output.logits if request.wants_logits else None)
        if request.finished:
            session.revision += 1
            self._ended(request)
        else:
            self._decode.add(request)

    def _end_append(self, request: Request, error: ForebayError | None) -> None:
        """An append that gives no token: at an abort the session keeps the rows of finished chunks; after an error it is broken."""
        session = request.session
        if error is not None:
            session.cut(request.prompt_tokens - len(request.appended))  # where it is made anew, its prompt is asked again
            session.move(Phase.BROKEN)
            request.fail(error)
        else:
            session.cut(max(request.prompt_tokens - len(request.appended), session.rows))
            session.revision += 1
            session.move(Phase.READY)
            request.end("abort")
        self._ended(request)

    def _ended(self, request: Request) -> None:
        """Once no operation of the request is outstanding."""
        self.tally.ended(request)
        self.release(request)
        request.drop_unwritten()
        request.ended.set()
        self._batches.forget(request)


def _end_with(request: Request, error: BaseException) -> None:
    """End a request by what the loop dies of."""
    request.fail(error if isinstance(error, DeviceFailed) else SessionBroken(f"the engine has stopped: {type(error).__name__}: {error}"))
    request.ended.set()
