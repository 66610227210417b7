"""A stage on another machine, as the stage that samples asks it: `Follower` over a control channel (engine/stage_calls.py).

Holds the memories it was asked for by their numbers. What is known of each is `far_session.py`, of the node's room `far_room.py`, of what
stages hand on `handover.py`.

Invariants:
1. No call here waits, and none fails for the network's sake but `open`, `fork` and a memory's `grow` (NodeLost): events do.
2. When the node is lost every memory on it is: each session is broken with the reason, once, and later calls for it do nothing.
"""

from contextlib import suppress
from typing import Any

from engine.append_cost import AppendCost
from engine.model.config import ModelConfig
from engine.node import calls
from engine.node.far import Far
from engine.node.far_room import FarRoom
from engine.node.far_session import FarSession, failed
from engine.node.handover import FarCarried, Handover, Numbers
from engine.node.hosting import STANDING, STEPS
from engine.node.passage import Form
from engine.node.remote_append import RemoteAppend
from engine.node.remote_image import RemoteImage
from engine.node.remote_memory import RemoteMemory
from engine.stage_calls import Carried, MemoryId, Standing, StepCall
from kernels.layout import BLOCK_ROWS, BlockLayout
from memory.errors import DoesNotFit
from memory.needs import Needs
from memory.operations import Operations
from memory.placement import PlacementStatistics
from streams import Event, StreamError

__all__ = ["RemoteFollower"]


class RemoteFollower:
    """See Follower."""

    apart = True

    def __init__(
        self, far: Far, model: ModelConfig, layers: range, layout: BlockLayout, form: Form, numbers: Numbers, *, last: bool
    ) -> None:  # fmt: skip
        """Args: form: of what it hands on. last: the stage behind it is the head's."""
        self.far = far
        self.layout = layout
        self.first_layer = layers.start
        self._model = model
        self._room = FarRoom(far, model, layout)
        self._handover = Handover(far, form, numbers, last=last)
        self._memories: dict[int, RemoteMemory] = {}
        self._standings = 0
        self._cost: AppendCost | None = None
        far.on_broken = self._broken
        far.on_lost = self._lost

    # What the node says by itself, or by its end.

    def _broken(self, memory: int, error: BaseException) -> None:
        found = self._memories.get(memory)
        if found is not None:
            found.session.told.break_with(error)

    def _lost(self, error: BaseException) -> None:
        self._room.forget()
        for memory in list(self._memories.values()):
            memory.session.lose(error)

    # Memory.

    @property
    def held(self) -> PlacementStatistics:
        """See Follower."""
        return self._room.held

    def open(self, memory: MemoryId, session: str, tokens_max: int, told: Operations) -> RemoteMemory:
        """See Follower. Raises NodeLost too."""
        needs = self._room.needs(tokens_max)
        self._room.check(needs)
        return self._taken("open", calls.Open(memory, session, tokens_max), needs, told, 0)

    def fork(self, source: MemoryId, memory: MemoryId, session: str, tokens_max: int, rows: int, told: Operations) -> RemoteMemory:
        """See Follower. Raises NodeLost too."""
        whole, shared = self._room.needs(tokens_max), min(rows, self._memories[source].held.counts.mirrored) // BLOCK_ROWS
        needs = Needs(max(0, whole.host_bytes - shared * self.layout.block_bytes), whole.device_bytes)
        self._room.check(needs)
        return self._taken("fork", calls.Fork(source, memory, session, tokens_max, rows), needs, told, rows)

    def _taken(self, name: str, body: calls.Open | calls.Fork, needs: Needs, told: Operations, rows: int) -> RemoteMemory:
        event = self.far.ask(name, body, calls.Held, session=body.session)
        self._room.note(event, needs)
        held = FarSession(self.far, body.memory, body.session, told, rows)
        made = self._memories[body.memory] = RemoteMemory(held, self._room, body.tokens_max, lambda: self._closed(body.memory))
        held.follow(event, copies=True)  # a fork copies its blocks that are not in RAM
        return made

    def _closed(self, memory: int) -> None:
        self._memories.pop(memory, None)
        self._room.forget(memory)

    def never_fits(self, tokens_max: int) -> DoesNotFit | None:
        """See Follower."""
        held, needs = self.held, self._room.needs(tokens_max)
        host = max(0, needs.host_bytes - held.arena.blocks * held.arena.block_bytes)
        budget = held.pool.budget_bytes
        device = 0 if budget is None else max(0, needs.device_bytes + held.append_ring_bytes - budget)
        return DoesNotFit(host_missing_bytes=host, device_missing_bytes=device) if host or device else None

    # Steps.

    def step(self, call: StepCall, arrived: Carried | None) -> FarCarried:
        """See Follower. Behind a stage that is lost, or for a session that is, the node is asked nothing."""
        number, sessions = self._handover.number_of(arrived), [self._memories[member].session for member in call.members]
        before = None if arrived is None or not arrived.event.done() else arrived.event.error()
        gone = next((session.gone for session in sessions if session.gone is not None), before)
        submitted = failed("step", gone) if gone is not None else self.far.ask("step", calls.Step.of(number, call), type(None))
        for session, rows in zip(sessions, call.rows, strict=True):
            session.stepped(rows, submitted)
        return self._handover.handed_on(call.shape, call.shape.places * call.shape.rows, STEPS, number, submitted)

    def stand(self, call: StepCall, standing: Standing) -> Event[None]:
        """See Follower."""
        sessions = [self._memories[member].session for member in call.members]
        self._handover.is_read(call.shape, STEPS, standing.event)
        gone = next((session.gone for session in sessions if session.gone is not None), None)
        if gone is not None:
            return failed("stand", gone)
        self._standings += 1
        stood = self.far.ask("stand", calls.Step.of(self._standings, call), type(None))
        if not stood.done():
            try:
                self.far.passage.send(standing.values, call.shape, STANDING, self._standings, standing.event)
            except StreamError as error:
                self.far.lose(error)
        for session in sessions:
            session.told.hold(stood)
        return stood

    def abort(self, call: StepCall) -> tuple[Event[Any], ...]:
        """See Follower. Nothing is left to unmap on a node that was lost."""
        if any(self._memories[member].session.gone is not None for member in call.members):
            return ()
        return (self.far.ask("abort", calls.Step.of(0, call), type(None)),)

    # Appends, images, the end.

    def append(self, memory: MemoryId, session: str, rows: int) -> RemoteAppend:
        """See Follower."""
        held = self._memories[memory].session
        held.ask("append", calls.AppendBegin(memory, session, rows), type(None))
        if self._cost is None:
            self._cost = AppendCost.elsewhere(self._model, self.layout, self._room.facts.device)
        return RemoteAppend(held, self._handover, self._cost, self._room.facts.sizes)

    def image(self, memory: MemoryId) -> RemoteImage:
        """See Follower."""
        return RemoteImage(self._memories[memory].session, self.layout)

    def weights(self) -> tuple[str, ...]:
        """See Follower."""
        return self._room.facts.weights

    async def idle(self) -> None:
        """See Follower."""
        with suppress(StreamError):  # else nothing of ours is there any more
            await self.far.ask("idle", None, type(None))

    def __repr__(self) -> str:
        return f"<RemoteFollower {self.far.name}: {len(self._memories)} memories{', lost' if self.far.lost else ''}>"
