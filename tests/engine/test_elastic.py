"""Hot caches that take what memory is to spare: the bits stay, nothing is read from RAM twice, and who waits gets the memory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

import engine.placing
import engine.stage
from engine.config import EngineConfig
from engine.engine import Engine
from kernels.layout import BlockLayout
from memory.needs import hot_bytes
from memory.placement import Offload
from memory.session import SessionMemory
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import Run, collect, greedy, run, small
from tests.engine.test_engine_exactness import NAME, TOP_K, ids

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="card", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Device memory of engines opened from here on, to be set; usual hot caches hold one selection."""
    found = [1 << 26]
    monkeypatch.setattr(engine.stage, "device_budget", lambda device: found[0])
    monkeypatch.setattr(engine.placing, "HOT_ROWS", TOP_K)
    return found


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of sessions whose caches were shrunk."""
    found: list[str] = []
    inner = Offload.shrink

    def shrink(self: Offload, session: SessionMemory) -> bool:
        assert self.extra_bytes(session) > 0, "a session without anything to give was asked"
        done = inner(self, session)
        assert (self.extra_bytes(session) == 0) == done
        found.extend([session.session_id] * done)
        return done

    monkeypatch.setattr(Offload, "shrink", shrink)
    return found


def auto(device: str, **changes: object) -> EngineConfig:
    return small(**{"device": device, "dtype": "f32", "row_format": "q8g64", "hot_rows": 0, "decode_batch_limit": 4, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_a_row_is_read_from_ram_once_at_most(checkpoint: Path, budget: list[int], device: str) -> None:
    """With a slot for every row, turns that grow the session give the resident's bits; misses are no more than rows and groups."""
    turns = [(ids(150, 1), 20), (ids(40, 2), 120), (ids(3, 3), 40)]
    elastic = await run(checkpoint, auto(device), turns)
    usual = await run(checkpoint, auto(device, hot_rows=TOP_K), turns)
    assert elastic.same_bits(await run(checkpoint, auto(device, placement="resident"), turns))
    assert elastic.same_bits(usual)
    assert elastic.statistics is not None
    assert usual.statistics is not None
    groups, rows = 3, sum(len(prompt) + tokens for prompt, tokens in turns)
    assert 0 < elastic.statistics.misses <= groups * rows < usual.statistics.misses


async def _scarce(checkpoint: Path, config: EngineConfig, long: int, short: int) -> int:
    """A budget in which a session of `long` tokens gets a slot a row, one of `short` fits beside, and another does not."""
    async with Engine.open(checkpoint, config) as opened:
        stage = opened.stage
        layout: BlockLayout = stage.layout
        needs, small_needs = (stage.placement.needs(tokens).device_bytes for tokens in (long, short))
        whole = hot_bytes(layout, 1 << 20, TOP_K, long)
        assert whole > small_needs, "the first one's extra would not be enough for another"
        assert needs + 4096 < 2 * small_needs, "two would fit beside the first"
        return stage.placement.statistics().append_ring_bytes + needs + whole + needs + 4096


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_who_waits_gets_what_others_have_beyond_the_usual(
    checkpoint: Path, budget: list[int], shrunk: list[str], device: str
) -> None:  # fmt: skip
    """A third session is admitted while the first goes on decoding, which it does in usual caches, and all say what they say alone."""
    config = auto(device, context_max=1200)
    long, short = [(ids(900, 1), 100)], [(ids(60, 3), 8)]
    alone = [await run(checkpoint, config, turns) for turns in (long, short)]
    budget[0] = await _scarce(checkpoint, config, 1000, 68)
    ended: list[str] = []

    async def told(opened: Engine, name: str, turns: Sequence[tuple[Sequence[int], int]]) -> Run:
        found = await collect(opened, turns)
        ended.append(name)
        return found

    async with Engine.open(checkpoint, config) as opened:
        first = asyncio.ensure_future(told(opened, "first", long))
        while not opened._loop.decoding:  # noqa: ASYNC110 - turns of the loop, no wait
            await asyncio.sleep(0)
        held = await opened.create_session()  # keeps the memory of the second beside the first
        await opened.generate(ids(60, 2), greedy(8), session=held).complete()
        third = asyncio.ensure_future(told(opened, "third", short))
        runs = [await first, await third]
        await opened.close_session(held)
    assert shrunk, "nobody had to give anything"
    assert ended == ["third", "first"], "the third had to wait for the first to end"
    assert runs[0].same_bits(alone[0])
    assert runs[1].same_bits(alone[1])


