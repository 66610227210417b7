"""Reused histories on a card: prompts that continue, leave and share them, forks and cuts. Run with `-m gpu`."""

import asyncio
from pathlib import Path

import pytest

from engine.engine import Engine
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import Run, greedy
from tests.engine.test_engine_exactness import NAME, TOP_K, ids
from tests.engine.test_engine_on_device import TOLERANCE, card

pytestmark = pytest.mark.gpu

both = pytest.mark.parametrize("placement", ["offload", "resident"])
CUTS = [64, 65, 100, 128, 150, 158]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


async def said(engine: Engine, prompt: list[int], tokens: int = 10, **more: object) -> tuple[Run, int]:
    got, cached = Run(context=list(prompt)), 0
    async for chunk in engine.generate(prompt, greedy(tokens), **more):  # type: ignore[arg-type]
        got.tokens.extend(chunk.token_ids)
        got.logits.extend(chunk.logits)
        cached = chunk.usage.cached_tokens
    got.context += got.tokens
    await engine._loop.wait_idle()
    return got, cached


def alike(got: Run, wanted: Run) -> None:
    assert got.tokens == wanted.tokens
    worst = max(float((mine - theirs).abs().max()) for mine, theirs in zip(got.logits, wanted.logits, strict=True))
    assert worst <= TOLERANCE


@both
async def test_hits_say_what_fresh_runs_say(checkpoint: Path, placement: str) -> None:
    """Prompts that continue a stored history, leave it anywhere, and share one that decodes, say what an engine says that stores none."""
    config = card(placement=placement, hot_rows=TOP_K, decode_batch_limit=4, prefix_cache="on")
    async with (
        Engine.open(checkpoint, config) as engine,
        Engine.open(checkpoint, card(placement=placement, hot_rows=TOP_K)) as plain,
    ):
        assert engine.statistics().stored == 0, "what warmed the engine is stored"
        first, _ = await said(engine, ids(150, 1))
        for kept in reversed(CUTS):  # each leaves the history further back
            prompt = [*first.context[:kept], *ids(30, 40 + kept)]
            got, cached = await said(engine, prompt)
            assert cached >= kept - 3
            alike(got, (await said(plain, prompt))[0])
        prompts = [[*ids(150, 1), *ids(5 + number, number)] for number in range(3)]
        for (got, cached), prompt in zip(await asyncio.gather(*(said(engine, prompt) for prompt in prompts)), prompts, strict=True):
            assert cached > 0
            alike(got, (await said(plain, prompt))[0])


@both
async def test_forks_and_cuts_go_on_as_fresh_ones(checkpoint: Path, placement: str) -> None:
    """A fork and a cut at every kind of place say what a prompt of the same tokens says; at rest in between, too."""
    async with Engine.open(checkpoint, card(placement=placement, hot_rows=TOP_K, prefix_cache="on")) as engine:
        for kept in CUTS:
            session = await engine.create_session()
            await said(engine, ids(150, kept), session=session)
            held = list(engine.sessions[session].token_ids)
            fork = await engine.fork_session(session, kept)
            await engine.truncate_session(session, kept)
            memory = engine._sessions[fork].memory
            assert memory is not None
            await memory.operations.settle()
            engine.stage.placement.rest(memory)
            wanted, cached = await said(engine, [*held[:kept], *ids(5, 2)], namespace="nobody else")
            assert cached == 0
            for each in (session, fork):
                alike((await said(engine, ids(5, 2), session=each))[0], wanted)
                await engine.close_session(each)
