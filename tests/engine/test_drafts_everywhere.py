"""Every depth of drafts in every configuration of the parity tests, in both regimes of the MTP block's selection: tokens are depth 0's."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.sampling import Sampling
from tests.engine.model.parity import configurations, make_checkpoint, named
from tests.engine.runs import small

DEPTHS = range(1, 8)
SEEDS = int(os.environ.get("DRAFT_SEEDS", "3"))  # 20 is the long form, in both regimes: DRAFT_SEEDS=20
REGIMES = (True, False)
TOKENS = 12


@pytest.fixture(
    scope="module",
    params=[
        (each.name, shares)
        for place, each in enumerate(configurations())
        for shares in (REGIMES if SEEDS >= 20 else REGIMES[place % 2 :][:1])
    ],
    ids=str,
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A configuration's checkpoint whose drafts share one selection, or select anew, and its name."""
    name, shares = request.param
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), name)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"index_share_for_mtp_iteration": shares}))
    return directory, name


async def texts(model: Path, name: str, depth: int, asked: list[tuple[list[int], Sampling]]) -> tuple[list[tuple[int, ...]], int]:
    """What one engine of this depth says to all of them, asked together, and how many drafts it made."""
    chosen = named(name)
    config = small(
        draft_depth=depth,
        row_format=chosen.rows,
        index_key_format=chosen.keys,
        hot_rows=int(chosen.config["index_topk"]),
        decode_batch_limit=8,
    )
    async with Engine.open(model, config) as engine:
        found = await asyncio.gather(*(engine.generate(prompt, sampling).complete() for prompt, sampling in asked))
        return [one.token_ids for one in found], engine.statistics().drafts_proposed[0]


def prompt(seed: int, vocabulary: int) -> list[int]:
    return [(7 * seed + 13 * place) % vocabulary for place in range(20 + 3 * seed)]


@pytest.mark.slow
async def test_all_depths_say_what_depth_0_says(checkpoint: tuple[Path, str]) -> None:
    """Greedily at each depth from 1 to 7, and drawn at temperatures 0.7 and 1.0 for 20 seeds whose depths turn, in company."""
    model, name = checkpoint
    vocabulary = int(named(name).config["vocab_size"])
    asked: list[tuple[list[int], Sampling]] = []
    for depth in DEPTHS:
        asked.append((prompt(1, vocabulary), Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, draft_depth=depth)))
    for temperature in (0.7, 1.0):
        for seed in range(SEEDS):
            sampling = Sampling(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True, draft_depth=1 + seed % 7)
            asked.append((prompt(seed, vocabulary), sampling))
    drafted, made = await texts(model, name, 7, asked)
    plain, none = await texts(model, name, 0, asked)
    assert (made > 0, none) == (True, 0)
    assert drafted == plain
    assert len(set(plain)) > SEEDS // 2, "all say the same: the comparison proves little"
