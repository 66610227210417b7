"""Scenarios of prompts without a model: chunks of two sessions through one append ring, and a chunk on top of copies still in flight.

Knows no orders: the seed decides.
"""

import random

from engine.search.clients import rounds
from engine.search.ground import CHUNK_ROWS, Ground, Life
from engine.search.lives import end_whole
from engine.search.scenario import Scenario, Scene
from streams import Event, Fault

__all__ = ["APPENDS"]


async def chunks(scene: Scene) -> None:
    """A session's chunk begins while the copies of another's are in flight: the append ring is one, and in order."""
    ground = Ground(scene, resident=False)
    pair = [Life(ground, name, 480) for name in ("one", "two")]
    ends: list[tuple[Life, Event[None], list[int]]] = []
    for _ in range(4):
        for one in pair:
            for life_of, ended, salts in [end for end in ends if end[0] is one]:
                await ended
                life_of.salts += salts
                ends.remove((life_of, ended, salts))
            chunk, written, salts = one.submit_chunk(scene.rng.choice([1, 40, 64, 100]))
            if scene.rng.random() < 0.2:
                chunk.abandon([written])
            else:
                ends.append((one, chunk.finish(ground.compute, ground.copyback, written), salts))
    for one, ended, salts in ends:
        await ended
        one.salts += salts
    for one in pair:
        one.written.salts = tuple(one.salts)
    await end_whole(pair)


async def own_copies(scene: Scene) -> None:
    """A prompt is read while copies of the session's own blocks are in flight: it finds their rows in the ring, and its end lands behind
    the copy out of its place there."""
    rng, ground = scene.rng, Ground(scene, hot_rows=scene.rng.choice((4, 8, 24)))
    one, company = Life(ground, "one", 960), Life(ground, "company", 480)
    for _ in range(rng.choice((2, 3))):
        await one.decode_ahead(rng.choice((64, 64, 70, 130)), each=rng.choice((16, 32)))
        late = [event for event in one.session.operations._held if event.label in ("copyback", "mirrored") and rng.random() < 0.7]
        for event in late:
            scene.backend.hold(event)
        chunk, written, salts = one.submit_chunk(rng.choice((1, 63, 65, 100, 195, CHUNK_ROWS)))
        if rng.random() < 0.2:
            chunk.abandon([written])
            ended = None
        else:
            ended = chunk.finish(ground.compute, ground.copyback, written)
        await company.decode(rng.choice((0, 8, 40)), each=8)
        await rounds(rng.randrange(30))
        for event in late:
            scene.backend.release(event)
        if ended is not None:
            await ended
            one.salts += salts
        await one.session.operations.settle()
        one.check()
    for life in (one, company):
        life.written.salts = tuple(life.salts)
    await end_whole([one, company])


def _late_copies(rng: random.Random) -> tuple[Fault, ...]:
    """The first copies complete when nothing else can."""
    return tuple(Fault(rng.choice(("copyback", "copyback", "mirrored")), nth, "delay") for nth in range(rng.choice((0, 3, 6))))


APPENDS = (Scenario("chunks", chunks, weight=3), Scenario("a chunk beside its own copies", own_copies, _late_copies, weight=5))
