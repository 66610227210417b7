"""Scenarios over the real memory layer without a model: random lives of sessions whose every byte is known.

Steps here have several query rows (as a verification of drafted tokens has), so that duplicates, leaders and pins matter, and cost little,
so that rings fill. Knows no orders: the seed decides.
"""

import asyncio
import random

from engine.search.clients import rounds
from engine.search.ground import CHUNK_ROWS, LAYOUT, Ground, Life
from engine.search.scenario import Scenario, Scene
from kernels.layout import BLOCK_ROWS
from memory.barrier import barrier, verify_mirror
from memory.errors import BarrierFailed, CopybackInFlight, DoesNotFit
from memory.host import NoRegistration
from streams import Fault, StreamError

__all__ = ["LIVES", "end_whole", "roll_back", "wreck"]

_ROWS_MAX = 460


async def end_whole(lives: list[Life]) -> None:
    """Bring each to RAM whole, check it, close it."""
    for life in lives:
        assert await barrier(life.session, life.ground.copyback) == len(life.salts)
        await life.session.operations.settle()
        life.check()
        verify_mirror(life.session, LAYOUT)
        life.session.close()


async def _move(life: Life) -> None:
    """One random thing that happens to a session."""
    rng, session = life.rng, life.session
    left = _ROWS_MAX - len(life.salts)
    move = rng.choice(["decode", "decode", "fill", "append", "rollback", "truncate", "barrier", "abandon", "abort", "grow"])
    if move == "decode":
        await life.decode(min(left, rng.choice([1, 3, 8, 12])), each=rng.choice([1, 2, 4]))
    elif move == "fill":
        await life.decode(min(left, rng.choice([31, 63, 64, 65])), each=32)
    elif move == "append" and left:
        await life.append(min(left, rng.choice([1, 63, 64, 65, 130, CHUNK_ROWS])))
    elif move == "rollback" and left > 8 and session.room(len(life.salts), 8):
        await roll_back(life)
    elif move == "truncate":
        await session.operations.settle()
        await life.roll_back(rng.randrange(len(life.salts) + 1))
    elif move == "barrier":
        assert await barrier(session, life.ground.copyback) == len(life.salts)
        life.check()
    elif move == "abandon" and left:
        chunk, written, _ = life.submit_chunk(min(left, rng.randrange(1, CHUNK_ROWS)))
        chunk.abandon([written])
    elif move == "abort" and left > 8:
        while not session.room(len(life.salts), 4):
            await session.operations.settle()
        await life.abort_step(rng.choice([1, 4]), rng.randrange(LAYOUT.layers))
    elif move == "grow":
        await session.operations.settle()
        life.tokens_max += rng.choice([0, 1, 64])
        life.ground.placement.grow(session, life.tokens_max)


async def roll_back(life: Life) -> None:
    """Two steps in flight; the host keeps a part of the first one's rows, as after rejected drafts or a stop."""
    first = len(life.salts)
    kept = first + life.rng.randrange(5)
    step = life.submit_step(4)
    behind = life.submit_step(4)
    if life.ground.scene.faulty:
        await step  # rows of a step that failed are never kept
        await behind  # and its slots would have to be cleared
    event = life.roll_back(kept)
    life.session.commit(kept - first, life.ground.copyback, event)


async def life(scene: Scene) -> None:
    """Two sessions live: decode, append, roll back, truncate, barrier, abandon, abort, grow, in any order."""
    ground = Ground(scene, resident=scene.rng.random() < 0.2, hot_rows=scene.rng.choice((4, 8, 24)))
    pair = [Life(ground, name, 480) for name in ("one", "two")]
    for _ in range(scene.rng.choice((6, 10))):
        await _move(scene.rng.choice(pair))
    await end_whole(pair)


async def company(scene: Scene) -> None:
    """Two sessions live at the same time, on the same streams."""
    ground = Ground(scene, hot_rows=scene.rng.choice((4, 8, 24)))

    async def one(name: str) -> None:
        session = Life(ground, name, 480)
        for _ in range(4):
            rng = session.rng
            await session.decode(rng.choice([1, 5, 40]), each=rng.choice([2, 32]))
            if rng.random() < 0.5:
                assert await barrier(session.session, ground.copyback) == len(session.salts)
        await end_whole([session])

    async with asyncio.TaskGroup() as group:
        for name in ("one", "two"):
            group.create_task(one(name))


async def aborted(scene: Scene) -> None:
    """Steps fail at one layer or another with another one behind them, and the session goes on from rows that were in RAM before."""
    rng = scene.rng
    one = Life(Ground(scene, hot_rows=rng.choice((4, 8))), "one", 480)
    await one.append(rng.choice((130, 192)))
    for _ in range(4):
        await one.abort_step(rng.choice((1, 2, 4)), rng.randrange(LAYOUT.layers))
        if rng.random() < 0.3:
            await one.session.operations.settle()
            one.check()
        await one.decode(rng.choice((4, 16)), each=rng.choice((1, 4)))
    await end_whole([one])


