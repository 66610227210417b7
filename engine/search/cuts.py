"""Scenarios that cancel at every await there is: the first, the second, and so on until the work ends before it is struck.

One seed plays them all at both moments (`awaits.py`), one after the other on one backend; the seed draws the script, the order of
completions, and whether the clean-up is cut off too. Everything else goes on as ever and is compared as ever.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from engine.engine import Engine
from engine.errors import ForebayError
from engine.generation import Generation
from engine.search.awaits import Counted, Cut, cut_off, until_cut
from engine.search.clients import Client, open_engine, rounds
from engine.search.conversations import EDGE, SHORT, TAIL, WHOLE, settings_of
from engine.search.ground import Ground, Life
from engine.search.reference import greedy
from engine.search.scenario import Scenario, Scene
from engine.search.tiny import prompt
from memory.barrier import barrier

__all__ = ["CUTS"]

_AWAITS_MAX = 200  # of one piece of work; more means that it never ends


def _cuts(scene: Scene) -> Iterator[Cut]:
    """At both moments of the first await, of the second, and so on, until there was no such await."""
    twice = scene.rng.random() < 0.3
    for nth in range(1, _AWAITS_MAX):
        cut = Cut(nth, twice=twice)
        yield cut
        if not cut.struck:
            return
        yield Cut(nth, late=True, twice=twice)
    raise AssertionError(f"somebody waits more than {_AWAITS_MAX} times")


async def each_await_of_a_client(scene: Scene) -> None:
    """A client is cut off at each await of its conversation in turn, each time goes on where it was cut, and another one never notices."""
    script, other = scene.rng.choice((SHORT, TAIL, EDGE)), scene.rng.choice((SHORT, WHOLE))
    for one in (script, other):
        await scene.bench.reference(one)
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, _):
        for cut in _cuts(scene):
            beside = await Client.make(scene, engine, other)
            talking = asyncio.ensure_future(beside.talk())
            client = await Client.make(scene, engine, script)
            await cut_off(client.talk(), cut)
            if cut.twice:
                await client.still()  # it did not wait for its request to end, so the session may not be what it will be
            assert client.session_id is None or client.session.idle, "a client was cut off, and its request goes on without it"
            await client.talk()
            await client.leave()
            await talking
            await beside.leave()


async def each_await_of_a_barrier(scene: Scene) -> None:
    """A barrier is cut off at each await in turn: the session goes on at once, and the next barrier brings all of it to RAM."""
    ground = Ground(scene, resident=scene.rng.random() < 0.2)
    one, other = (Life(ground, name, 600) for name in ("one", "two"))
    for cut in _cuts(scene):
        await one.decode(scene.rng.choice((1, 20, 63, 64)), each=32)
        await other.decode(scene.rng.choice((1, 30)), each=32)
        await cut_off(_bring(one), cut)
        await one.decode(scene.rng.choice((0, 1, 5)), each=2)
        await _bring(one)
        one.check()
    await _bring(other)
    for life in (one, other):
        life.check()
        life.session.close()


async def _bring(life: Life) -> None:
    rows = len(life.salts)
    assert await barrier(life.session, life.ground.copyback) == rows, "the barrier passed over rows"


async def each_await_of_a_closing(scene: Scene) -> None:
    """Closing a session while a request runs in it is cut off at each await in turn: the request ends, and the memory is given back."""
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, _):
        for cut in _cuts(scene):
            session = await engine.create_session()
            generation = engine.generate(list(prompt(scene.rng.choice((5, 70)), 3)), greedy(12), session=session)
            reading = asyncio.ensure_future(_read(generation))
            await rounds(int(scene.rng.expovariate(1 / 120)))
            await cut_off(engine.close_session(session), cut)
            await reading


async def _read(generation: Generation) -> None:
    """To its end, which may be that its session is gone."""
    with contextlib.suppress(ForebayError):
        async for _ in generation:
            pass


async def each_await_of_an_engine(scene: Scene) -> None:
    """Whoever uses an engine is cut off at each await in turn: it shuts with a request running, and gives everything back."""
    for cut in _cuts(scene):
        await until_cut(_use(scene, cut))


async def _use(scene: Scene, cut: Cut) -> None:
    async with open_engine(scene, **settings_of(scene.rng)) as (engine, _):
        await Counted(_begin_two(engine), cut)


async def _begin_two(engine: Engine) -> None:
    """Two sessions, each with a request that has not ended."""
    for rows in (5, 70):
        session = await engine.create_session()
        generation = engine.generate(list(prompt(rows, 3)), greedy(6), session=session)
        for _ in range(3):
            await anext(generation)


CUTS = (
    Scenario("each await of a client", each_await_of_a_client, weight=2),
    Scenario("each await of a barrier", each_await_of_a_barrier),
    Scenario("each await of an engine", each_await_of_an_engine, weight=1),
    Scenario("each await of a closing", each_await_of_a_closing, weight=3),
)
