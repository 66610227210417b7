"""Scenarios over the real engine: conversations whose every token, logit and row is known.

Each plays clients against one engine and adds one thing that goes wrong or comes at the wrong time. Knows no orders: the seed decides.
"""

import asyncio
import random
from collections.abc import Sequence

from engine.engine import Engine
from engine.errors import NotAdmitted
from engine.search.clients import Client, open_engine, rounds
from engine.search.reference import Script, Turn, greedy
from engine.search.scenario import Scenario, Scene
from engine.search.tiny import TOP_K, prompt
from engine.stage import Stage
from memory.barrier import barrier, verify_mirror
from streams import Fault

__all__ = ["CONVERSATIONS", "SCRIPTS"]

EDGE = Script("edge", (Turn(61, 6, 1), Turn(2, 2, 2)))  # crosses a block while decoding
SHORT = Script("short", (Turn(5, 4, 3), Turn(1, 2, 4)))  # all of it in the ring
WHOLE = Script("whole", (Turn(64, 2, 5), Turn(62, 3, 6)))  # begins at a block's end; a second prompt across the next
LONG = Script("long", (Turn(130, 4, 7),))  # three chunks of 64
TAIL = Script("tail", (Turn(1, 3, 8), Turn(TOP_K + 1, 3, 9)))  # one token, then one more than a selection
LATE = Script("late", (Turn(125, 5, 10), Turn(10, 2, 11)))  # a second block's end while decoding
TALK = Script("talk", (Turn(4, 34, 13),))  # still decodes when others have read their prompts
CHAT = Script("chat", (Turn(7, 40, 14),))
FULL = Script("full", (Turn(60, 212, 12),))  # more rows than a ring holds
SCRIPTS = (EDGE, SHORT, WHOLE, LONG, TAIL, LATE, TALK, CHAT, FULL)


def settings_of(rng: random.Random) -> dict[str, object]:
    """What may differ without changing a token."""
    return {
        "hot_rows": rng.choice((TOP_K, TOP_K + 1, 2 * TOP_K)),
        "append_chunk_rows": rng.choice((20, 64, 100)),
        "decode_batch_limit": rng.choice((1, 2, 8)),
        "draft_depth": rng.choice((0, 0, 1, 3)),
    }


async def _clients(scene: Scene, engine: Engine, scripts: Sequence[Script]) -> list[Client]:
    return [await Client.make(scene, engine, script) for script in scripts]


async def _all(clients: Sequence[Client]) -> None:
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.talk())
    for client in clients:
        await client.leave()


async def _references(scene: Scene, scripts: Sequence[Script]) -> None:
    """Before anything of the scene runs, so that a first run is no different from a later one."""
    for script in scripts:
        await scene.bench.reference(script)


async def decode(scene: Scene) -> None:
    """Two to four sessions decode side by side, two of them long enough to share steps; blocks fill, a second turn follows."""
    scripts = [TALK, CHAT, *scene.rng.sample((EDGE, SHORT, WHOLE, TAIL, LATE), scene.rng.choice((0, 1, 2)))]
    await _references(scene, scripts)
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, _):
        await _all(await _clients(scene, engine, scripts))
        together = max(shape.places for shape in engine._loop._batches._buckets)
        assert scene.faulty or together >= 2 or engine.config.decode_batch_limit == 1, "no two sessions shared a step"
    if not scene.faulty:
        assert scene.watch.rises + scene.watch.gathers > 0, "the oracle compared nothing"


async def append(scene: Scene) -> None:
    """Long prompts come in while others decode; one of them a single token."""
    scripts = [scene.rng.choice((TALK, EDGE, SHORT)), LONG, scene.rng.choice((TAIL, LATE, WHOLE))]
    await _references(scene, scripts)
    async with open_engine(scene, **{**settings_of(scene.rng), "append_chunk_rows": scene.rng.choice((17, 20, 64))}) as (engine, _):
        clients = await _clients(scene, engine, scripts)
        first = asyncio.ensure_future(clients[0].talk())
        await rounds(scene.rng.randrange(60))
        await asyncio.gather(first, *(client.talk() for client in clients[1:]))
        for client in clients:
            await client.leave()


async def stop(scene: Scene) -> None:
    """Turns end at a stop token that the host sees when the next step is in flight already: it is rolled back, and the next turn begins."""
    scripts = [scene.rng.choice((EDGE, LATE)), scene.rng.choice((TAIL, SHORT, WHOLE))]
    await _references(scene, scripts)
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, _):
        clients = await _clients(scene, engine, scripts)
        for client in clients:
            client.stopping = True
        await _all(clients)