async def lost(scene: Scene) -> None:
    """Something fails in one session's life: what it counts as mirrored stays true, the barrier refuses, the other session lives on."""
    ground = Ground(scene)
    pair = [Life(ground, name, 480) for name in ("one", "two")]
    struck: set[str] = set()
    for _ in range(8):
        sound = [one for one in pair if one.session.session_id not in struck]
        if not sound:
            break
        chosen = scene.rng.choice(sound)
        try:
            await _move(chosen)
        except (StreamError, BarrierFailed):
            struck.add(chosen.session.session_id)
        if chosen.session.operations.broken is not None:
            struck.add(chosen.session.session_id)
    for one in pair:
        if one.session.session_id not in struck and one.session.operations.broken is None:
            try:
                await end_whole([one])
                continue
            except (StreamError, BarrierFailed):
                struck.add(one.session.session_id)
        await wreck(one)


async def wreck(one: Life) -> None:
    """What may still be done with a session after a failure: cut it, wait for it, close it."""
    session, counts = one.session, one.session.counts
    for _ in range(2):
        chunk_open = session.holdings.chunk_open  # type: ignore[attr-defined]  # both placements have it
        if chunk_open or counts.logical == 0:
            break
        try:
            session.truncate(one.rng.randrange(counts.logical + 1), one.ground.compute)
        except CopybackInFlight:
            await session.operations.settle()
        counts.check_integrity()
        await rounds(one.rng.randrange(20))
    await session.operations.settle()
    counts.check_integrity()
    one.written.salts = ()  # which rows it still has is not known any more
    session.close()


async def ring(scene: Scene) -> None:
    """Copies are late and the ring runs full, perhaps after a barrier left a block half in RAM."""
    ground = Ground(scene, hot_rows=scene.rng.choice((8, 24)))
    one = Life(ground, "one", 480)
    await one.decode(scene.rng.choice([3, 64, 100, 127]), each=32)
    if scene.rng.random() < 0.8:
        assert await barrier(one.session, ground.copyback) == len(one.salts)
    await one.decode_ahead(300, each=32)
    await one.decode_ahead(8, each=4)
    await end_whole([one])


