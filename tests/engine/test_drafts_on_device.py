"""Drafts on a card: any depth, placement and company, replayed or issued anew, give one text to the bit. Run with `-m gpu`."""

import asyncio
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling import Sampling
from tests.engine.acceptance import DEMO, demo, held_out_prompts
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import collect, run, small
from tests.engine.test_drafts import NAME, PENALTIES, TOP_K, ids, sampled
from tests.engine.test_drafts_demo import said

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def card(**changes: object) -> EngineConfig:
    return small(**{"device": "cuda", "dtype": "f32", "hot_rows": TOP_K, **changes})


@pytest.mark.parametrize("shares", [True, False], ids=["shared selection", "each selects"])
@pytest.mark.parametrize("depth", [1, 3, 7])
async def test_every_depth_gives_the_bits_of_depth_0(tmp_path: Path, depth: int, shares: bool) -> None:
    """Tokens and logits, drafts refused nearly always: rows of a step of many are rows of a step of one."""
    config = tiny_config(index_share_for_mtp_iteration=shares)
    model = write_checkpoint(random_tensors(config, named(NAME).seed), config, tmp_path / "model")
    turns = [(ids(150, 1), 60), (ids(3, 2), 30)]
    for sampling in (sampled(60, 0.0, 0), sampled(60, 0.9, 4, **PENALTIES)):
        plain = await run(model, card(row_format="q8g64"), turns, sampling)
        for placement, graphs in (("offload", "on"), ("offload", "off"), ("resident", "on")):
            changes = {"row_format": "q8g64", "draft_depth": depth, "placement": placement, "graphs": graphs}
            assert (await run(model, card(**changes), turns, sampling)).same_bits(plain), f"{placement}, graphs {graphs}"


async def test_company_of_mixed_depths(checkpoint: Path) -> None:
    """Sessions of depth 0, 1, 3 and 7 in one step say what each says alone without drafts."""
    depths = (0, 1, 3, 7)
    turns = [[(ids(40 + 30 * number, number), 40)] for number in range(len(depths))]
    alone = [await run(checkpoint, card(), one) for one in turns]
    async with Engine.open(checkpoint, card(draft_depth=7)) as engine:
        asked = [sampled(40, 0.0, 0, draft_depth=depth) for depth in depths]
        together = await asyncio.gather(*(collect(engine, one, how) for one, how in zip(turns, asked, strict=True)))
    assert all(one.same_bits(other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("depth", [1, 3, 7])
async def test_forced_runs_are_one(checkpoint: Path, depth: int) -> None:
    """With drafts accepted by (seed, position), hundreds of runs of every length: offload, resident and steps issued anew agree."""
    tokens = 1200 if depth == 7 else 400  # seven in a row are accepted in one step of some twenty
    turns, found = [(ids(100, 3), tokens)], []
    for placement, graphs in (("resident", "off"), ("offload", "on"), ("offload", "off")):
        config = card(placement=placement, graphs=graphs, draft_depth=depth, force_accept_rate=0.65, row_format="q8g64")
        async with Engine.open(checkpoint, config) as engine:
            result = await collect(engine, turns, sampled(tokens, 0.0, 9))
            statistics = engine.statistics()
            found.append((result, statistics.drafts_proposed, statistics.drafts_accepted))
    for result, proposed, accepted in found[1:]:
        assert result.same_bits(found[0][0])
        assert (proposed, accepted) == found[0][1:]
    assert found[0][2][depth - 1] > 10, "no run was ever accepted in full"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_the_demo_model(temperature: float) -> None:
    """Real acceptance in bfloat16: eight held-out prompts go on alike at depths 0, 3 and 7, in fewer steps."""
    for number, prompt in enumerate(held_out_prompts(8)):
        sampling = Sampling(max_tokens=256, temperature=temperature, seed=number, ignore_eos=True)
        plain, steps = await said(demo(0, device="cuda"), prompt, sampling)
        for depth in (3, 7):
            drafted, fewer = await said(demo(depth, device="cuda"), prompt, sampling)
            assert drafted == plain, f"prompt {number}, depth {depth}"
            assert fewer < steps


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(1, 8))
async def test_thirty_two_long_texts(depth: int) -> None:
    """32 held-out prompts with 1,024 tokens each, sixteen at a time, are those of depth 0."""
    prompts = held_out_prompts(32)

    async def all_of(config: EngineConfig) -> list[list[int]]:
        async with Engine.open(DEMO, config) as engine:

            async def one(prompt: list[int]) -> list[int]:
                sampling = Sampling(max_tokens=1024, temperature=0.0, ignore_eos=True)
                return [token async for chunk in engine.generate(prompt, sampling) for token in chunk.token_ids]

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    plain = await all_of(demo(0, device="cuda", decode_batch_limit=16))
    assert all(len(text) == 1024 for text in plain)
    assert await all_of(demo(depth, device="cuda", decode_batch_limit=16)) == plain
