"""The whole engine on a card: offload and resident, replays and steps issued anew, any company, and the CPU's tokens. Run with `-m gpu`."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling import Sampling
from kernels.layout import BLOCK_ROWS
from kernels.quantize import stored_keys
from tests.engine.company import check_company, guests
from tests.engine.model.parity import configurations, make_checkpoint, named, prompt_ids, transformers_logits
from tests.engine.runs import Run, collect, greedy, run, small
from tests.engine.test_engine_exactness import HOT, LENGTHS, NAME, TOP_K, ids

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3  # of float32 forward passes on two devices, on logits of size 10
ROUNDED = (
    0.1  # 1% of logits of size 10: a step of int8 is at most 1/127 of a group's largest value, and a few rows are rounded the other way
)
MANY_STEPS = 10_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {each.name: make_checkpoint(directory, each.name) for each in configurations()}


def card(**changes: object) -> EngineConfig:
    """Few sessions at once unless asked for more: an engine warms every batch size it may step."""
    return small(**{"device": "cuda", "dtype": "f32", "decode_batch_limit": 1, **changes})


@pytest.mark.parametrize("name", [each.name for each in configurations()])
async def test_card_agrees_with_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Logits in float32 (TF32 off) of an appended prompt and of replayed steps lie within 1e-3 of transformers' on the CPU.

    Where rows are rounded, a value that the card's products put on the other side of a boundary differs by a whole step of its format. Of a
    key in e4m3 that step is an eighth of the value, and another row is chosen: there the prompt is as long as a selection, which then has
    every row, and the keys are compared by themselves, below.
    """
    chosen = named(name)
    prompt = prompt_ids(chosen).tolist()
    if chosen.keys == "e4m3":
        prompt = prompt[: int(chosen.config["index_topk"])]
    tokens = 24 if chosen.rows == "f32" else 1
    result = await run(checkpoints[name], card(row_format=chosen.rows, index_key_format=chosen.keys), [(prompt, tokens)])
    expected = transformers_logits(checkpoints[name], torch.tensor(result.context[:-1]), chosen.rows, chosen.keys)[len(prompt) - 1 :]
    worst = max(float((got - want).abs().max()) for got, want in zip(result.logits, expected, strict=True))
    assert worst <= (TOLERANCE if chosen.rows == "f32" else ROUNDED), f"largest logit difference {worst}"


async def test_keys_of_one_byte_are_those_of_the_cpu(checkpoints: dict[str, Path]) -> None:
    """Of the first layer, which nothing is rounded before: codes are equal but for one in a hundred, which is the next one up or down."""
    chosen = named("q8g64 rows, e4m3 keys")
    prompt = prompt_ids(chosen).tolist()
    settings = {"row_format": chosen.rows, "index_key_format": chosen.keys}
    codes, scales = zip(
        *[await first_keys(checkpoints[chosen.name], config, prompt) for config in (small(**settings), card(**settings))], strict=True
    )
    assert torch.allclose(scales[1], scales[0], rtol=1e-5, atol=0)
    steps = (rank_of(codes[1]) - rank_of(codes[0])).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) < 0.01