@pytest.mark.parametrize("device", DEVICES)
async def test_a_long_prompt_gives_up_its_extra_between_chunks(
    checkpoint: Path, budget: list[int], shrunk: list[str], device: str
) -> None:  # fmt: skip
    """A short prompt that comes while a long one is read has its first token before that, as it has with caches of the usual size."""
    config = auto(device, context_max=1200)
    budget[0] = await _scarce(checkpoint, config, 1000, 68)
    came: list[str] = []
    async with Engine.open(checkpoint, config) as opened:

        async def told(name: str, prompt: list[int]) -> None:
            async for _ in opened.generate(prompt, greedy(5)):
                came.extend([name] * (name not in came))

        held = await opened.create_session()
        async with asyncio.TaskGroup() as group:
            group.create_task(told("long", ids(990, 1)))
            while not opened._loop.appending:  # noqa: ASYNC110 - turns of the loop, no wait
                await asyncio.sleep(0)
            group.create_task(opened.generate(ids(60, 2), greedy(2), session=held).complete())
            group.create_task(told("short", ids(60, 3)))
    assert shrunk, "nobody had to give anything"
    assert came == ["short", "long"]


@pytest.mark.parametrize("way", ["fork", pytest.param("import", marks=pytest.mark.slow)])
async def test_sessions_that_callers_make_get_it_too(
    checkpoint: Path, budget: list[int], shrunk: list[str], way: str, tmp_path: Path
) -> None:  # fmt: skip
    """A fork, and a session from an archive, have the memory that a running one has beyond the usual: that one goes on, and both say what
    they say alone."""
    config = auto("cpu", context_max=1200)
    long, turns = [(ids(900, 1), 100)], [(ids(60, 2), 8), (ids(3, 3), 5)]
    alone = [await run(checkpoint, config, each) for each in (long, turns)]
    budget[0] = await _scarce(checkpoint, config, 1000, 68)
    async with Engine.open(checkpoint, config) as opened:
        first = asyncio.ensure_future(collect(opened, long))
        while not opened._loop.decoding:  # noqa: ASYNC110 - turns of the loop, no wait
            await asyncio.sleep(0)
        held = await opened.create_session()
        told = [*(await opened.generate(ids(60, 2), greedy(8), session=held).complete()).token_ids]
        if way == "fork":
            made = await opened.fork_session(held)
        else:
            await opened.export_session(held, tmp_path / "held")
            made = await opened.import_session(tmp_path / "held")
        assert shrunk, "nobody had to give anything"
        assert not first.done(), "the running session ended first"
        await opened.close_session(held)
        told += (await opened.generate(ids(3, 3), greedy(5), session=made).complete()).token_ids
        assert (await first).same_bits(alone[0])
    assert told == alone[1].tokens


async def test_who_waits_for_it_goes_on_when_nobody_is_left_who_has_it(
    checkpoint: Path, budget: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A fork that waits for what a running session has beyond the usual has its memory when that one ends, be it that nothing shrank."""
    monkeypatch.setattr(Offload, "shrink", lambda self, session: False)
    config = auto("cpu", context_max=1200)
    budget[0] = await _scarce(checkpoint, config, 1000, 68)
    async with Engine.open(checkpoint, config) as opened:
        long = opened.generate(ids(900, 1), greedy(100))
        await anext(long)
        held = await opened.create_session()
        await opened.generate(ids(60, 2), greedy(8), session=held).complete()
        forked = asyncio.ensure_future(opened.fork_session(held))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not forked.done()
        await long.aclose()
        assert await forked in opened.sessions
