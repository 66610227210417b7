"""Stages under any interleaving, with operations that fail, and where one of them runs out of memory."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import NeverFits, SessionBroken
from engine.follower import LocalFollower
from engine.stage import Stage
from memory.errors import DoesNotFit
from streams import Backend, Fault, SeededOrder, VirtualBackend, sealed
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import Run, collect, greedy, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def stages_of(engine: Engine) -> tuple[Stage, ...]:
    return (*(one.stage for one in engine.stage.before if isinstance(one, LocalFollower)), engine.stage)


def check_nothing_held(engine: Engine) -> None:
    """Every block, page, slot and state is back on every stage; what is left is the stages' own append rings."""
    for stage in stages_of(engine):
        held = stage.placement.statistics()
        assert (held.arena.free, held.arena.reserved, held.arena.references) == (held.arena.blocks, 0, 0), held.arena
        own = 1 if held.append_ring_bytes else 0
        assert (held.pool.buffers, held.pool.reserved_bytes) == (own, 0), held.pool
        stage.arena.check_integrity()
        stage.pool.check_integrity()


async def settled(engine: Engine) -> None:
    await engine._loop.wait_idle()
    for _ in range(300):
        await asyncio.sleep(0)


async def two_sessions(checkpoint: Path, backend: Backend, **settings: Any) -> tuple[Run, Run]:
    """One session of two turns, crossing a block, beside one whose chunks are appended while the first decodes."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, **settings), backend=backend) as engine:
        with sealed():
            async with asyncio.TaskGroup() as group:
                one = group.create_task(collect(engine, [(ids(62, 1), 4), (ids(3, 2), 2)]))
                two = group.create_task(collect(engine, [(ids(100, 3), 4)]))
        await settled(engine)
        check_nothing_held(engine)
    await backend.close()
    return one.result(), two.result()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow if seed == 2 else pytest.mark.long) for seed in (0, 2, 3, 4, 5))]
)
async def test_any_interleaving_of_stages_gives_the_bits_of_one(checkpoint: Path, seed: int) -> None:
    """Sealed from the world, with poison until work completes, two stages cut inside a group give what one gives, and leave nothing."""
    whole = await two_sessions(checkpoint, VirtualBackend(seed))
    cut = await two_sessions(checkpoint, VirtualBackend(seed), stages="2", draft_depth=seed % 3)
    assert all(one.same_bits(other) for one, other in zip(whole, cut, strict=True))


async def fails(engine: Engine, tokens: int) -> bool:
    try:
        await collect(engine, [(ids(60, 1), tokens)])
    except SessionBroken:
        return True
    return False


# What fails, and on which try; where both stages have an operation of a name, they take turns.
FAULTS = [
    ("layer.1.attend", 4), ("stand", 3), ("append.0.forward", 1), ("layer.1.attend", 5), ("step.hand_on", 2), ("step.finish", 2),
    ("step.over", 2), ("step.stand", 1), ("append.0.forward", 0), ("append.begin", 0), ("append.begin", 1), ("append.finish", 0),
    ("append.finish", 1), ("append raised", 0), ("append raised", 1), ("append.ends", 0), ("token.stand", 0), ("copyback", 0),
    ("copyback", 1), ("table.rewrite", 0), ("table.rewrite", 1), ("group.0.plan", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "nth"),
    [
        FAULTS[0],
        *(pytest.param(*each, marks=pytest.mark.slow if place % 5 == 0 else pytest.mark.long) for place, each in enumerate(FAULTS[1:])),
    ],
)
async def test_what_fails_on_one_stage_ends_its_requests_alone(checkpoint: Path, label: str, nth: int) -> None:
    """The request ends with SessionBroken, another one gets its usual bits, and every stage has everything back."""
    usual = VirtualBackend(0)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K), backend=usual) as engine:
        wanted = await collect(engine, [(ids(70, 3), 3)])
    await usual.close()
    backend = VirtualBackend(SeededOrder(1, faults=(Fault(label, nth=nth),)))
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages="2"), backend=backend) as engine:
        assert await fails(engine, 10)
        again = await collect(engine, [(ids(70, 3), 3)])
        assert again.same_bits(wanted)
        await settled(engine)
        check_nothing_held(engine)
    with contextlib.suppress(Exception):
        await backend.close()


async def test_what_fits_on_one_stage_alone_is_given_back(checkpoint: Path) -> None:
    """A session that one stage has no room for leaves nothing on the other; one that cannot grow there gives up no row for it."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages="1,3"), backend=(backend := VirtualBackend(0))) as engine:
        first, last = stages_of(engine)
        placement, rows = engine.stage.placement, 640
        session = placement.open("one", 64)
        before = [stage.placement.statistics() for stage in (first, last)]
        for tight in (last, first):
            left = tight.arena.available - 3
            tight.arena.reserve(left)
            held = [stage.placement.statistics() for stage in (first, last)]
            with pytest.raises(DoesNotFit):
                placement.open("two", rows)
            assert [stage.placement.statistics() for stage in (first, last)] == held
            with pytest.raises(DoesNotFit):
                placement.grow(session, rows)
            for stage, was in zip((first, last), held, strict=True):
                assert stage.placement.statistics().arena.reserved <= was.arena.reserved
            tight.arena.unreserve(left)
            placement.grow(session, 64)
            assert [stage.placement.statistics() for stage in (first, last)] == before
        session.close()
        check_nothing_held(engine)
        with pytest.raises(NeverFits, match="can never fit"):
            engine.stage.check_size(10_000_000)
    await backend.close()


async def test_drafts_of_a_stopped_generation_are_taken_back_everywhere(checkpoint: Path) -> None:
    """Refused drafts and steps in flight behind a stop leave every stage with the same counts, on the host and on the device."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, stages="2", draft_depth=3)) as engine:
        session = await engine.create_session()
        async for _ in engine.generate(ids(30, 1), greedy(9), session=session):
            pass
        await engine._loop.wait_idle()
        memory = engine.memories[session]
        await memory.operations.settle()
        (follower,) = engine.stage.before
        assert isinstance(follower, LocalFollower)
        (held,) = follower._held.values()
        own, there = memory.counts.snapshot(), held.memory.counts.snapshot()
        assert (own.logical, own.committed) == (there.logical, there.committed) == (38, 38)
        assert int(memory.state[0]) == int(held.memory.state[0]) == 38
        held.memory.check_integrity()
        memory.check_integrity()