async def first_keys(model: Path, config: EngineConfig, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 [rows, Di], and scales, f32 [rows, 1], of the keys that the first layer stored of a prompt of one block and more."""
    async with Engine.open(model, config) as engine:
        session = await engine.create_session()
        async for _ in engine.generate(prompt, greedy(1), session=session):
            pass
        await engine.stage.idle()
        layout = engine.stage.layout
        start = layout.key_offset(0)
        block = next(iter(engine.memories.values())).device_block(len(prompt) // BLOCK_ROWS).cpu()
        keys = stored_keys(block[start : start + layout.key_layer_bytes], layout.key)[: len(prompt) % BLOCK_ROWS]
    return keys[:, : layout.key.width], keys[:, layout.key.values_bytes :].contiguous().view(torch.float32)


def rank_of(codes: torch.Tensor) -> torch.Tensor:
    """Where a code of e4m3 stands among all of them by value."""
    magnitude = (codes & 0x7F).int()
    return torch.where(codes > 0x7F, -magnitude, magnitude)


@pytest.mark.parametrize(("rows", "keys"), [("f32", "auto"), ("q8g64", "auto"), ("q8g64", "e4m3")])
@pytest.mark.parametrize("hot", [TOP_K, HOT])
async def test_offload_is_resident(checkpoints: dict[str, Path], rows: str, keys: str, hot: int) -> None:
    """Tokens and logits are equal to the bit for histories across every boundary, replayed or issued anew."""
    missed = 0
    for length in LENGTHS:
        turns = [(ids(length, length), 6), (ids(3, 1), 70)]
        runs = [
            await run(
                checkpoints[NAME],
                card(placement=placement, row_format=rows, index_key_format=keys, hot_rows=hot, graphs=graphs),
                turns,
            )
            for placement, graphs in (("resident", "off"), ("offload", "on"), ("offload", "off"))
        ]
        for other in runs[1:]:
            assert other.same_bits(runs[0]), f"{rows} rows, {keys} keys, history {length}, hot cache {hot}"
        assert runs[1].statistics is not None
        missed += runs[1].statistics.misses
    assert missed > 0, "nothing was ever read from RAM: the comparison proves nothing"


@pytest.mark.parametrize("sessions", [2, 3, 4, 8, 16, 64])
async def test_company_changes_no_bit(checkpoints: dict[str, Path], sessions: int) -> None:
    """A session's logits do not depend on how many others decode beside it, nor on padding."""
    turns = [[(ids(20 + 3 * number, number), 6)] for number in range(sessions)]
    config = card(row_format="q8g64", hot_rows=TOP_K, decode_batch_limit=64, host_memory_bytes=256 << 20)
    async with Engine.open(checkpoints[NAME], config) as engine:
        before = engine.statistics().steps
        together = await asyncio.gather(*(collect(engine, one) for one in turns))
        assert engine.statistics().steps - before < sessions * 6, "the sessions never shared a step"
        for number in range(0, sessions, max(1, sessions // 4)):
            assert together[number].same_bits(await collect(engine, turns[number])), f"session {number} of {sessions}"


@pytest.mark.parametrize("limit", [3, 8])
@pytest.mark.parametrize("seed", range(4))
async def test_joining_and_leaving_changes_no_bit(checkpoints: dict[str, Path], seed: int, limit: int) -> None:
    """Requests join and leave at random, more than a step holds or fewer, prompts read beside replayed steps: each gives the tokens and
    logits that it gives alone."""
    made = guests(seed, 16, int(named(NAME).config["vocab_size"]), rows_max=700, tokens_max=40)
    config = card(row_format="q8g64", hot_rows=TOP_K, decode_batch_limit=limit, append_chunk_rows=64, host_memory_bytes=256 << 20)
    async with Engine.open(checkpoints[NAME], config) as engine:
        await check_company(engine, made)


async def test_sampled_tokens_are_the_cpus(checkpoints: dict[str, Path]) -> None:
    """Seeded sampling with penalties gives the CPU's tokens: noise and filters are one definition (float32 logits differ by 1e-5)."""
    sampling = Sampling(max_tokens=40, temperature=0.8, top_p=0.95, top_k=40, seed=3, repetition_penalty=1.1, ignore_eos=True)
    turns = [(ids(70, 5), 40)]
    here = await run(checkpoints[NAME], card(), turns, sampling)
    assert here.tokens == (await run(checkpoints[NAME], small(), turns, sampling)).tokens


@pytest.mark.slow
async def test_ten_thousand_replays_mirror_what_resident_holds(tmp_path: Path) -> None:
    """After 10,000 replayed steps every mirrored row and key of the offloaded session equals the resident one's, to the byte."""
    checkpoint = make_checkpoint(tmp_path, NAME)
    config_file = checkpoint / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"max_position_embeddings": 2 * MANY_STEPS}))
    contents = []
    for placement in ("offload", "resident"):
        config = card(placement=placement, row_format="q8g64", hot_rows=HOT, host_memory_bytes=256 << 20)
        async with Engine.open(checkpoint, config) as engine:
            session = await engine.create_session()
            kept: list[int] = []
            sampling = Sampling(max_tokens=MANY_STEPS, temperature=0.0, ignore_eos=True)
            async for chunk in engine.generate(ids(100, 9), sampling, session=session):
                kept.extend(chunk.token_ids)
            memory = engine._sessions[session].memory
            assert memory is not None
            await engine._loop.wait_idle()
            await memory.operations.settle()
            blocks = torch.stack([memory.history.view(block).cpu() for block in range(memory.counts.committed // 64)])
            contents.append((kept, blocks))
    assert len(contents[0][0]) == MANY_STEPS
    assert contents[0][0] == contents[1][0]
    assert torch.equal(contents[0][1], contents[1][1])


async def test_eager_company_of_appends(checkpoints: dict[str, Path]) -> None:
    """A long prompt appended in chunks beside decoding sessions changes nobody's bits."""
    config = card(row_format="q8g64", hot_rows=TOP_K, append_chunk_rows=64, decode_batch_limit=4)

    async def talk(engine: Engine, number: int, rows: int, tokens: int) -> Run:
        return await collect(engine, [(ids(rows, number), tokens)], greedy(tokens))

    async with Engine.open(checkpoints[NAME], config) as engine:
        together = await asyncio.gather(talk(engine, 1, 30, 60), talk(engine, 2, 700, 8), talk(engine, 3, 90, 40))
        alone = [await talk(engine, 1, 30, 60), await talk(engine, 2, 700, 8), await talk(engine, 3, 90, 40)]
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.same_bits(other), f"session {number}"


async def test_a_longer_history_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a long prompt run on the kernels of those before: one made anew would hold every stream up for a quarter of a second."""
    from triton import knobs

    checkpoint = make_checkpoint(tmp_path, NAME)
    config_file = checkpoint / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"max_position_embeddings": 1 << 16}))
    compiled: list[object] = []

    def note(*_: object, **named: object) -> None:
        compiled.append(named.get("repr"))

    config = card(row_format="q8g64", hot_rows=HOT, append_chunk_rows=2048, host_memory_bytes=256 << 20)
    async with Engine.open(checkpoint, config) as engine:
        session = await engine.create_session()
        await engine.generate(ids(20_000, 1), greedy(2), session=session).complete()
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
        await engine.generate(ids(10_240, 2), greedy(1), session=session).complete()  # its token is the append's: no step's bucket is new
    assert compiled == [], f"kernels made anew: {compiled}"
