"""Made-up histories: the same bytes whatever the placement and the chunks, true counts, and equal answers behind them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest
from engine.protocol import SyntheticHistory
from engine.sampling import Sampling
from engine.synthetic import tokens_of, values
from kernels.quantize import unpack_rows
from memory.barrier import barrier, verify_mirror
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import small

PROMPT = [3, 14, 15, 9, 26]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with an MTP block."""
    config = tiny_config()
    return write_checkpoint(random_tensors(config, 5), config, tmp_path_factory.mktemp("tiny"))


async def answer(model: Path, config: EngineConfig, history: SyntheticHistory | None, tokens: int = 6) -> list[int]:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with Engine.open(model, config) as engine:
        generation = engine.generate(PROMPT, sampling, history=history)
        chunks = [chunk async for chunk in generation]
        assert chunks[-1].usage.cached_tokens == (0 if history is None else history.rows)
        assert engine.statistics().sessions == 0
        return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 129, 300])
async def test_both_placements_answer_alike(model: Path, rows: int) -> None:
    """Behind the same made-up history offload and resident give the same tokens, also with few hot slots and other chunks."""
    history = SyntheticHistory(7, rows)
    offload = await answer(model, small(hot_rows=16), history)
    assert offload == await answer(model, small(placement="resident"), history)
    assert offload == await answer(model, small(hot_rows=16, append_chunk_rows=17), history)
    assert len(offload) == 6


async def test_the_history_is_read(model: Path) -> None:
    """Another seed, another length or no history gives another answer: the rows matter."""
    found = [await answer(model, small(), history, 12) for history in (SyntheticHistory(7, 200), SyntheticHistory(8, 200), None)]
    assert found[0] != found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("placement", ["offload", "resident"])
