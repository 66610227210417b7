"""Drafts change no token and no bit: any depth, any acceptance, any company, any end inside an accepted run."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import BadSetting
from engine.sampling import Sampling
from tests.engine.guesses import guess_right
from tests.engine.model.parity import configurations, make_checkpoint, named
from tests.engine.model.tiny_models import random_tensors, write_checkpoint
from tests.engine.runs import Run, collect, run, small

NAME = "shared"
VOCABULARY = int(named(NAME).config["vocab_size"])
TOP_K = int(named(NAME).config["index_topk"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def ids(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def sampled(tokens: int, temperature: float, seed: int, **more: object) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True, keep_logits=True, **more)  # type: ignore[arg-type]


def some(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7])
async def test_every_depth_gives_the_tokens_and_logits_of_depth_0(checkpoint: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns across blocks, drafts right for 0 to `depth` tokens: equal to the bit, in fewer steps."""
    turns = [(ids(61, 1), 40), (ids(2, 2), 9)]
    plain = await run(checkpoint, small(hot_rows=TOP_K), turns)
    rng = some(depth)
    made = guess_right(monkeypatch, [plain.context], lambda _, drafts: rng.choice((0, 1, drafts)), VOCABULARY)
    drafted = await run(checkpoint, small(hot_rows=TOP_K, draft_depth=depth), turns)
    assert drafted.same_bits(plain)
    assert 0 in made
    assert depth in made
    assert drafted.statistics is not None
    assert plain.statistics is not None
    assert drafted.statistics.steps < plain.statistics.steps


@pytest.mark.parametrize("name", [each.name for each in configurations() if each.name != NAME])
async def test_every_model_shape_and_row_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, each configuration of the parity tests gives its tokens and logits of depth 0 with three drafts a step."""
    chosen = named(name)
    model = make_checkpoint(tmp_path, name)
    vocabulary = int(chosen.config["vocab_size"])
    config = {"row_format": chosen.rows, "index_key_format": chosen.keys, "hot_rows": int(chosen.config["index_topk"])}
    for sampling in (sampled(14, 0.0, 0), sampled(14, 1.0, 5)):
        turns = [(ids(55, 3, vocabulary), 14)]
        plain = await run(model, small(**config), turns, sampling)
        with monkeypatch.context() as patch:
            rng = some(1)
            guess_right(patch, [plain.context], lambda _, drafts: rng.randint(0, drafts), vocabulary)  # noqa: B023
            assert (await run(model, small(**config, draft_depth=3), turns, sampling)).same_bits(plain)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(7, 20))])
async def test_drawn_tokens_for_many_seeds(checkpoint: Path, temperature: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise depends on seed and position alone, so drawn tokens are those of depth 0 whatever was drafted."""
    turns, sampling = [(ids(40, seed), 30)], sampled(30, temperature, seed)
    plain = await run(checkpoint, small(), turns, sampling)
    rng = some(seed)
    guess_right(monkeypatch, [plain.context], lambda _, drafts: rng.randint(0, drafts), VOCABULARY)
    for depth in (1, 3, 7):
        assert (await run(checkpoint, small(draft_depth=depth), turns, sampling)).same_bits(plain)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.9}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_penalties_see_the_accepted_prefix(checkpoint: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts grow inside a run as they do token by token, and a refused draft leaves none."""
    turns, sampling = [(ids(20, 9), 40)], sampled(40, temperature, 3, **PENALTIES)
    plain = await run(checkpoint, small(), turns, sampling)
    unpenalised = await run(checkpoint, small(), turns, sampled(40, temperature, 3))
    assert plain.tokens != unpenalised.tokens, "the penalties change nothing here"
    rng = some(4)
    made = guess_right(monkeypatch, [plain.context], lambda _, drafts: rng.randint(0, drafts), VOCABULARY)
    assert (await run(checkpoint, small(draft_depth=4), turns, sampling)).same_bits(plain)
    assert max(made) == 4


@pytest.mark.parametrize("cut", range(1, 9))
async def test_an_end_inside_an_accepted_run(checkpoint: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token and a length limit end the text where they do without drafts, and the next turn goes on from there to the bit."""
    text = await run(checkpoint, small(), [(ids(30, 6), 12)])
    stop = text.tokens[cut]
    kept = text.tokens[: text.tokens.index(stop) + 1]
    ends = (Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,)), sampled(cut, 0.0, 0))
    guess_right(monkeypatch, [text.context], lambda _, drafts: drafts, VOCABULARY)
    for sampling, wanted in zip(ends, (kept, text.tokens[:cut]), strict=True):
        plain, drafted = [await _ended_early(checkpoint, depth, sampling) for depth in (0, 7)]
        assert plain.tokens[: len(wanted)] == wanted
        assert drafted.same_bits(plain)


