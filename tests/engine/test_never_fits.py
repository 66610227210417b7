"""What is larger than all memory there is: refused at once with the numbers, whoever runs; what fits later waits."""

import asyncio
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import NeverFits
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import greedy, small

LIMIT_S = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


async def test_more_than_the_whole_arena_is_refused_while_a_smaller_request_waits(checkpoint: Path) -> None:
    """The refusal names the tokens and the missing bytes of host memory; a request that fits when the running one has ended is served."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16)) as engine:
        arena = engine.stage.arena.statistics()
        fits = arena.blocks * 64 - 80
        running = engine.generate([1] * fits, greedy(20))
        await anext(running)
        waiting = asyncio.ensure_future(engine.generate([2] * fits, greedy(2)).complete())
        tokens = arena.blocks * 64 + 1
        missing = engine.stage.placement.needs(tokens).host_bytes - arena.blocks * arena.block_bytes
        assert missing > 0
        with pytest.raises(NeverFits, match=f"a context of {tokens} tokens can never fit: {missing} bytes of host memory missing"):
            await anext(engine.generate([1] * (tokens - 1), greedy(1)))
        await running.aclose()
        assert len((await asyncio.wait_for(waiting, LIMIT_S)).token_ids) == 2


@pytest.mark.parametrize("placement", ["offload", "resident"])
async def test_more_than_the_whole_device_is_refused(checkpoint: Path, placement: str) -> None:
    """Where the device is too small the line says so; what leaves it just enough is served."""
    async with Engine.open(checkpoint, small(hot_rows=16, placement=placement)) as engine:
        held = engine.stage.pool.statistics().allocated_bytes
        engine.stage.pool._budget_bytes = held + engine.stage.placement.needs(300).device_bytes
        with pytest.raises(NeverFits, match=r"a context of 3000 tokens can never fit: \d+ bytes of device memory missing"):
            await anext(engine.generate([1] * 2999, greedy(1)))
        assert len((await engine.generate([1] * 200, greedy(2)).complete()).token_ids) == 2


async def test_an_archive_that_can_never_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A session of more tokens than the whole arena has rows is not restored by a smaller engine, which holds nothing afterwards."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        session = await engine.create_session()
        await engine.generate([1] * 200, greedy(1), session=session).complete()
        await engine.export_session(session, tmp_path / "a")
        block_bytes = engine.stage.layout.block_bytes
    async with Engine.open(checkpoint, small(hot_rows=16, host_memory_bytes=2 * block_bytes)) as engine:
        with pytest.raises(NeverFits, match="a context of 201 tokens can never fit"):
            await engine.import_session(tmp_path / "a")
        assert not engine.sessions
        assert engine.stage.arena.statistics().references == 0
