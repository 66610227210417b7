"""Bits that must be equal: offload and resident, any company, any hot cache, several turns."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.sampling import Sampling
from kernels.layout import StateField
from tests.engine.company import check_company, guests
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import Run, collect, run, small

NAME = "shared"
TOP_K = int(named(NAME).config["index_topk"])
HOT = 2 * TOP_K
# Histories at every boundary: of blocks, of the hot cache, of top-k.
LENGTHS = sorted({1, TOP_K - 1, TOP_K, TOP_K + 1, HOT - 1, HOT, HOT + 1, 3 * HOT, 63, 64, 65, 127, 128, 129})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def ids(count: int, seed: int) -> list[int]:
    vocabulary = int(named(NAME).config["vocab_size"])
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


async def both(checkpoint: Path, turns: list[tuple[list[int], int]], **settings: object) -> tuple[Run, Run]:
    offload = await run(checkpoint, small(placement="offload", **settings), turns)
    resident = await run(checkpoint, small(placement="resident", **settings), turns)
    return offload, resident


@pytest.mark.parametrize("rows", ["f32", pytest.param("bf16", marks=pytest.mark.slow), "q8g64"])
@pytest.mark.parametrize("hot", [TOP_K, pytest.param(HOT, marks=pytest.mark.slow)])
async def test_offload_is_resident_to_the_bit(checkpoint: Path, rows: str, hot: int) -> None:
    """Tokens and logits are equal for histories across every boundary, down to a hot cache of exactly top-k rows."""
    missed = 0
    for length in LENGTHS:
        offload, resident = await both(checkpoint, [(ids(length, length), 6)], row_format=rows, hot_rows=hot)
        assert offload.same_bits(resident), f"{rows} rows, history {length}, hot cache {hot}"
        assert offload.statistics is not None
        missed += offload.statistics.misses
    assert missed > 0, "nothing was ever read from RAM: the comparison proves nothing"


@pytest.mark.parametrize("rows", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in ("f32", "bf16")), "q8g64"])
async def test_turns_in_one_session_stay_equal(checkpoint: Path, rows: str) -> None:
    """Several turns that end inside, at and past block boundaries give equal bits in both placements."""
    turns = [(ids(60, 1), 5), (ids(1, 2), 66), (ids(63, 3), 1), (ids(130, 4), 70), (ids(7, 5), 3)]
    offload, resident = await both(checkpoint, turns, row_format=rows, hot_rows=TOP_K)
    assert offload.same_bits(resident)


@pytest.mark.parametrize("steps", [140, pytest.param(330, marks=pytest.mark.slow)])
async def test_long_decode_stays_equal(checkpoint: Path, steps: int) -> None:
    """Decode steps through copyback and eviction, the long ones past the whole ring, give equal bits."""
    offload, resident = await both(checkpoint, [(ids(10, 8), steps)], row_format="q8g64", hot_rows=TOP_K)
    assert offload.same_bits(resident)
    assert offload.statistics is not None
    assert offload.statistics.mirrored_rows >= steps - 74


@pytest.mark.parametrize("sessions", [2, 3, 4, 8, pytest.param(16, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)])
async def test_company_changes_no_bit(checkpoint: Path, sessions: int) -> None:
    """A session's logits do not depend on how many others decode beside it."""
    turns = [[(ids(20 + 3 * number, number), 6)] for number in range(sessions)]
    config = small(row_format="q8g64", hot_rows=TOP_K, decode_batch_limit=64)
    async with Engine.open(checkpoint, config) as engine:
        together = await asyncio.gather(*(collect(engine, one) for one in turns))
        steps = engine.statistics().steps
        checked = range(0, sessions, max(1, sessions // 4))
        alone = {number: await collect(engine, turns[number]) for number in checked}
    assert steps < sessions * 6, "the sessions never shared a step"
    for number in checked:
        assert together[number].same_bits(alone[number]), f"session {number} of {sessions}"


@pytest.mark.parametrize("limit", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)])
async def test_joining_and_leaving_changes_no_bit(checkpoint: Path, seed: int, limit: int) -> None:
    """Requests join and leave at random, more than a step holds, urgent or not, greedy or not, prompts read beside steps: each gives the
    tokens and logits that it gives alone."""
    made = guests(seed, 7, int(named(NAME).config["vocab_size"]), rows_max=200, tokens_max=12)
    config = small(row_format="q8g64", hot_rows=TOP_K, decode_batch_limit=limit, append_chunk_rows=64, prefix_cache="off")
    async with Engine.open(checkpoint, config) as engine:
        await check_company(engine, made)


async def test_a_stop_in_flight_is_rolled_back(checkpoint: Path) -> None:
    """A generation ended by a stop token, with its next step in flight, leaves exactly the rows a fresh session would have."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        plain = await collect(engine, [(ids(30, 1), 20), (ids(9, 2), 12)])
        stop = plain.tokens[9]
        first = plain.tokens.index(stop)
        session = await engine.create_session()
        got: list[int] = []
        sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
        async for chunk in engine.generate(ids(30, 1), sampling, session=session):
            got.extend(chunk.token_ids)
        assert got == plain.tokens[: first + 1]
        held = engine._sessions[session].memory
        assert held is not None
        await engine._loop.wait_idle()
        # The stop token itself has no row; the step that fed it was rolled back, on the host and on the device.
        assert held.counts.logical == held.counts.committed == 30 + first
        await held.operations.settle()
        assert int(held.state[StateField.LOGICAL]) == 30 + first
        # The rest of the first turn is now prompt: whatever rows the cut left must be the ones a single prompt would make.
        rest = [*plain.tokens[first + 1 : 20], *ids(9, 2)]
        after: list[int] = []
        async for chunk in engine.generate(rest, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True), session=session):
            after.extend(chunk.token_ids)
        assert after == plain.tokens[20:]