async def _ended_early(checkpoint: Path, depth: int, sampling: Sampling) -> Run:
    """A turn with this sampling and a plain one behind it, in one session; logits of the second."""
    result = Run()
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, draft_depth=depth)) as engine:
        session = await engine.create_session()
        for prompt, how in ((ids(30, 6), sampling), (ids(5, 7), sampled(6, 0.0, 0))):
            async for chunk in engine.generate(prompt, how, session=session):
                result.tokens.extend(chunk.token_ids)
                result.logits.extend(chunk.logits)
            await engine._loop.wait_idle()
            memory = engine._sessions[session].memory
            assert memory is not None
            assert memory.counts.logical == memory.counts.committed
            await memory.operations.settle()
            memory.check_integrity()
    return result


async def test_nothing_is_drafted_behind_an_end_of_text(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own end inside an accepted run ends the text, and the usage counts only tokens that came."""
    eos = named(NAME).config["eos_token_id"][0]
    text = await run(checkpoint, small(), [(ids(30, 6), 9)])
    script = [*text.context[:35], eos, *text.context[36:]]
    guess_right(monkeypatch, [script, text.context], lambda _, drafts: drafts, VOCABULARY)
    async with Engine.open(checkpoint, small(draft_depth=7)) as engine:
        sampling = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
        chunks = [chunk async for chunk in engine.generate(ids(30, 6), sampling)]
    assert [token for chunk in chunks for token in chunk.token_ids] == text.tokens
    usage = chunks[-1].usage
    assert usage.completion_tokens == 9
    # Drafts for positions 31 to 35 (the end of text) were made; 31 to 34 were right; behind the refused one all were right again.
    assert 4 <= usage.accepted_drafts <= 8
    assert usage.refused_drafts >= 1
    assert sum(usage.drafts_accepted) == usage.accepted_drafts
    assert sum(usage.drafts_proposed) == usage.accepted_drafts + usage.refused_drafts
    assert len(usage.drafts_accepted) == len(usage.drafts_proposed)
    assert all(right <= made for right, made in zip(usage.drafts_accepted, usage.drafts_proposed, strict=True))
    assert list(usage.drafts_accepted) == sorted(usage.drafts_accepted, reverse=True), "a draft counts behind accepted ones only"


async def test_sessions_of_different_depths_share_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session that never drafts beside one of one draft and one of all: each gives what it gives alone."""
    depths = (0, 1, None, 7)
    turns = [[(ids(30 + 17 * number, number), 16)] for number in range(len(depths))]
    alone = [await run(checkpoint, small(hot_rows=TOP_K), one) for one in turns]
    rng = some(2)
    guess_right(monkeypatch, [one.context for one in alone], lambda _, drafts: rng.randint(0, drafts), VOCABULARY)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, draft_depth=7)) as engine:
        asked = [sampled(16, 0.0, 0, draft_depth=depth) for depth in depths]
        together = await asyncio.gather(*(collect(engine, one, how) for one, how in zip(turns, asked, strict=True)))
        counts = engine._loop.depth.counts
    for number, one in enumerate(together):
        assert one.same_bits(alone[number]), f"depth {depths[number]}"
    assert counts.proposed[0] > counts.proposed[1] > 0
    assert counts.accepted[0] > 0


Left = tuple[list[tuple[int, ...]], tuple[int, ...]]


async def left_by(engine: Engine) -> Left:
    """What sessions between two turns hold: of each its rows, those in RAM, in the ring and in the hot cache, blocks and bytes of RAM; and
    of all of them the arena's blocks and references. Not bytes of the device: room for the rows of a step is more with drafts. Nor hot rows
    where few steps came after a block's end: whether they read that block from RAM or still from the ring is a matter of time."""
    await engine._loop.wait_idle()
    for memory in engine.memories.values():
        await memory.operations.settle()
        memory.check_integrity()
    each = sorted(
        (one.tokens, one.rows, one.mirrored_rows, one.ring_rows, one.hot_rows if one.ring_rows > 12 else 0, one.blocks, one.host_bytes)
        for one in engine.instruments.tiers("", 100)
    )
    arena = engine.stage.arena.statistics()
    return each, (arena.blocks, arena.free, arena.references)


async def converse(engine: Engine, turns: list[tuple[list[int], int]]) -> Run:
    """As `collect`, in a session that stays."""
    session, result = await engine.create_session(), Run()
    for prompt, tokens in turns:
        result.context.extend(prompt)
        async for chunk in engine.generate(prompt, sampled(tokens, 0.0, 0), session=session):
            result.tokens.extend(chunk.token_ids)
            result.context.extend(chunk.token_ids)
            result.logits.extend(chunk.logits)
    return result


