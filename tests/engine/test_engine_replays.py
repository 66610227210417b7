"""Steps that are replays of one recording: the same bits as steps issued anew, whoever comes, stops or leaves between them."""

import asyncio
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.sampling import Sampling
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import Run, collect, run, small
from tests.engine.test_engine_exactness import HOT, NAME, TOP_K, ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.mark.parametrize(
    ("rows", "placement"),
    [
        ("q8g64", "offload"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("f32", "offload"), ("f32", "resident"), ("q8g64", "resident"))),
    ],
)
async def test_replays_are_steps(checkpoint: Path, placement: str, rows: str) -> None:
    """Turns across ring, blocks and hot cache give the bits of steps issued anew: no operation holds a host value of its first step."""
    turns = [(ids(60, 1), 5), (ids(1, 2), 140), (ids(63, 3), 1), (ids(130, 4), 70)]
    settings = {"placement": placement, "row_format": rows, "hot_rows": TOP_K}
    anew = await run(checkpoint, small(**settings), turns)
    replayed = await run(checkpoint, small(**settings, graphs="on"), turns)
    assert replayed.same_bits(anew)


@pytest.mark.slow
async def test_replays_with_company(checkpoint: Path) -> None:
    """Sessions that join, end and leave between replays of one recording, with penalties and seeds of their own, keep their bits."""
    turns = [[(ids(20 + 3 * number, number), 4 + 9 * (number % 3))] for number in range(5)]
    sampled = [Sampling(max_tokens=40, temperature=0.9, seed=number, frequency_penalty=0.5, keep_logits=True) for number in range(5)]

    async def all_of(graphs: str) -> list[Run]:
        async with Engine.open(checkpoint, small(row_format="q8g64", hot_rows=HOT, graphs=graphs)) as engine:
            plain = await asyncio.gather(*(collect(engine, one) for one in turns))
            return [*plain, *await asyncio.gather(*(collect(engine, one, with_) for one, with_ in zip(turns, sampled, strict=True)))]

    for number, (anew, replayed) in enumerate(zip(await all_of("off"), await all_of("on"), strict=True)):
        assert replayed.same_bits(anew), f"session {number}"


async def test_steps_are_recorded_at_all(checkpoint: Path) -> None:
    """With graphs on, every bucket that stepped twice is recorded; with graphs off, and on the CPU by default, none is."""
    for graphs, expected in (("on", True), ("off", False), ("auto", False)):
        async with Engine.open(checkpoint, small(graphs=graphs)) as engine:
            await collect(engine, [(ids(9, 1), 6)])
            steps = [bucket.step for bucket in engine._loop._batches._buckets.values()]
            assert steps
            assert all(step.recorded is expected for step in steps)
