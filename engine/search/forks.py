"""Scenarios of families: sessions forked from one another while all of them live, each in a task of its own.

Cuts of a fork fall anywhere, also where the source's step, chunk, cut or copy is in flight; both sides go on, are cut, rest, wake and are
deleted in any order. Whoever is left is compared row by row, and every block and page has exactly as many references as holders.
Knows no orders: the seed decides.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.search.clients import rounds
from engine.search.ground import CHUNK_ROWS, LAYOUT, Ground, Life
from engine.search.lives import roll_back, wreck
from engine.search.scenario import Scenario, Scene
from kernels.layout import BLOCK_ROWS
from memory.allotment import Allotment
from memory.barrier import barrier, verify_mirror
from memory.errors import BarrierFailed, DoesNotFit
from memory.fork import shared_rows
from memory.offload import OffloadSession
from memory.resident import ResidentSession
from memory.session import SessionMemory
from streams import Event, Fault, StreamError

__all__ = ["FORKS"]

_TOKENS_MAX = 480
_ALIVE_MAX = 6
_MOVES = ("decode", "ahead", "append", "fork", "fork", "cut", "rollback", "barrier", "rest", "late")
_LATE = ("copyback", "fork", "truncate", "append tail", "own page")  # what is held back now and then


class _Family:
    """Who is alive, and what each does next."""

    def __init__(self, scene: Scene, ground: Ground, *, scarce: bool) -> None:
        """Args: scarce: some find no room, and do without."""
        self.alive: list[Life] = []
        self.ground = ground
        self._scene = scene
        self._rng = scene.rng
        self._scarce = scarce
        self._born = 0
        self._chunks = asyncio.Lock()  # a stage reads one prompt at a time
        self._group: asyncio.TaskGroup | None = None

    async def live(self) -> None:
        """Everybody alive makes some moves, and so does whoever is born meanwhile; then nothing is in flight any more."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if not self.alive:
                self._begin(Life(self.ground, self._name(), _TOKENS_MAX), moves=5)
            for life in [] if self._born == 1 else list(self.alive):
                group.create_task(self._live(life, 3))
        self._group = None
        for life in list(self.alive):
            await life.session.operations.settle()
            if life.session.operations.broken is not None:
                self.alive.remove(life)
                await wreck(life)
        await self._still()
        for life in self.alive:
            life.check()
        _check_holders(self.ground, self.alive)

    async def end(self) -> None:
        """One after the other goes, in any order, and those left have what they had."""
        self._rng.shuffle(self.alive)
        while self.alive:
            life = self.alive.pop()
            if self._rng.random() < 0.4 and not self._scene.faulty and life.session.ring is not None:
                assert await barrier(life.session, self.ground.copyback) == len(life.salts)
                verify_mirror(life.session, LAYOUT)
            life.session.close()
            await self._still()
            for left in self.alive:
                left.check()
            _check_holders(self.ground, self.alive)

    def _begin(self, life: Life, moves: int) -> None:
        assert self._group is not None, "sessions are born while the family lives"
        self.alive.append(life)
        self._group.create_task(self._live(life, moves))

    def _name(self) -> str:
        self._born += 1
        return f"session {self._born}"

    async def _still(self) -> None:
        """Nothing is in flight, of those who are gone neither."""
        for stream in (self.ground.compute, self.ground.copyback.stream, self.ground.compute):
            await stream.idle()

    async def _live(self, life: Life, moves: int) -> None:
        """Some moves, and perhaps the end at once, whatever is in flight."""
        try:
            for _ in range(moves):
                await self._move(life, self._rng.choice(_MOVES))
                if life.session.operations.broken is not None:
                    break
        except (StreamError, BarrierFailed):
            if not self._scene.faulty:
                raise
            self.alive.remove(life)
            await wreck(life)
            return
        if self._rng.random() < 0.3 and life.session.operations.broken is None:
            self.alive.remove(life)
            life.session.close()

    async def _move(self, life: Life, move: str) -> None:
        rng, session = self._rng, life.session
        left = _TOKENS_MAX - len(life.salts)
        if move in ("decode", "ahead", "append", "rollback") and not await self._admitted(life):
            return
        if move == "decode":
            await life.decode(min(left, rng.choice((1, 5, 31, 64, 70))), each=rng.choice((4, 32)))
        elif move == "ahead":
            await life.decode_ahead(min(left, rng.choice((8, 65, 130))), each=rng.choice((4, 32)))
        elif move == "append" and left:
            async with self._chunks:
                await session.operations.settle()  # of a barrier that nobody waited for
                await life.append(min(left, rng.choice((1, 64, 65, 130, CHUNK_ROWS))))
        elif move == "fork":
            self._fork(rng.choice(self.alive))
        elif move == "cut":
            await session.operations.settle()
            _cut(life, rng.randrange(len(life.salts) + 1))
        elif move == "rollback" and left > 8 and session.room(len(life.salts), 8):
            await roll_back(life)
        elif move == "barrier":
            await self._flush(life)
        elif move == "rest":
            await self._rest(life)
        elif move == "late":
            self._hold(life)

    async def _admitted(self, life: Life) -> bool:
        """Whether there is room for a turn: what a session gave up or lost it asks for again."""
        if not self._scarce:
            return True
        await life.session.operations.settle()
        before = self._held()
        try:
            self.ground.placement.grow(life.session, _TOKENS_MAX)
        except DoesNotFit:
            assert self._held() == before, "a turn that was refused left a trace"
            return False
        return True

    def _fork(self, source: Life) -> None:
        """Another one begins with rows of `source` that its steps have been followed for, wherever they are now."""
        session, rng = source.session, self._rng
        assert isinstance(session, OffloadSession | ResidentSession)
        rows = min(session.counts.committed, len(source.salts))
        if session.holdings.chunk_open:
            rows = shared_rows(session, rows)
        if rows < 1 or len(self.alive) >= _ALIVE_MAX or session.operations.broken is not None:
            return
        rows = rng.choice((rows, rng.randrange(1, rows + 1), max(1, rows - rng.randrange(4)), max(1, rows // BLOCK_ROWS * BLOCK_ROWS)))
        before = self._held()
        try:
            made = source.fork(self._name(), rows, _TOKENS_MAX)
        except DoesNotFit:
            assert self._held() == before, "a fork that was refused left a trace"
        else:
            self._begin(made, moves=rng.choice((2, 3)))
            if rng.random() < 0.4:
                self._fork(made)  # whose own rows have not come yet

    def _held(self) -> tuple[object, ...]:
        ground = self.ground
        return ground.ledger.statistics(), ground.arena.statistics(), ground.pool.statistics()

    async def _flush(self, life: Life) -> None:
        """A barrier, or one that whoever waits for it gives up."""
        waiting = asyncio.ensure_future(barrier(life.session, self.ground.copyback))
        if self._rng.random() < 0.4:
            await rounds(self._rng.randrange(20))
            waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            assert waiting.result() == len(life.salts), "the barrier passed over rows"

    async def _rest(self, life: Life) -> None:
        """It gives up hot caches and what it has reserved, perhaps pages of keys too, may be forked or cut so, and gets all of it back."""
        session = life.session
        await session.operations.settle()
        if self._rng.random() < 0.5:
            self.ground.placement.rest(session)
        else:
            self.ground.placement.shed(session, shared=self._rng.random() < 0.5)
        assert session.statistics().hot == (), "a session rests with a hot cache"
        await rounds(self._rng.choice((0, 3, 40)))
        if self._rng.random() < 0.3:
            self._fork(life)
        await session.operations.settle()
        if self._rng.random() < 0.3:
            _cut(life, self._rng.randrange(len(life.salts) + 1))
            await session.operations.settle()
        if not self._scarce:
            self.ground.placement.grow(session, _TOKENS_MAX)
            await life.decode(min(_TOKENS_MAX - len(life.salts), self._rng.choice((0, 2, 8))), each=2)  # its keys come back for that

    def _hold(self, life: Life) -> None:
        """Some of what is in flight is late, by some rounds of the loop."""
        backend, group = self._scene.backend, self._group
        assert group is not None, "sessions move while the family lives"
        late = [event for event in life.session.operations._held if event.label in _LATE and self._rng.random() < 0.5]
        for event in late:
            backend.hold(event)
        group.create_task(_release(self._scene, late, self._rng.choice((5, 40, 150))))


async def _release(scene: Scene, late: list[Event[Any]], after_rounds: int) -> None:
    await rounds(after_rounds)
    for event in late:
        scene.backend.release(event)


def _cut(life: Life, rows: int) -> None:
    """Nothing of the session is in flight."""
    before = life.session.counts.snapshot()
    try:
        life.roll_back(rows)
    except DoesNotFit:
        assert life.session.counts.snapshot() == before, "a cut that was refused changed the counts"


def _check_holders(ground: Ground, lives: list[Life]) -> None:
    """Every block and page has a reference from each session that holds it and from nobody else; nothing may be in flight."""
    blocks = _holders([life.session for life in lives], lambda session: session.history.allotment)
    _holders([life.session for life in lives], lambda session: session.pages.allotment)
    mirrors = sum(len(life.session._mirror) for life in lives if isinstance(life.session, ResidentSession))
    offload = sum(blocks.values()) if lives and lives[0].session.ring is not None else 0
    found = ground.arena.statistics().references
    assert found == mirrors + offload, f"{found} references to blocks in RAM, {mirrors + offload} holders"


def _holders(sessions: list[SessionMemory], part: Callable[[SessionMemory], Allotment[Any]]) -> Counter[Any]:
    held: Counter[Any] = Counter()
    for session in sessions:
        held.update(part(session).ids)
    for session in sessions:
        units = part(session)
        wrong = {unit: (units._store.references(unit), held[unit]) for unit in units.ids if units._store.references(unit) != held[unit]}
        assert not wrong, f"units of {session.session_id} with other references than holders: {wrong}"
    return held


async def forks(scene: Scene) -> None:
    """A conversation and its forks decode, append, fork, are cut, rest, wake and end, all at once; copies are late now and then."""
    resident = scene.rng.random() < 0.2
    scarce = not resident and scene.rng.random() < 0.3
    ground = Ground(scene, resident=resident, blocks=scene.rng.choice((10, 14)) if scarce else 60, hot_rows=scene.rng.choice((4, 8, 24)))
    family = _Family(scene, ground, scarce=scarce)
    await family.live()
    if family.alive and scene.rng.random() < 0.5:
        await family.live()
    await family.end()


async def lost_fork(scene: Scene) -> None:
    """The copy of a fork, or a cut of it, fails: who was forked from there meanwhile is broken too, and who was not has all its rows."""
    rng, ground = scene.rng, Ground(scene, resident=scene.rng.random() < 0.3)
    one = Life(ground, "one", _TOKENS_MAX)
    await one.append(rng.choice((130, 200)))
    await one.decode(rng.choice((0, 30, 66)), each=32)
    two = one.fork("two", rng.randrange(70, len(one.salts) + 1), _TOKENS_MAX)
    lives = [one, two, one.fork("three", rng.randrange(1, len(one.salts) + 1), _TOKENS_MAX)]
    await rounds(rng.choice((0, 0, 1)))
    if '"truncate"' in scene.notes["faults"] and two.session.operations.broken is None:
        _cut(two, rng.randrange(66, len(two.salts)))
    if two.session.operations.broken is None:
        rows = len(two.salts)
        lives.append(two.fork("four", rng.choice((rows, rows, rng.randrange(1, rows + 1))), _TOKENS_MAX))
    for life in lives:
        await life.session.operations.settle()
        if life.session.operations.broken is None:
            life.check()
    for life in lives:
        if life.session.operations.broken is None:
            life.session.close()
        else:
            await wreck(life)
    assert one.session.operations.broken is None, "a fork broke the session that it was forked from"


def _late(rng: random.Random) -> tuple[Fault, ...]:
    """Forks and copies complete when nothing else can."""
    return tuple(Fault(rng.choice(("fork", "copyback", "copyback", "truncate")), nth, "delay") for nth in range(rng.choice((2, 4))))


def _any_failure(rng: random.Random) -> tuple[Fault, ...]:
    """What a fork stands on fails, or what its source goes on with."""
    labels = ("fork", "fork", "copyback", "copyback", "mirrored", "truncate", "append tail", "append raised", "tables", "keys", "layer.*")
    return tuple(Fault(rng.choice(labels), rng.randrange(4), rng.choice(("fail", "fail", "delay"))) for _ in range(rng.choice((1, 2))))


FORKS = (
    Scenario("forks", forks, weight=5),
    Scenario("forks with late copies", forks, _late),
    Scenario("forks with failures", forks, _any_failure, weight=5),
    Scenario("lost fork", lost_fork, lambda rng: (Fault(rng.choice(("fork", "fork", "truncate"))),), weight=3),
)