@pytest.mark.parametrize("sessions", [3, 4, 5])
async def test_as_many_sessions_as_rows(checkpoint: Path, sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sessions as a step has drafts, one more, two more: nothing takes the one number for the other, and rows, places in ring and
    hot cache, blocks and bytes of RAM are at the end what they are without drafts."""
    turns = [[(ids(20 + 9 * number, number), 12)] for number in range(sessions)]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        alone = [await converse(engine, one) for one in turns]
        left = await left_by(engine)
    rng = some(sessions)
    guess_right(monkeypatch, [one.context for one in alone], lambda _, drafts: rng.choice((0, 1, drafts)), VOCABULARY)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, draft_depth=3)) as engine:
        together = await asyncio.gather(*(converse(engine, one) for one in turns))
        assert engine.statistics().steps < sessions * 11
        assert await left_by(engine) == left
    assert len(left[0]) == sessions
    assert all(one.same_bits(other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("rows", range(61, 67))
async def test_a_last_step_of_refused_drafts_leaves_no_room_behind(checkpoint: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a block's end: where the drafts of the last step took a block and were refused, the session gives it back at its turn's end."""
    left = []
    guess_right(monkeypatch, [], lambda _, drafts: 0, VOCABULARY)
    for depth in (0, 3):
        async with Engine.open(checkpoint, small(hot_rows=TOP_K, draft_depth=depth)) as engine:
            await converse(engine, [(ids(50, 1), rows - 50)])
            left.append(await left_by(engine))
    assert left[1] == left[0]


@pytest.mark.parametrize("tail", [1, 3, 4, 5])
async def test_a_short_prompt_beside_verifying_sessions(checkpoint: Path, tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of about as many tokens as a step has rows is appended, never verified, while another session's drafts are judged; what both
    hold at the end is what they hold without drafts."""
    turns = [[(ids(40, 1), 4), (ids(tail, 2), 12)], [(ids(50, 3), 30)]]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K)) as engine:
        alone = [await converse(engine, one) for one in turns]
        left = await left_by(engine)
    rng = some(tail)
    guess_right(monkeypatch, [one.context for one in alone], lambda _, drafts: rng.choice((0, 1, drafts)), VOCABULARY)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, draft_depth=3)) as engine:
        together = await asyncio.gather(*(converse(engine, one) for one in turns))
        assert await left_by(engine) == left
    assert all(one.same_bits(other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("rows", ["f32", "q8g64"])
async def test_resident_and_offload_accept_the_same_drafts(checkpoint: Path, rows: str) -> None:
    """Both placements draft by themselves: equal tokens, logits, and drafts proposed and accepted at each place of a run."""
    found = []
    for placement in ("offload", "resident"):
        async with Engine.open(checkpoint, small(placement=placement, row_format=rows, hot_rows=TOP_K, draft_depth=3)) as engine:
            result = await collect(engine, [(ids(150, 4), 30), (ids(3, 5), 5)])
            found.append((result, engine._loop.depth.counts))
    assert found[0][0].same_bits(found[1][0])
    assert found[0][1] == found[1][1]
    assert sum(found[0][1].proposed) > 60


async def test_replayed_steps_draft_alike(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of several rows and its drafts, recorded once, replay to the same bits."""
    turns = [(ids(61, 1), 40)]
    plain = await run(checkpoint, small(hot_rows=TOP_K), turns)
    guess_right(monkeypatch, [plain.context], lambda position, drafts: position % (drafts + 1), VOCABULARY)
    assert (await run(checkpoint, small(hot_rows=TOP_K, draft_depth=3, graphs="on"), turns)).same_bits(plain)


@pytest.mark.slow
async def test_auto_changes_depth_and_no_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While guesses turn from right to wrong the depth of steps changes, and the text stays."""
    turns = [(ids(61, 1), 120)]
    plain = await run(checkpoint, small(), turns)
    guess_right(monkeypatch, [plain.context], lambda position, drafts: drafts if position < 130 else 0, VOCABULARY)
    async with Engine.open(checkpoint, small(draft_depth=None)) as engine:
        drafted = await collect(engine, turns)
        buckets = {shape.rows for shape in engine._loop._batches._buckets}
    assert drafted.same_bits(plain)
    assert len(buckets) >= 3, f"steps of {buckets} rows only"


async def test_a_model_without_the_block_refuses_to_draft(tmp_path: Path) -> None:
    """A depth is refused in one line; auto is 0."""
    chosen = named(NAME)
    model = write_checkpoint(random_tensors(chosen.config, chosen.seed, mtp=False), chosen.config, tmp_path / "plain")
    with pytest.raises(BadSetting, match="draft_depth 2: the model has no MTP block to draft with; use 0 or auto"):
        async with Engine.open(model, small(draft_depth=2)):
            pass
    plain, auto = [await run(model, small(draft_depth=depth), [(ids(20, 1), 5)]) for depth in (0, None)]
    assert auto.same_bits(plain)
