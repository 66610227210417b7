"""The step loop: admits requests, submits steps and append units, follows steps one behind.

Holds who waits, who appends, who decodes. Decisions are `scheduler.decide`'s; only this loop awaits device work.

Invariants:
1. The next step is submitted before the host has seen the token of the one before; at most one step is followed late.
2. A session in a step submitted before its stop was seen is rolled back when that step completes, and only then leaves its place.
3. A failed operation ends the requests whose step or append it belonged to, and no others.
4. Whatever ends a request, its chunk queue gets exactly one last item.
"""

import asyncio
from dataclasses import dataclass

import structlog

from engine.append import AppendOutput
from engine.append_queue import AppendQueue
from engine.decode import DecodeStep, StepEvents
from engine.errors import ForebayError, NotAdmitted, SessionBroken
from engine.reads import Reads
from engine.request import Request
from engine.sampling_table import SamplingTable
from engine.scheduler import Decision, decide
from engine.session import Phase, Session
from engine.stage import Stage
from memory.errors import DoesNotFit
from memory.table import StepTable
from streams import Event

__all__ = ["StepLoop"]

_log = structlog.get_logger("engine")


@dataclass(slots=True)
class _Bucket:
    """Buffers of one batch size, and who is in its table."""

    step: DecodeStep
    table: StepTable
    sampling: SamplingTable
    members: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step not followed yet."""

    bucket: _Bucket
    members: tuple[Request, ...]
    events: StepEvents


class StepLoop:
    """Runs requests on one stage until closed."""

    def __init__(self, stage: Stage, decode_batch_limit: int, waiting_max: int) -> None:
        self.stage = stage
        self.waiting: list[Request] = []
        self.decoding: list[Request] = []
        self.steps = 0
        self.reads = Reads()  # of sessions that are closed
        self._limit = decode_batch_limit
        self._waiting_max = waiting_max
        self._buckets: dict[int, _Bucket] = {}
        self._appends = AppendQueue(stage)
        self._flight: _Flight | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def appending(self) -> list[Request]:
        """Requests whose prompt is being read, oldest first."""
        return self._appends.requests

    # What callers do.

    def enqueue(self, request: Request) -> None:
        """Queue a request. Raises NotAdmitted when the queue is full or its context can never fit."""
        if self._closing:
            raise NotAdmitted("the engine is draining; ask another one or try later", retry_after_s=5.0)
        if len(self.waiting) >= self._waiting_max:
            raise NotAdmitted(f"{len(self.waiting)} requests are waiting already; try later", retry_after_s=1.0)
        self.waiting.append(request)
        self._idle.clear()
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Stop a request within one step. Safe at any time, from the loop's thread."""
        request.aborted = True
        self._wake.set()

    def close(self) -> None:
        """Refuse new requests; `run` returns once the running ones have ended."""
        self._closing = True
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until no request waits or runs."""
        await self._idle.wait()

    def release(self, request: Request) -> None:
        """Close the memory of a request's session if it is temporary or broken."""
        session = request.session
        if (session.temporary or session.phase is Phase.BROKEN) and session.phase is not Phase.CLOSED:
            self.drop_memory(session)
            session.move(Phase.CLOSED)

    def drop_memory(self, session: Session) -> None:
        """Close a session's memory, keeping what it counted."""
        if session.memory is not None:
            self.reads = self.reads.plus([session.memory])
            session.memory.close()
            session.memory = None

    # The loop.

    async def run(self) -> None:
        """Until `close` was called and everything has ended."""
        while True:
            self._reap()
            if not (self.waiting or self.appending or self.decoding or self._flight is not None):
                self._idle.set()
                if self._closing:
                    return
            decision = decide(
                self.waiting,
                self.appending,
                self.decoding,
                session_idle=_startable,
                may_step=self._may_step,
                steps_taken=self.steps,
                decode_batch_limit=self._limit,
            )
            for request in decision.admit:
                # Two requests of one session may both have been offered.
                if _startable(request) and not self._admit(request):
                    break
            await self._turn(decision)
            await asyncio.sleep(0)  # readers get a turn even when every event was done already

    async def _turn(self, decision: Decision[Request]) -> None:
        """Submit what was decided, then follow what was in flight."""
        previous, self._flight = self._flight, None
        if decision.decode:
            self._flight = self._submit_step(decision.decode, previous)
        self._append_turn()
        if previous is not None:
            await self._follow(previous)
        elif self._flight is not None:
            return
        elif self._appends.unit is not None:
            await self._appends.unit.wait_done()
        elif self.decoding:
            await self._wait_room()
        elif not self.appending:
            await self._wait_work()

    async def _wait_work(self) -> None:
        """Nothing runs: wait for a session's last operations, or for a caller."""
        for request in self.waiting:
            memory = request.session.memory
            if request.session.idle and memory is not None and memory.operations.outstanding:
                await memory.operations.settle()
                return
        self._wake.clear()
        if not any(request.aborted or _startable(request) for request in self.waiting) and not (self._closing and not self.waiting):
            await self._wake.wait()

    async def _wait_room(self) -> None:
        """Nobody may step before a copyback completes: wait for one, and end those whose copies failed."""
        await self.stage.streams.copyback.idle()
        for request in list(self.decoding):
            memory = request.session.memory
            if memory is not None and memory.operations.broken is not None:
                self._break(request, SessionBroken(f"a copy to host memory failed: {memory.operations.broken}"))
        stuck = [request for request in self.decoding if request.may_step and not self._may_step(request)]
        assert not stuck, f"no copyback is in flight, yet the ring has no room for {stuck[0].session!r}"

    def _reap(self) -> None:
        """End aborted requests that no operation is in flight for."""
        for request in [one for one in self.waiting if one.aborted]:
            self.waiting.remove(request)
            request.end("abort")
            self._ended(request)
        for request in [one for one in self.appending if one.aborted and self._appends.may_stop(one)]:
            self._appends.stop(request)
            self._end_append(request, None)
        for request in [one for one in self.decoding if one.aborted and one.in_flight == 0]:
            request.end("abort")
            self._leave(request)

    # Admission and append.

    def _admit(self, request: Request) -> bool:
        """Take memory for a request and start its append; returns False if it must wait for memory."""
        session = request.session
        if session.memory is not None and session.memory.operations.broken is not None:
            self.waiting.remove(request)
            session.move(Phase.BROKEN)
            request.fail(SessionBroken(f"a copy to host memory failed: {session.memory.operations.broken}"))
            self._ended(request)
            return True
        tokens_max = len(session.tokens) + len(request.appended) + request.max_tokens
        try:
            if session.memory is None:
                session.memory = self.stage.placement.open(session.id, tokens_max)
            else:
                self.stage.placement.grow(session.memory, tokens_max)
        except DoesNotFit as error:
            if self.appending or self.decoding:
                return False  # somebody who runs will give memory back
            self.waiting.remove(request)
            request.fail(NotAdmitted(f"a context of {tokens_max} tokens does not fit: {error}; ask for fewer tokens"))
            self._ended(request)
            return True
        self.waiting.remove(request)
        request.cached = session.memory.counts.logical if request.history is None else request.history.rows
        session.tokens.extend(request.appended)
        request.prompt = tuple(session.tokens)
        session.move(Phase.APPENDING)
        self._appends.start(request)
        return True

    def _append_turn(self) -> None:
        """Follow and submit one unit of the oldest append."""
        ended = self._appends.turn()
        if ended is None:
            return
        request, failure = ended
        assert request.append is not None
        output = request.append.output
        if failure is not None:
            self._end_append(request, SessionBroken(f"appending failed: {failure}"))
        elif output.bad_layer >= 0:
            self._end_append(request, _not_finite(output.bad_layer, self.stage.model.config.layers))
        elif request.aborted:
            self._end_append(request, None)
        else:
            self._begin_decode(request, output)

    def _begin_decode(self, request: Request, output: AppendOutput) -> None:
        """The whole prompt has rows: its last row's token is the first of the generation."""
        session = request.session
        session.move(Phase.READY)
        request.take(output.token, output.logits if request.wants_logits else None)
        if request.finished:
            session.revision += 1
            self._ended(request)
        else:
            session.move(Phase.DECODING)
            self.decoding.append(request)

    def _end_append(self, request: Request, error: ForebayError | None) -> None:
        """An append that gives no token: at an abort the session keeps the rows of finished chunks; after an error it is broken."""
        session = request.session
        if error is not None:
            session.move(Phase.BROKEN)
            request.fail(error)
        else:
            before = len(request.prompt) - len(request.appended)
            del session.tokens[max(before, session.rows) :]
            session.move(Phase.READY)
            request.end("abort")
        self._ended(request)

    # Decode.

    def _may_step(self, request: Request) -> bool:
        memory = request.session.memory
        return request.may_step and memory is not None and memory.room(memory.counts.logical, 1)

    def _bucket(self, size: int) -> _Bucket:
        """The smallest power-of-two batch that holds `size` rows."""
        places = 1 << (size - 1).bit_length()
        found = self._buckets.get(places)
        if found is None:
            table = StepTable(places, self.stage.table_layout)
            found = self._buckets[places] = _Bucket(DecodeStep(self.stage, places), table, SamplingTable(places))
        return found

    def _submit_step(self, members: tuple[Request, ...], previous: _Flight | None) -> _Flight:
        bucket = self._bucket(len(members))
        stale = bucket.members != members
        for request in members:
            memory = request.session.memory
            assert memory is not None
            memory.ensure_rows(memory.counts.logical + 1, self.stage.streams.compute)
        after = [] if previous is None else [previous.events.done]
        if stale:
            after.append(self._rewrite(bucket, members))
        session = members[0].session.id if len(members) == 1 else f"{len(members)} sessions"
        keep_logits = any(request.wants_logits for request in members)
        events = bucket.step.submit(bucket.table, bucket.sampling, session=session, after=after, keep_logits=keep_logits)
        for request in members:
            assert request.session.memory is not None
            request.session.memory.advance(1)
            request.session.memory.operations.hold(events.output)
            request.in_flight += 1
        self.steps += 1
        return _Flight(bucket, members, events)

    def _rewrite(self, bucket: _Bucket, members: tuple[Request, ...]) -> Event[None]:
        """Set the tables to these members by one stream-ordered operation; if it fails, so must the step that would read others' places."""
        rows = [request.session.memory.table_row(1) for request in members if request.session.memory is not None]
        states = [request.state for request in members]
        bucket.members = members

        write_table = bucket.table.rewrite(rows)

        def rewrite() -> None:
            write_table()
            bucket.sampling.rewrite(states)

        return self.stage.streams.compute.submit(rewrite, label="table.rewrite")

    async def _follow(self, flight: _Flight) -> None:
        """Read a step's tokens and act on them."""
        await flight.events.output.wait_done()
        failure = flight.events.output.error()
        if failure is not None:
            self._fail_step(flight, failure)
            return
        output = flight.events.output.result()
        for place, request in enumerate(flight.members):
            request.in_flight -= 1
            memory = request.session.memory
            assert memory is not None, "memory outlives the steps that read it"
            if not (request.finished or request.aborted):
                if output.bad_layer[place] >= 0:
                    self._break(request, _not_finite(output.bad_layer[place], self.stage.model.config.layers))
                    continue
                if memory.operations.broken is not None:
                    self._break(request, SessionBroken(f"an operation of the session failed: {memory.operations.broken}"))
                    continue
                memory.commit(1, self.stage.copyback, flight.events.done)
                logits = None if output.logits is None or not request.wants_logits else output.logits[place]
                request.take(output.tokens[place], logits)
            if request.in_flight == 0 and (request.finished or request.aborted):
                request.end("abort")  # nothing if it has finished
                self._leave(request)

    def _leave(self, request: Request) -> None:
        """Give up the place, once no step of the request is in flight: rows that were not committed are rolled back."""
        session, memory = request.session, request.session.memory
        assert memory is not None
        self.decoding.remove(request)
        if request.broken:
            session.move(Phase.BROKEN)
        else:
            if memory.counts.logical > memory.counts.committed and not session.temporary:
                memory.truncate(memory.counts.committed, self.stage.streams.compute)
            session.revision += 1
            session.move(Phase.READY)
        self._ended(request)

    def _break(self, request: Request, error: ForebayError) -> None:
        """End a decoding request with an error; its session is broken. It keeps its place while a step of it is in flight."""
        request.fail(error)
        request.broken = True
        if request.in_flight == 0:
            self._leave(request)

    def _fail_step(self, flight: _Flight, failure: BaseException) -> None:
        cleared = flight.bucket.step.abort(flight.bucket.table, session="")
        _log.error("step.failed", error=str(failure), sessions=[request.session.id for request in flight.members])
        for request in flight.members:
            assert request.session.memory is not None, "memory outlives the steps that read it"
            request.session.memory.operations.hold(cleared)  # it writes the session's maps, which are given back below
            request.in_flight -= 1
            self._break(request, SessionBroken(f"a decode step failed: {failure}"))

    def _ended(self, request: Request) -> None:
        """Once no operation of the request is outstanding."""
        self.release(request)
        request.ended.set()
        for bucket in self._buckets.values():
            if request in bucket.members:
                bucket.members = ()  # the next step on it rewrites the table


def _startable(request: Request) -> bool:
    """Whether the request's session can take it now: nobody runs in it and nothing of it is in flight."""
    memory = request.session.memory
    return request.session.idle and (memory is None or memory.operations.outstanding == 0)


def _not_finite(layer: int, layers: int) -> SessionBroken:
    place = "the output head" if layer == layers else f"layer {layer}"
    return SessionBroken(f"{place} produced a value that is not finite; this request ends, others go on")
