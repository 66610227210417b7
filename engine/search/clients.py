"""Clients of a watched engine: each talks one script, and what it hears and leaves is compared with the reference.

Knows the engine's face and the watch. A client that was cut off goes on where it was cut: the tokens the session kept are a beginning of
the script, and the rest of it is the next prompt, so that the rows stay comparable.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from engine.engine import Engine
from engine.errors import NotAdmitted, SessionBroken
from engine.protocol import SessionId
from engine.search.reference import Reference, Script, greedy
from engine.search.scenario import Scene
from engine.search.watch import PoisonedArena, PoisonedPool, check_stage
from engine.search.watched_rounds import WatchedRounds
from engine.session import Phase, Session
from engine.stage import Stage
from kernels.layout import BLOCK_ROWS
from memory.session import SessionMemory

__all__ = ["Client", "open_engine", "rounds"]


@asynccontextmanager
async def open_engine(scene: Scene, **settings: object) -> AsyncIterator[tuple[Engine, Stage]]:
    """A watched engine on the scene's backend; at the end of the scene nothing of its stage may be held."""
    config = scene.bench.config(**settings)
    scene.notes["settings"] = msgspec.json.encode(config).decode()
    makers = {"arena_of": PoisonedArena, "pool_of": PoisonedPool}
    stage, watched = scene.bench.stage(config, scene.backend, scene.watch, **makers)
    engine = scene.bench.engine(config, stage)
    scene.at_end.append(lambda: _check_end(engine, stage, watched))  # also when whoever uses the engine is cancelled
    try:
        async with engine.running():
            yield engine, stage
    except Exception as error:
        if watched.wrong:  # what broke the step is the finding, not that it broke
            raise watched.wrong[0] from error
        raise


def _check_end(engine: Engine, stage: Stage, watched: WatchedRounds) -> None:
    if watched.wrong:
        raise watched.wrong[0]
    statistics = engine.statistics()
    assert (statistics.sessions, statistics.running, statistics.waiting) == (0, 0, 0), f"the engine ended with {statistics}"
    check_stage(stage)


async def rounds(count: int) -> None:
    """Let the loop go round `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Client:
    """One conversation in a session of its own."""

    scene: Scene
    engine: Engine
    script: Script
    reference: Reference
    session_id: SessionId | None = None
    broken: bool = False
    refused: bool = False
    between: Callable[["Client"], Awaitable[None]] | None = None  # after each turn
    stopping: bool = False  # turns end at a stop token that comes just when they would end anyway, so that a step is in flight then
    heard: int = field(default=0)

    @classmethod
    async def make(cls, scene: Scene, engine: Engine, script: Script) -> "Client":
        """With the script's reference."""
        return cls(scene, engine, script, await scene.bench.reference(script))

    @property
    def session(self) -> Session:
        """The engine's own record; kept until `leave`."""
        assert self.session_id is not None, "the client has not begun"
        return self.engine._sessions[self.session_id]

    @property
    def memory(self) -> SessionMemory | None:
        """The session's memory, while there is any."""
        return None if self.session_id is None else self.scene.watch.memory_of(self.session_id)

    def whole(self) -> list[int]:
        """Every token of the script, prompts and what the reference says."""
        return self.script.whole(self.reference)

    async def talk(self) -> None:
        """All that is left of the script, from wherever the session stands. SessionBroken ends it where faults are planned."""
        if self.session_id is None:
            self.session_id = await self.engine.create_session()
            self.scene.watch.expect(self.session_id, self.reference)
        if self.session.phase in (Phase.BROKEN, Phase.CLOSED):  # it broke while nobody listened
            assert self.scene.faulty, "a session broke and nothing had failed"
            self.broken = True
            return
        try:
            end = 0
            for number, turn in enumerate(self.script.turns):
                start, end = end + turn.rows, end + turn.rows + turn.tokens
                if len(self.session.tokens) < end:
                    await self._turn(number, start, end)
                    if self.between is not None:
                        await self.between(self)
        except SessionBroken:
            assert self.scene.faulty, "a session broke and nothing had failed"
            self.broken = True
        except NotAdmitted:
            self.refused = True

    async def _turn(self, number: int, start: int, end: int) -> None:
        """Generate the tokens [start, end) of the script, or what is left of them."""
        held, whole = list(self.session.tokens), self.whole()
        assert held == whole[: len(held)], f"{self.script.name}: the session holds other tokens than it said"
        first = max(start, len(held) + (len(held) == self.session.rows))
        if first >= end:
            first = end - 1
        prompt, wanted = whole[len(held) : first], whole[first:end]
        sampling = greedy(len(wanted))
        if self.stopping and wanted[-1] not in wanted[:-1]:
            sampling = greedy(len(wanted) + 9, wanted[-1])
        heard: list[int] = []
        logits: list[Tensor] = []
        async with self.engine.generate(prompt, sampling, session=self.session_id) as generation:
            async for chunk in generation:
                heard.extend(chunk.token_ids)
                logits.extend(chunk.logits)
                self.heard += len(chunk.token_ids)
                assert heard == wanted[: len(heard)], f"{self.script.name}: said {heard}, the reference {wanted}"
        assert heard == wanted, f"{self.script.name}: said {heard}, the reference {wanted}"
        expected = self.reference.logits[number][first - start :]
        for place, (mine, other) in enumerate(zip(logits, expected, strict=True)):
            assert torch.equal(mine, other), f"{self.script.name}: other logits at token {place} of turn {number}"

    async def still(self) -> None:
        """Wait until no request runs in the session and nothing of it is in flight."""
        while self.session_id in self.engine._sessions and not self.session.idle and not self.broken:
            await rounds(1)
        memory = self.memory
        if memory is not None:
            await memory.operations.settle()

    async def leave(self) -> None:
        """Check all that the session holds, then close it."""
        if self.session_id is None:
            return
        await self.still()
        memory = self.memory
        if memory is not None and memory.operations.broken is None and not self.broken:
            self.scene.watch.check_session(memory)
            counts = memory.counts
            whole = counts.committed // BLOCK_ROWS * BLOCK_ROWS
            assert memory.ring is None or counts.mirrored >= whole, f"{counts!r}: a whole block never came to RAM"
        assert memory is None or memory.operations.broken is None or self.scene.faulty, f"broken: {memory.operations.broken}"
        await self.engine.close_session(self.session_id)
