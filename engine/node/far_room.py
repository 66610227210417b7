"""How much memory a node has left, as the head knows it: what the node said last, less what was taken since.

Invariants:
1. The node only ever has more than is counted here: what it frees is heard of late, what it gives is counted at once.
2. Where that leaves too little while a call that frees something is unanswered, nobody knows yet (`Asked`).
"""

from typing import Any

from engine.errors import NodeLost
from engine.model.config import ModelConfig
from engine.node import calls
from engine.node.far import Far
from engine.node.far_session import FarSession
from engine.stage_calls import Asked
from kernels.layout import BlockLayout
from memory.errors import DoesNotFit
from memory.needs import Needs, offload_needs, resident_needs
from memory.placement import PlacementStatistics
from streams import Event

__all__ = ["NO_NEEDS", "FarRoom"]

NO_NEEDS = Needs(0, 0)


class FarRoom:
    """Of one node. Loop thread only."""

    def __init__(self, far: Far, model: ModelConfig, layout: BlockLayout) -> None:
        self.layout = layout
        self._far = far
        self._model = model
        self._questions: dict[int, tuple[object, Event[calls.Held]]] = {}  # by memory: whether it may grow
        self._taking: dict[Event[Any], Needs] = {}  # calls that change what is free, and what they take at most

    @property
    def facts(self) -> calls.Facts:
        """What the node said when it was met last; asserts that it was."""
        assert self._far.facts is not None, f"node {self._far.name} was never reached"
        return self._far.facts

    @property
    def held(self) -> PlacementStatistics:
        """What the node holds, heard last."""
        return self._far.held or self.facts.statistics

    def forget(self, memory: int | None = None) -> None:
        """A memory was closed; None: the node is lost, and everything with it."""
        if memory is None:
            self._questions.clear()
            self._taking.clear()
        else:
            self._questions.pop(memory, None)

    def needs(self, tokens_max: int) -> Needs:
        """What a session of `tokens_max` tokens takes of the node."""
        if self.held.placement == "resident":
            return resident_needs(self.layout, self._model.hidden, tokens_max)
        return offload_needs(self.layout, self._model.hidden, self.facts.hot_rows, self._model.top_k, tokens_max)

    def missing(self, needs: Needs) -> DoesNotFit | None:
        """What is too little for `needs`, as far as is known."""
        held = self.held
        taken = [taken for event, taken in self._taking.items() if not event.done()]
        host = needs.host_bytes + sum(each.host_bytes for each in taken) - (held.arena.free - held.arena.reserved) * held.arena.block_bytes
        pool, device = held.pool, 0
        if pool.budget_bytes is not None:
            device = needs.device_bytes + sum(each.device_bytes for each in taken)
            device -= pool.budget_bytes - pool.allocated_bytes - pool.reserved_bytes
        return DoesNotFit(host_missing_bytes=max(0, host), device_missing_bytes=max(0, device)) if max(host, device) > 0 else None

    def check(self, needs: Needs) -> None:
        """Raise DoesNotFit; Asked: nobody knows yet; NodeLost."""
        self.check_there()
        missing = self.missing(needs)
        if missing is None:
            return
        unanswered = next((event for event in self._taking if not event.done()), None)
        if unanswered is not None:
            raise Asked(unanswered)
        raise missing

    def check_there(self) -> None:
        """Raise NodeLost."""
        if self._far.lost is not None:
            raise NodeLost(str(self._far.lost))

    def note(self, event: Event[Any], needs: Needs) -> None:
        """A call that changes what is free, by at most `needs` taken; until it is answered, what was heard may be out of date."""
        self._taking = {each: taken for each, taken in self._taking.items() if not each.done()}
        self._taking[event] = needs

    def ask_grow(self, memory: FarSession, body: calls.Grow, needs: Needs) -> Event[calls.Held]:
        """Grow a memory: now where there is room for certain, else once the node has said so. Raises DoesNotFit, Asked, NodeLost."""
        self.check_there()
        asked, event = self._questions.get(body.memory, (None, None))
        if event is None or asked != body:
            event = memory.ask("grow", body, calls.Held)
            self.note(event, needs)
            if self.missing(NO_NEEDS) is None:
                return event
            self._questions[body.memory] = (body, event)
        if not event.done():
            raise Asked(event)
        del self._questions[body.memory]
        event.result()
        return event