@pytest.mark.parametrize("chunk_rows", [17, 64])
async def test_what_is_written_is_what_was_drawn(model: Path, placement: str, chunk_rows: int) -> None:
    """Every row of every layer unpacks to the drawn values, the MTP block's row 0 to zero; counts are exact and the barrier passes."""
    config = small(placement=placement, append_chunk_rows=chunk_rows)
    async with Engine.open(model, config) as engine:
        stage, history = engine._stage, SyntheticHistory(2**40 + 3, 150)
        generation = engine.generate(PROMPT, Sampling(max_tokens=400, temperature=0.0, ignore_eos=True), history=history)
        await anext(generation)
        [request] = engine._loop.decoding
        memory = request.session.memory
        assert memory is not None
        request.session.temporary = False  # so that its memory outlives the request
        await generation.aclose()
        await memory.operations.settle()
        rows = memory.counts.logical
        assert rows >= history.rows + len(PROMPT)
        assert memory.counts.committed == rows
        assert await barrier(memory, stage.copyback) == rows
        verify_mirror(memory, stage.layout)
        memory.check_integrity()
        positions = torch.arange(history.rows)
        for layer in range(stage.layout.layers):
            expected = values(history.seed, 3 * layer, positions, stage.layout.row.latent)
            if layer == stage.mtp_layer:
                expected[0] = 0.0
            for block in range(-(-history.rows // 64)):
                held = memory.mirror_block(block)[stage.layout.row_offset(layer) :][: stage.layout.layer_bytes]
                count = min(64, history.rows - 64 * block)
                latent, _ = unpack_rows(held.view(64, -1)[:count], stage.layout.row)
                assert torch.equal(latent, expected[64 * block : 64 * block + count])
        stage_session = request.session
        engine._loop.drop_memory(stage_session)


def test_values_depend_on_everything_named() -> None:
    """Seed (also its upper half), stream, position and column each change the values; a slice of positions gives a slice of values."""
    positions = torch.tensor([0, 1, 63, 64, 2**31, 2**33 + 1])
    found = values(0, 0, positions, 65)
    assert torch.equal(values(0, 0, positions[2:4], 65), found[2:4])
    assert torch.equal(values(0, 0, positions, 64), found[:, :64])
    for other in (values(1, 0, positions, 65), values(1 << 32, 0, positions, 65), values(0, 1, positions, 65)):
        assert (other != found).float().mean() > 0.99
    assert len(found.unique()) > 0.99 * found.numel()


class _Calls(TorchDispatchMode):
    """Counts what would be launches on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += 1
        return operation(*arguments, **(named or {}))


def test_many_streams_are_one_draw() -> None:
    """Drawing for many streams gives what each gives alone, with as few launches as for one, and leaves what it was given as it was."""
    streams, positions = torch.tensor([0, 3, 9, 2**20]), torch.tensor([5, 6, 2**33])
    each = torch.stack([values(7, int(stream), positions, 33) for stream in streams])
    with _Calls() as many:
        together = values(7, streams, positions, 33)
    with _Calls() as one:
        values(7, streams[:1], positions, 33)
    assert torch.equal(together, each)
    assert many.count == one.count - 1 < 100  # the slice is a call too
    assert (streams.tolist(), positions.tolist()) == ([0, 3, 9, 2**20], [5, 6, 2**33])


async def test_progress_counts_the_history_as_it_is_filled(model: Path) -> None:
    """While a made-up history is written its rows are counted as they come, and at the end all are done."""
    async with Engine.open(model, small(append_chunk_rows=16)) as engine:
        generation = engine.generate(PROMPT, Sampling(max_tokens=2, ignore_eos=True), history=SyntheticHistory(1, 200))
        await generation.prompt()
        seen = []
        first = asyncio.ensure_future(anext(generation))
        while not first.done():
            seen.append(generation.progress.rows_done)
            await asyncio.sleep(0)
        assert {16, 96, 192, 200} <= set(seen)
        assert seen.index(16) < seen.index(96) < seen.index(192) < seen.index(200)
        await first
        assert (generation.progress.rows_done, generation.progress.rows_total) == (205, 205)
        await generation.aclose()


def test_values_are_spread_evenly() -> None:
    """Over many values the mean is 0, the deviation 1, the range that of the uniform law, and rows are not alike."""
    found = values(11, 3, torch.arange(2_000), 128)
    assert abs(float(found.mean())) < 0.01
    assert abs(float(found.std()) - 1.0) < 0.01
    assert float(found.abs().max()) <= 3.0**0.5 + 1e-6
    products = (found[:-1] * found[1:]).mean(1)
    assert float(products.abs().max()) < 6 / 128**0.5


def test_tokens_are_drawn_from_the_vocabulary() -> None:
    """As many ids as rows, all inside the vocabulary, the same each time."""
    ids = tokens_of(SyntheticHistory(5, 1_000), 7)
    assert ids == tokens_of(SyntheticHistory(5, 1_000), 7)
    assert set(ids) == set(range(7))
    assert len(ids) == 1_000


@pytest.mark.parametrize(
    ("history", "prompt"),
    [
        (SyntheticHistory(0, 0), PROMPT), (SyntheticHistory(-1, 5), PROMPT), (SyntheticHistory(2**63, 5), PROMPT),
        (SyntheticHistory(0, 4096), PROMPT), (SyntheticHistory(0, 10**15), PROMPT), (SyntheticHistory(0, 4095), PROMPT),
        (SyntheticHistory(0, 5), []),
    ],
)  # fmt: skip
async def test_impossible_histories_are_refused(model: Path, history: SyntheticHistory, prompt: list[int]) -> None:
    """A history of no rows, a bad seed, more rows than the context, or no prompt behind it is a bad request before anything is drawn."""
    async with Engine.open(model, small()) as engine:
        with pytest.raises(BadRequest):
            await engine.generate(prompt, Sampling(max_tokens=1), history=history).prompt()


async def test_a_held_session_takes_one_if_it_has_no_tokens(model: Path) -> None:
    """A session that the caller made begins with made-up rows once, and gives the answer of one of a single request; then it keeps them."""
    history, sampling = SyntheticHistory(7, 129), Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    async with Engine.open(model, small(hot_rows=16)) as engine:
        session = await engine.create_session()
        assert session not in engine.memories
        found = await engine.generate(PROMPT, sampling, session=session, history=history).complete()
        assert (found.usage.cached_tokens, engine.sessions[session].rows) == (129, 129 + len(PROMPT) + 5)
        with pytest.raises(BadRequest, match="a session that has no tokens"):
            await engine.generate(PROMPT, sampling, session=session, history=history).prompt()
        assert len(engine.sessions[session].token_ids) == 129 + len(PROMPT) + 6
    assert list(found.token_ids) == await answer(model, small(hot_rows=16), history)


async def test_a_history_that_was_not_written_leaves_no_tokens(model: Path) -> None:
    """Refused before it is queued, or left while it is filled: the session has no token without a row."""
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with Engine.open(model, small(append_chunk_rows=16)) as engine:
        session = await engine.create_session()
        with pytest.raises(BadRequest):
            await engine.generate([], sampling, session=session, history=SyntheticHistory(1, 50)).prompt()
        assert len(engine.sessions[session].token_ids) == 0
        generation = engine.generate(PROMPT, sampling, session=session, history=SyntheticHistory(1, 3_000))
        await generation.prompt()
        while not engine.statistics().mirrored_rows:  # noqa: ASYNC110 - one look a turn of the loop
            await asyncio.sleep(0)
        await generation.aclose()
        view = engine.sessions[session]
        assert 0 < len(view.token_ids) == view.rows < 3_000


async def test_an_abort_while_filling_leaves_nothing(model: Path) -> None:
    """A request that is left while its history is written ends within a chunk, and another one then gets its answer."""
    async with Engine.open(model, small(append_chunk_rows=16)) as engine:
        generation = engine.generate(PROMPT, Sampling(max_tokens=4), history=SyntheticHistory(1, 3_000))
        await generation.prompt()
        while not engine.statistics().mirrored_rows:  # noqa: ASYNC110 - one look a turn of the loop
            await asyncio.sleep(0)
        await generation.aclose()
        after = await engine.generate(PROMPT, Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)).complete()
        assert len(after.token_ids) == 4
        assert engine.statistics().sessions == 0