async def sharing(scene: Scene) -> None:
    """Somebody else holds blocks of a session, as a fork or a shared prefix does: the session may be cut and go on, their bytes stay."""
    ground = Ground(scene)
    one = Life(ground, "one", 480)
    await one.append(scene.rng.choice([130, 192, 200]))
    await one.decode(scene.rng.choice([0, 30, 66]), each=32)
    await one.session.operations.settle()
    whole = one.session.counts.mirrored // BLOCK_ROWS
    held = one.session.history.share(scene.rng.randrange(1, whole + 1))
    before = [ground.arena.place(block).bytes.clone() for block in held]
    for _ in range(3):
        await one.session.operations.settle()
        await one.roll_back(BLOCK_ROWS * scene.rng.randrange(min(whole, len(one.salts) // BLOCK_ROWS) + 1))
        await one.decode(scene.rng.choice([1, 64, 70]), each=32)
    await end_whole([one])
    for block, was in zip(held, before, strict=True):
        assert bool((ground.arena.place(block).bytes == was).all()), f"block {block} changed under those who share it"
        ground.arena.release(block)


async def waiters(scene: Scene) -> None:
    """Those who wait for a session are cancelled, it is closed with copies in flight, and the next one takes its place at once."""
    ground = Ground(scene, blocks=10)
    for number in range(3):
        one = Life(ground, f"session {number}", 200)
        await one.decode(scene.rng.choice([64, 90, 128, 150]), each=32)
        copies = [event for event in one.session.operations._held if event.label == "copyback" and scene.rng.random() < 0.5]
        for event in copies:
            scene.backend.hold(event)
        waits = [asyncio.ensure_future(one.session.operations.settle()), asyncio.ensure_future(barrier(one.session, ground.copyback))]
        waits += [asyncio.ensure_future(ground.copyback.stream.idle())]
        await rounds(scene.rng.randrange(12))
        closes_first = scene.rng.random() < 0.5
        if closes_first and not waits[1].done():
            waits[1].cancel()
            await asyncio.wait([waits[1]])
        if closes_first:
            one.session.close()
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        if not closes_first:
            counts, still = one.session.counts, not one.session.operations.frozen
            if still and counts.mirrored == counts.submitted and scene.rng.random() < 0.5:
                await one.roll_back(scene.rng.randrange(len(one.salts) + 1))
            one.session.close()
        for event in copies:
            scene.backend.release(event)
    await ground.copyback.stream.idle()
    await ground.compute.idle()


async def lost_copy(scene: Scene) -> None:
    """One copy of several in flight is lost: no later one is counted past it, and the barrier refuses."""
    ground = Ground(scene)
    one = Life(ground, "one", 240)
    await one.decode_ahead(200, each=32)
    await one.session.operations.settle()
    scene.watch.poll()
    assert one.session.operations.broken is not None, "a copy was lost and nobody minds"
    try:
        await barrier(one.session, ground.copyback)
    except BarrierFailed:
        await one.session.operations.settle()
        one.session.close()
        return
    raise AssertionError("the barrier passed over a lost copy")


async def broken_cut(scene: Scene) -> None:
    """A cut fails on the device with a copy in flight; the broken session is cut again, below that copy, which must then say nothing."""
    ground = Ground(scene)
    one = Life(ground, "one", 200)
    await one.decode(scene.rng.choice([64, 70, 127]), each=32)
    await one.roll_back(len(one.salts)).wait_done()
    one.session.truncate(scene.rng.randrange(BLOCK_ROWS), ground.compute)
    await one.session.operations.settle()
    one.session.counts.check_integrity()
    one.written.salts = ()  # the device did not follow the first cut
    one.session.close()


class _Registration:
    """Registers, but for the `nth` call (from 0); keeps account."""

    def __init__(self, nth: int) -> None:
        self._inner = NoRegistration()
        self._left = nth
        self.registered: list[int] = []

    def register(self, host_address: int, size_bytes: int) -> int:
        """See Registration."""
        self._left -= 1
        if self._left == -1:
            raise OSError("the driver registers no more")
        self.registered.append(host_address)
        return self._inner.register(host_address, size_bytes)

    def unregister(self, host_address: int) -> None:
        """See Registration."""
        self.registered.remove(host_address)
        self._inner.unregister(host_address)

    def announce(self) -> None:
        """See Registration."""


async def registration(scene: Scene) -> None:
    """The driver refuses a chunk of the arena: nothing stays registered; with as many as it gives, sessions live."""
    failing = _Registration(scene.rng.randrange(4))
    try:
        Ground(scene, blocks=20, registration=failing)
    except OSError:
        pass
    else:
        raise AssertionError("an arena was made of memory that could not be registered")
    assert failing.registered == [], "memory stayed registered"
    whole = _Registration(1000)
    ground = Ground(scene, blocks=20, registration=whole)
    one = Life(ground, "one", 480)
    await one.decode(70, each=32)
    await one.append(100)
    await end_whole([one])
    scene.at_end.append(lambda: _nothing_registered(whole))


def _nothing_registered(registration: _Registration) -> None:
    assert registration.registered == [], "memory stayed registered after the arena was closed"


async def scarce(scene: Scene) -> None:
    """The arena runs out: opening and growing is all or nothing, and sessions that were admitted never feel it."""
    ground = Ground(scene, blocks=scene.rng.choice((5, 7, 9)))
    lives: list[Life] = []
    for number in range(12):
        if lives and scene.rng.random() < 0.5:
            one = scene.rng.choice(lives)
            await one.decode(min(one.tokens_max - len(one.salts), scene.rng.choice([1, 40, 64])), each=32)
            await one.session.operations.settle()
            if scene.rng.random() < 0.3:
                lives.remove(one)
                one.check()
                one.session.close()
                continue
        before = (ground.ledger.statistics(), ground.arena.statistics(), ground.pool.statistics())
        try:
            if lives and scene.rng.random() < 0.5:
                one = scene.rng.choice(lives)
                await one.session.operations.settle()
                before = (ground.ledger.statistics(), ground.arena.statistics(), ground.pool.statistics())
                wanted = one.tokens_max + scene.rng.choice([1, 64, 640])
                ground.placement.grow(one.session, wanted)
                one.tokens_max = wanted
            else:
                lives.append(Life(ground, f"session {number}", scene.rng.choice([1, 64, 65, 130])))
        except DoesNotFit:
            assert (ground.ledger.statistics(), ground.arena.statistics(), ground.pool.statistics()) == before, "a refusal left a trace"
    await end_whole(lives)


def _any_failure(rng: random.Random) -> tuple[Fault, ...]:
    labels = ("copyback", "copyback", "mirrored", "append*", "step.*", "layer.*", "group.*", "truncate", "tables")
    return tuple(Fault(rng.choice(labels), rng.randrange(8), rng.choice(("fail", "fail", "delay"))) for _ in range(rng.choice((1, 2, 3))))


def _late_copies(rng: random.Random) -> tuple[Fault, ...]:
    return tuple(Fault("copyback", nth, "delay") for nth in range(rng.randrange(4), 6))


LIVES = (
    Scenario("life", life, weight=6),
    Scenario("aborted steps", aborted),
    Scenario("company", company, weight=3),
    Scenario("life with late copies", life, _late_copies),
    Scenario("life with failures", lost, _any_failure, weight=6),
    Scenario("full ring", ring, lambda rng: tuple(Fault("copyback", nth, "delay") for nth in range(12)), weight=5),
    Scenario("lost copy", lost_copy, lambda rng: (Fault("copyback", rng.randrange(3)),), weight=3),
    Scenario("sharing", sharing),
    Scenario("waiters", waiters),
    Scenario("broken cut", broken_cut, lambda rng: (Fault("truncate"), Fault("copyback", 0, "delay")), weight=2),
    Scenario("registration", registration),
    Scenario("scarce blocks", scarce, weight=5),
)
