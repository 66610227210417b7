"""A node's stage under one head: takes its calls and hands them to the stage, in order.

Holds the memories of the head's sessions by their numbers, and the passages to the stages beside this one. Knows no steps and no models:
what it hands calls to is a `Follower` of this process.

Invariants:
1. A call that puts work in flight for a session is answered when that work is done, and the answer says what the session holds then: so
   the head counts nothing as mirrored that is not.
2. What breaks a session here is told to the head at once.
3. Without the passage that a call needs the call fails with `PeerLost`, and the stage has been asked for nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy
import torch

from engine.node import calls
from engine.node.answering import Taker
from engine.node.passage import AnyRows, Form, Passage, together
from engine.node.wire import Failure, failure_of
from engine.protocol import SyntheticHistory
from engine.stage_calls import Carried, Follower, FollowerAppend, FollowerImage, FollowerMemory, MemoryId, Standing
from engine.unit import Unit
from kernels.layout import STATE_FIELDS
from memory.operations import Operations
from memory.placement import PlacementStatistics
from streams import Channel, Closed, Event, PeerLost, Reason

__all__ = ["Apart", "Broken", "Hosting", "Neighbours"]

STEPS, CHUNKS = "s.", "c."  # prefixes of what is handed on by steps and by chunks, which do not wait for one another
STANDING, AFTER, TOKEN = "standing", "after", "token"


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """Told to the head: a session cannot go on."""

    memory: int
    failure: Failure


class Apart(msgspec.Struct, frozen=True, array_like=True, tag="apart"):
    """Told to the head: the channel to a stage beside this one has ended."""

    failure: Failure


class _Told(Operations):
    """Operations of one session here. `fresh`: held since somebody last looked."""

    def __init__(self, breaks: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.fresh: list[Event[Any]] = []
        self._breaks = breaks

    def hold(self, event: Event[Any], *, freezes: bool = False, places: bool = False) -> None:
        """See Operations."""
        self.fresh.append(event)
        super().hold(event, freezes=freezes, places=places)

    def break_with(self, error: BaseException) -> None:
        """See Operations."""
        if self.broken is None:
            self._breaks(error)
        super().break_with(error)


@dataclass(slots=True)
class _Append:
    """An append under way: the units of its open chunk, and where they go on to."""

    append: FollowerAppend
    units: Iterator[Unit] = field(default_factory=lambda: iter(()))
    following: Unit | None = None
    number: int = -1


@dataclass(slots=True)
class _Session:
    memory: FollowerMemory
    told: _Told
    append: _Append | None = None
    image: FollowerImage | None = None


@dataclass(slots=True)
class Neighbours:
    """Passages to the stage before (None for the first), the one behind, and the head. The head may be the one behind."""

    head: Passage
    control: Channel
    before: Passage | None = None
    behind: Passage | None = None


class Hosting:
    """Sessions of one head on one stage. Loop thread only."""

    def __init__(
        self, follower: Follower, form: Form, arrives: Form | None, neighbours: Neighbours, tell: Callable[[object], None]
    ) -> None:
        """Args: form: of what the stage hands on; arrives: of what comes from the stage before, None for the first."""
        self._follower = follower
        self._form = form
        self._arrives = arrives
        self._chunk = AnyRows(form.chunk_rows)
        self.neighbours = neighbours
        self._tell = tell
        self._sessions: dict[int, _Session] = {}
        self._read: dict[object, Event[Any]] = {}  # by buffers: what reads them is done

    def takers(self) -> dict[str, Taker]:
        """Who takes which call."""
        session, memory = self._session_call, calls.Memory
        return {
            "open": Taker(calls.Open, self._open),
            "fork": Taker(calls.Fork, self._fork),
            "commit": Taker(calls.Rows, self._commit),
            "retract": Taker(calls.Rows, lambda asked: self._session(asked.memory).memory.retract(asked.rows)),
            "truncate": Taker(calls.Rows, session(lambda one, asked: one.memory.truncate(asked.rows))),
            "grow": Taker(calls.Grow, session(lambda one, asked: one.memory.grow(asked.tokens_max, asked.cut))),
            "rest": Taker(memory, session(lambda one, asked: one.memory.rest())),
            "shed": Taker(calls.Shed, session(lambda one, asked: one.memory.shed(shared=asked.shared))),
            "shrink": Taker(memory, session(lambda one, asked: one.memory.shrink())),
            "close": Taker(memory, self._close),
            "step": Taker(calls.Step, self._step),
            "stand": Taker(calls.Step, self._stand),
            "abort": Taker(calls.Step, self._abort),
            "append": Taker(calls.AppendBegin, self._append),
            "append.units": Taker(calls.AppendUnits, self._append_units),
            "append.unit": Taker(memory, self._append_unit),
            "append.pass": Taker(memory, self._append_pass),
            "append.finish": Taker(calls.AppendEnd, self._append_finish),
            "append.fill": Taker(calls.AppendFill, self._append_fill),
            "append.stand": Taker(calls.AppendStand, self._append_stand),
            "append.abandon": Taker(memory, self._append_abandon),
            "image.out": Taker(memory, self._image_out),
            "image.begin": Taker(calls.Load, self._image_begin),
            "image.send": Taker(calls.Blocks, self._image_send),
            "image.take": Taker(calls.Filled, self._image_take),
            "image.finish": Taker(calls.Rows, self._image_finish),
        }

    @property
    def sessions(self) -> int:
        """Memories that are held."""
        return len(self._sessions)

    def release(self) -> None:
        """The head is gone: let go of every session, as soon as nothing of it is in flight, units of its append included."""
        sessions, self._sessions = self._sessions, {}
        for one in sessions.values():
            if one.append is not None:
                one.append.append.abandon()  # before the close, which waits for what the chunk has in flight
            one.memory.close()

    # Sessions.

    def _session(self, number: int) -> _Session:
        found = self._sessions.get(number)
        assert found is not None, f"no session of memory {number}"
        return found

    def _enter(self, number: int, make: Callable[[_Told], FollowerMemory]) -> Event[calls.Held]:
        assert number not in self._sessions, f"memory {number} is there already"
        told = _Told(lambda error: self._tell(Broken(number, failure_of(error))))
        one = self._sessions[number] = _Session(make(told), told)
        return self._settled(one, False)

    def _open(self, asked: calls.Open) -> Event[calls.Held]:
        return self._enter(asked.memory, lambda told: self._follower.open(MemoryId(asked.memory), asked.session, asked.tokens_max, told))

    def _fork(self, asked: calls.Fork) -> Event[calls.Held]:
        fork, source, memory = self._follower.fork, MemoryId(asked.source), MemoryId(asked.memory)
        return self._enter(asked.memory, lambda told: fork(source, memory, asked.session, asked.tokens_max, asked.rows, told))

    def _session_call(self, work: Callable[[_Session, Any], object]) -> Callable[[Any], Event[calls.Held]]:
        def begin(asked: Any) -> Event[calls.Held]:
            one = self._session(asked.memory)
            one.told.fresh.clear()
            return self._settled(one, work(one, asked) is True)

        return begin

    def _commit(self, asked: calls.Rows) -> Event[calls.Held] | None:
        """Nearly every one puts nothing in flight, and changes nothing that the head does not know: then there is nothing to say."""
        one = self._session(asked.memory)
        one.told.fresh.clear()
        one.memory.commit(asked.rows)
        return self._settled(one, False) if one.told.fresh else None

    def _settled(self, one: _Session, changed: bool) -> Event[calls.Held]:
        """Done once what the call put in flight for the session is, with what it holds then."""
        fresh, one.told.fresh = one.told.fresh, []
        held: Event[calls.Held] = Event("held")

        def settle(done: Event[None]) -> None:
            held.settle(*self._held(one, changed, done.error()))

        together(fresh, "held").on_done(settle)
        return held

    def _held(self, one: _Session, changed: bool, error: BaseException | None) -> tuple[calls.Held | None, BaseException | None]:
        if error is not None:
            return None, error
        memory = one.memory
        return calls.Held(memory.held, memory.reads, memory.extra_bytes, self._follower.held, changed), None

    def _close(self, asked: calls.Memory) -> Event[PlacementStatistics]:
        """Answers with what the stage holds once the memory is free."""
        one, free = self._sessions.pop(asked.memory), Event[PlacementStatistics]("close")
        one.memory.close()

        def settle() -> None:
            free.settle(self._follower.held, None)

        one.told.when_idle(settle)
        return free

    # Steps.

    def _arrived(self, key: object, rows: int, prefix: str, number: int) -> Carried | None:
        """What the stage before hands on; None for the first stage. Raises PeerLost."""
        if self._arrives is None:
            return None
        before = _there(self.neighbours.before, "before")
        free = self._read.get((prefix, key))
        return before.arrive(key, rows, self._arrives, prefix, number, () if free is None else (free,))

    def _step(self, asked: calls.Step) -> Event[None]:
        behind, call = _there(self.neighbours.behind, "behind"), asked.call()
        try:
            arrived = self._arrived(call.shape, call.shape.places * call.shape.rows, STEPS, asked.number)
            carried = self._follower.step(call, arrived)
        except BaseException as error:
            behind.skip(self._form, STEPS, asked.number, error)  # the stage behind waits for it
            raise
        self._read[STEPS, call.shape] = carried.event
        behind.hand_on(carried, call.shape, STEPS, asked.number)
        return _said(carried.event)

    def _stand(self, asked: calls.Step) -> Event[None]:
        call, places = asked.call(), asked.places
        free = self._read.get((STANDING, call.shape))
        event, values = self.neighbours.head.receive(
            call.shape, (places, STATE_FIELDS), torch.int64, STANDING, asked.number, () if free is None else (free,)
        )
        stood = self._read[STANDING, call.shape] = self._follower.stand(call, Standing(event, values))
        return _said(stood)

    def _abort(self, asked: calls.Step) -> Event[None]:
        return together(self._follower.abort(asked.call()), "abort")

    # Appends.

    def _appending(self, number: int) -> _Append:
        found = self._session(number).append
        assert found is not None, f"memory {number} has no append"
        return found

    def _append(self, asked: calls.AppendBegin) -> None:
        one = self._session(asked.memory)
        one.append = _Append(self._follower.append(MemoryId(asked.memory), asked.session, asked.rows))

    def _append_units(self, asked: calls.AppendUnits) -> None:
        append = self._appending(asked.memory)
        arrived = self._arrived(self._chunk, asked.rows, CHUNKS, asked.number)
        tokens: Sequence[int] = asked.tokens if arrived is None else range(asked.rows)
        append.units, append.number = append.append.units(tokens, arrived), asked.number
        append.following = next(append.units, None)

    def _append_unit(self, asked: calls.Memory) -> Event[bool]:
        """Submit the next unit; answers whether it was the chunk's last here."""
        append = self._appending(asked.memory)
        unit = append.following
        assert unit is not None, f"memory {asked.memory}: the chunk has no more units"
        event = unit.submit()
        append.following = next(append.units, None)
        return _said_as(event, append.following is None)

    def _append_pass(self, asked: calls.Memory) -> None:
        """The stage behind has asked for what the chunk makes: all units of it are submitted here."""
        append, behind = self._appending(asked.memory), _there(self.neighbours.behind, "behind")
        try:
            carried = append.append.carried
        except BaseException as error:
            behind.skip(self._form, CHUNKS, append.number, error)
            raise
        self._read[CHUNKS, self._chunk] = carried.event
        behind.hand_on(carried, self._chunk, CHUNKS, append.number)

    def _append_finish(self, asked: calls.AppendEnd) -> Event[calls.Held]:
        append = self._appending(asked.memory)
        after = self.neighbours.control.receive_bytes(kind=AFTER, step=append.number, bytes_max=0)
        finished = append.append.finish(after, last=asked.last)
        if asked.last:
            finished.on_done(partial(self._append_over, self._session(asked.memory)))
        return self._counted(asked.memory, finished)

    def _append_over(self, one: _Session, finished: Event[Any]) -> None:
        """Let go of what the append computed in. The token that stands behind it was asked for before its end could be done, unless that
        failed; then the session goes too."""
        if finished.error() is None:
            one.append = None

    def _append_fill(self, asked: calls.AppendFill) -> Event[calls.Held]:
        history = SyntheticHistory(asked.seed, asked.history_rows)
        return self._counted(asked.memory, self._appending(asked.memory).append.fill(asked.rows, history))

    def _counted(self, memory: int, event: Event[Any]) -> Event[calls.Held]:
        one = self._session(memory)
        one.told.fresh.append(event)
        return self._settled(one, False)

    def _append_stand(self, asked: calls.AppendStand) -> Event[None]:
        event, token = self.neighbours.head.receive("token", (1,), torch.int64, TOKEN, asked.number)
        return _said(self._appending(asked.memory).append.stand(token, event))

    def _append_abandon(self, asked: calls.Memory) -> None:
        self._appending(asked.memory).append.abandon()
        self._session(asked.memory).append = None

    # Images.

    async def _image_out(self, asked: calls.Memory) -> tuple[int, calls.Held]:
        one = self._session(asked.memory)
        image = one.image = self._follower.image(MemoryId(asked.memory))
        rows = await image.read_out()
        return rows, self._still_held(asked.memory, one)

    async def _image_begin(self, asked: calls.Load) -> None:
        one = self._session(asked.memory)
        one.image = self._follower.image(MemoryId(asked.memory))
        await one.image.begin(asked.rows, asked.window)

    async def _image_send(self, asked: calls.Blocks) -> list[bytes]:
        return [block.tobytes() for block in await self._image(asked.memory).blocks(asked.first, asked.stop)]

    async def _image_take(self, asked: calls.Filled) -> None:
        image, stop = self._image(asked.memory), asked.first + len(asked.blocks)
        for block, filled in zip(await image.blocks(asked.first, stop), asked.blocks, strict=True):
            block[:] = numpy.frombuffer(filled, numpy.uint8)
        await image.place(asked.first, stop)

    async def _image_finish(self, asked: calls.Rows) -> calls.Held:
        one = self._session(asked.memory)
        await self._image(asked.memory).finish(asked.rows)
        return self._still_held(asked.memory, one)

    def _still_held(self, number: int, one: _Session) -> calls.Held:
        """What it holds. Raises Closed: the head closed it while it was waited for, as where another stage of it was lost."""
        if self._sessions.get(number) is not one:
            raise Closed(f"memory {number} was closed meanwhile")
        held, _ = self._held(one, False, None)
        assert held is not None
        return held

    def _image(self, number: int) -> FollowerImage:
        found = self._session(number).image
        assert found is not None, f"memory {number} has no image"
        return found


def _there(passage: Passage | None, which: str) -> Passage:
    if passage is None:
        raise PeerLost(Reason.LOST, f"there is no way to the stage {which} this one")
    return passage


def _said(event: Event[Any]) -> Event[None]:
    """The same end, with nothing to say."""
    return together((event,), event.label)


def _said_as(event: Event[Any], value: bool) -> Event[bool]:
    said: Event[bool] = Event(event.label)

    def settle(done: Event[Any]) -> None:
        said.settle(None if done.error() else value, done.error())

    event.on_done(settle)
    return said