async def cancel(scene: Scene) -> None:
    """A client is cancelled wherever it waits, perhaps more than once, and goes on from where its session stands."""
    scripts = [scene.rng.choice((EDGE, LATE, LONG)), scene.rng.choice((TAIL, SHORT, WHOLE))]
    await _references(scene, scripts)
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, _):
        clients = await _clients(scene, engine, scripts)
        other = asyncio.ensure_future(clients[1].talk())
        for _ in range(scene.rng.choice((1, 2, 3))):
            task = asyncio.ensure_future(clients[0].talk())
            await rounds(int(scene.rng.expovariate(1 / 120)))
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        await clients[0].talk()
        await other
        for client in clients:
            await client.leave()


async def flush(scene: Scene) -> None:
    """After a turn the session is brought to RAM whole, copies of its blocks and another session's steps still in flight."""
    scripts = [scene.rng.choice((EDGE, LATE)), scene.rng.choice((SHORT, WHOLE))]
    await _references(scene, scripts)
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, stage):
        clients = await _clients(scene, engine, scripts)

        async def between(client: Client) -> None:
            await _flush(scene, stage, client)

        for client in clients:
            client.between = between
        await _all(clients)


async def _flush(scene: Scene, stage: Stage, client: Client) -> None:
    """Barrier, or one that is cancelled; the session's next turn comes at once."""
    while not client.session.idle:
        await rounds(1)
    memory = client.memory
    assert memory is not None, "a session between turns has memory"
    if scene.rng.random() < 0.4:
        task = asyncio.ensure_future(barrier(memory, stage.copyback))
        await rounds(scene.rng.randrange(20))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            assert task.result() == memory.counts.logical
        return
    assert await barrier(memory, stage.copyback) == memory.counts.logical == memory.counts.mirrored
    scene.watch.poll()
    scene.watch.check_session(memory)
    verify_mirror(memory, stage.layout)


async def scarce(scene: Scene) -> None:
    """The arena holds fewer blocks than everybody wants: some wait, some are refused, and nobody's rows suffer."""
    scripts = [EDGE, SHORT, WHOLE, TAIL]
    scene.rng.shuffle(scripts)
    await _references(scene, scripts)
    blocks = scene.rng.choice((3, 4))
    settings = {**settings_of(scene.rng), "host_memory_bytes": blocks * scene.bench.block_bytes}
    async with open_engine(scene, **settings) as (engine, _):
        clients = await _clients(scene, engine, scripts)
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(_talk_and_leave(client))
            group.create_task(_too_long(engine, 64 * blocks + 1))
        assert any(client.heard for client in clients), "nobody was served"


async def _talk_and_leave(client: Client) -> None:
    await client.talk()
    await client.leave()


async def _too_long(engine: Engine, rows: int) -> None:
    """A prompt that can never fit is refused, whenever it is looked at."""
    try:
        await engine.generate(list(prompt(rows, 99)), greedy(1)).complete()
    except NotAdmitted:
        return
    raise AssertionError(f"a prompt of {rows} rows was served from an arena that holds fewer")


async def ring_full(scene: Scene) -> None:
    """The first block's copy is late until the ring is full; decoding waits for it and goes on."""
    await _references(scene, [FULL])
    async with open_engine(scene, hot_rows=TOP_K) as (engine, _):
        await _all(await _clients(scene, engine, [FULL]))


def _breaking(rng: random.Random) -> tuple[Fault, ...]:
    """One or two operations of any kind fail or are late."""
    labels = ("layer.*", "group.*", "step.*", "append*", "copyback", "mirrored", "table.rewrite", "tables", "truncate")
    return tuple(Fault(rng.choice(labels), rng.randrange(14), rng.choice(("fail", "fail", "delay"))) for _ in range(rng.choice((1, 2))))


def _losing(rng: random.Random) -> tuple[Fault, ...]:
    """A copy is lost."""
    return (Fault(rng.choice(("copyback", "copyback", "mirrored", "append tail")), rng.randrange(4)),)


def _late_copies(rng: random.Random) -> tuple[Fault, ...]:
    """Copies are late, nothing fails."""
    return tuple(Fault("copyback", nth, "delay") for nth in range(rng.choice((1, 2, 6))))


CONVERSATIONS = (
    Scenario("decode", decode, weight=3),
    Scenario("append", append),
    Scenario("stop", stop),
    Scenario("cancel", cancel),
    Scenario("flush", flush),
    Scenario("scarce", scarce),
    Scenario("late copies", decode, _late_copies, weight=3),
    Scenario("lost copies", decode, _losing, weight=2),
    Scenario("failed operations", decode, _breaking),
    Scenario("failures and cancels", cancel, _breaking, weight=3),
    Scenario("ring full", ring_full, lambda rng: (Fault("copyback", 0, "delay"),), weight=1),
)
