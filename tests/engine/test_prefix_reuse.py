"""Histories that later prompts begin with: exact, shared only with their own, given up when memory runs short."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import NotAdmitted
from engine.session import Session
from engine.stored import step_back
from kernels.layout import BLOCK_ROWS
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import Run, greedy, small
from tests.engine.test_draft_rows import _bytes as bytes_of

NAME = "shared"
VOCABULARY = int(named(NAME).config["vocab_size"])
TOP_K = int(named(NAME).config["index_topk"])

both = pytest.mark.parametrize("placement", ["offload", "resident"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


async def ask(engine: Engine, prompt: Sequence[int], tokens: int = 8, **more: object) -> tuple[Run, int]:
    """One stateless generation; returns what it gave and its cached tokens."""
    result, cached = Run(context=list(prompt)), -1
    async for chunk in engine.generate(list(prompt), greedy(tokens), **more):  # type: ignore[arg-type]
        result.tokens.extend(chunk.token_ids)
        result.context.extend(chunk.token_ids)
        result.logits.extend(chunk.logits)
        cached = chunk.usage.cached_tokens
    await engine._loop.wait_idle()
    return result, cached


async def fresh(checkpoint: Path, prompt: Sequence[int], tokens: int = 8, **settings: object) -> tuple[Run, list[torch.Tensor]]:
    """The same with nothing stored, and the bytes of every row it left."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", **settings)) as engine:
        got, cached = await ask(engine, prompt, tokens)
        assert cached == 0
        return got, rows_of(engine, newest(engine))


def newest(engine: Engine) -> Session:
    assert engine._loop.stored is not None
    return engine._loop.stored.sessions[-1]


def rows_of(engine: Engine, session: Session) -> list[torch.Tensor]:
    assert session.memory is not None
    return [block.clone() for block in bytes_of(engine.stage.layout, session.memory)]


def alike(one: Run, other: Run) -> None:
    """Equal greedy tokens and logits within 1e-4: rows written by a step and rows written again by an append."""
    assert one.tokens == other.tokens
    for mine, theirs in zip(one.logits, other.logits, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4, rtol=0)


@both
async def test_the_next_turn_pays_for_its_own_tokens_only(checkpoint: Path, placement: str) -> None:
    """A prompt that continues a whole stored conversation reuses every row it had, in place, to the rows' bytes."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        first, cached = await ask(engine, ids(100, 1), 20)
        assert cached == 0
        prompt = [*first.context, *ids(30, 2)]
        second, cached = await ask(engine, prompt, 10)
        assert cached == 119  # the last token sampled had no row
        left = rows_of(engine, newest(engine))
        assert engine.statistics().stored == 1
    wanted, rows = await fresh(checkpoint, prompt, 10, placement=placement)
    alike(second, wanted)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(left, rows, strict=True))


@both
@pytest.mark.parametrize("common", [64, 65, 100, 127, 128, 129, 130, 144, 145, 158, 159])
async def test_a_prompt_that_leaves_a_history_anywhere(checkpoint: Path, placement: str, common: int) -> None:
    """Cut at any place, near the end or far from it, what is reused and what is written make the rows and tokens of a fresh run."""
    text = ids(150, 3)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        first, _ = await ask(engine, text, 10)
        prompt = [*first.context[:common], (first.context[common] + 1) % VOCABULARY, *ids(40, 4)]
        second, cached = await ask(engine, prompt, 10)
        assert common - 2 <= cached <= common
        left = rows_of(engine, newest(engine))
    wanted, rows = await fresh(checkpoint, prompt, 10, placement=placement)
    alike(second, wanted)
    assert len(left) == len(rows)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(left, rows, strict=True))


@both
@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 128, 129, 150])
async def test_the_last_prompt_token_is_always_read(checkpoint: Path, placement: str, length: int) -> None:
    """The same prompt again gives the same tokens; at least its last token is not cached."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        first, _ = await ask(engine, ids(length, 5))
        again, cached = await ask(engine, ids(length, 5))
        assert max(0, length - 3) <= cached <= max(0, length - 1)
    alike(again, first)


@pytest.mark.parametrize("placement", ["offload", pytest.param("resident", marks=pytest.mark.slow)])
async def test_another_request_forks_a_history_in_use(checkpoint: Path, placement: str) -> None:
    """Three prompts that begin like one that still decodes share its blocks, decode beside it, and give the tokens of fresh runs."""
    shared = ids(200, 6)
    prompts = [[*shared, *ids(20 + 5 * number, 60 + number)] for number in range(4)]
    wanted = [(await fresh(checkpoint, prompt, 60, placement=placement))[0] for prompt in prompts]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        leading = engine.generate(prompts[0], greedy(60))
        first = [await anext(leading) for _ in range(3)]
        others = await asyncio.gather(*(ask(engine, prompt, 60) for prompt in prompts[1:]))
        async for chunk in leading:
            first.append(chunk)
        assert [token for chunk in first for token in chunk.token_ids] == wanted[0].tokens
        assert engine.statistics().stored == 4
    for (got, cached), expected in zip(others, wanted[1:], strict=True):
        assert 190 <= cached <= 200
        alike(got, expected)


async def test_prompts_that_come_together_share_what_is_stored(checkpoint: Path) -> None:
    """Of three prompts at once the first continues the stored history; the others share its blocks while it still reads."""
    shared = ids(200, 6)
    prompts = [[*shared, *ids(150, 60 + number)] for number in range(3)]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        await ask(engine, shared, 1)
        got = await asyncio.gather(*(ask(engine, prompt, 6) for prompt in prompts))
    assert [cached >= 190 for _, cached in got] == [True] * 3
    for (each, _), prompt in zip(got, prompts, strict=True):
        alike(each, (await fresh(checkpoint, prompt, 6))[0])


@both
async def test_a_long_history_survives_a_prompt_that_shares_little(checkpoint: Path, placement: str) -> None:
    """A prompt that shares the first third of a stored history forks it; the whole history is still there afterwards."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        first, _ = await ask(engine, ids(300, 7))
        prompt = [*first.context[:100], *ids(10, 8)]
        branch, cached = await ask(engine, prompt)
        assert 98 <= cached <= 100
        assert engine.statistics().stored == 2
        again, cached = await ask(engine, [*first.context, *ids(3, 9)])
        assert cached == 307
    alike(branch, (await fresh(checkpoint, prompt, placement=placement))[0])
    alike(again, (await fresh(checkpoint, [*first.context, *ids(3, 9)], placement=placement))[0])


async def test_forks_share_blocks_and_leave_none(checkpoint: Path) -> None:
    """Host bytes count a shared block once; when the engine closes, arena and pool are empty."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        await ask(engine, ids(300, 7))
        alone = engine.statistics().host_bytes
        await ask(engine, [*ids(300, 7)[:140], *ids(2, 8)], 1)
        block_bytes = engine.stage.layout.block_bytes
        assert engine.statistics().host_bytes - alone <= block_bytes
        stage = engine.stage
    assert stage.ledger.total("device").allocated_bytes == 0
    assert stage.ledger.total("host").allocated_bytes == 0


async def test_nothing_is_shared_across_namespaces(checkpoint: Path) -> None:
    """The same prompt in another namespace begins from nothing, also while the first one's history is stored."""
    async with Engine.open(checkpoint, small(prefix_cache="on")) as engine:
        first, _ = await ask(engine, ids(100, 1), namespace="one")
        second, cached = await ask(engine, ids(100, 1), namespace="two")
        assert cached == 0
        assert first.same_bits(second)
        assert (await ask(engine, ids(100, 1), namespace="one"))[1] == 99


async def test_a_library_stores_nothing_unless_asked(checkpoint: Path) -> None:
    """With the default settings a session of its own is closed with its request, and nothing is cached."""
    async with Engine.open(checkpoint, small()) as engine:
        for _ in range(2):
            _, cached = await ask(engine, ids(100, 1))
            assert cached == 0
        assert engine.statistics().stored == engine.statistics().mirrored_rows == 0


@both
async def test_what_an_aborted_prompt_left_is_reused(checkpoint: Path, placement: str) -> None:
    """A prompt given up in the middle keeps the rows of its finished chunks for the next one."""
    prompt = ids(400, 10)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        leaving = engine.generate(prompt, greedy(4))
        reading = asyncio.ensure_future(anext(leaving))
        while leaving.progress.rows_done < 128:
            await engine.stage.streams.compute.idle()
            await asyncio.sleep(0)
        await leaving.aclose()
        reading.cancel()
        got, cached = await ask(engine, prompt)
        assert 128 <= cached < 400
        assert cached % 64 == 0
    alike(got, (await fresh(checkpoint, prompt, placement=placement))[0])


@both
async def test_memory_that_runs_short_is_given_back_oldest_first(checkpoint: Path, placement: str) -> None:
    """With room for few histories, new prompts are admitted, the least recently used histories go, and the newest stay."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        needs = engine.stage.placement.needs(400)
        arena_blocks = engine.stage.arena.statistics().blocks
        spare = needs.host_bytes * 2 // engine.stage.layout.block_bytes if placement == "offload" else arena_blocks
        engine.stage.arena.reserve(arena_blocks - spare)
        held = engine.stage.pool.statistics().allocated_bytes
        engine.stage.pool._budget_bytes = held + int(2.5 * needs.device_bytes)
        prompts = [ids(380, 20 + number) for number in range(5)]
        for prompt in prompts:
            got, cached = await ask(engine, prompt, 4)
            assert len(got.tokens) == 4
            assert cached == 0
        stored = engine.statistics().stored
        assert 1 <= stored < 5
        assert (await ask(engine, prompts[4], 4))[1] >= 377
        assert (await ask(engine, prompts[0], 4))[1] == 0
        engine.stage.arena.unreserve(arena_blocks - spare)


async def test_a_cut_that_has_no_block_of_its_own_ends(checkpoint: Path) -> None:
    """With the arena full to its last block a prompt that cuts inside a shared block is refused, and answered once there is room."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        session = await engine.create_session()
        async for _ in engine.generate(ids(250, 1), greedy(1), session=session):
            pass
        await engine._loop.wait_idle()
        _, cached = await ask(engine, [*ids(250, 1)[:200], *ids(20, 2)], 1)
        assert cached >= 190
        stored = newest(engine)
        assert stored.memory is not None
        for each in (stored, engine._sessions[session]):
            assert each.memory is not None
            await each.memory.operations.settle()
            engine.stage.placement.rest(each.memory)
        assert stored.memory.history.allotment.shared(2)
        arena = engine.stage.arena
        spare = arena.available
        arena.reserve(spare)
        prompt = [*ids(250, 1)[:140], *ids(100, 3)]
        async with asyncio.timeout(60):
            with pytest.raises(NotAdmitted, match="does not fit"):
                await ask(engine, prompt, 1)
        arena.unreserve(spare)
        got, cached = await ask(engine, prompt, 1)
        assert cached > 130
    alike(got, (await fresh(checkpoint, prompt, 1))[0])


async def test_a_resting_history_is_continued(checkpoint: Path) -> None:
    """A history that gave up its hot caches is continued with the tokens of a fresh run, and explicit sessions rest too."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        first, _ = await ask(engine, ids(100, 1), 20)
        session = await engine.create_session()
        async for _ in engine.generate(ids(90, 2), greedy(4), session=session):
            pass
        await engine._loop.wait_idle()
        for each in (newest(engine), engine._sessions[session]):
            assert each.memory is not None
            await each.memory.operations.settle()
        assert engine._loop.stored is not None
        assert engine._loop.stored.reclaim(None)
        assert engine._loop.stored.reclaim(None)
        for each in (newest(engine), engine._sessions[session]):
            assert each.memory is not None
            assert each.memory.statistics().hot == ()
        got, cached = await ask(engine, [*first.context, *ids(5, 3)])
        assert cached == 119
        turn = await engine.generate(ids(3, 4), greedy(4), session=session).complete()
        assert turn.usage.cached_tokens == 93
    alike(got, (await fresh(checkpoint, [*first.context, *ids(5, 3)]))[0])


async def test_what_can_never_fit_is_refused_with_histories_stored(checkpoint: Path) -> None:
    """A context larger than the whole arena is refused; one that fits when every history is dropped is admitted."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", host_memory_bytes=1 << 20)) as engine:
        block_bytes = engine.stage.layout.block_bytes
        rows = (1 << 20) // block_bytes * BLOCK_ROWS
        for seed in range(3):
            _, cached = await ask(engine, ids(rows - 70, seed), 4)
            assert cached == 0
        with pytest.raises(NotAdmitted, match="can never fit"):
            await ask(engine, ids(rows, 9), 4)


@pytest.mark.slow
async def test_acceptance_after_a_hit_is_acceptance_without_it(checkpoint: Path) -> None:
    """With drafts of the model's own, a prompt that reuses a cut history accepts and refuses as many as a fresh run, cut anywhere."""
    text = ids(150, 3)
    for common in (66, 100, 128, 140):
        prompt = [*text[:common], (text[common] + 1) % VOCABULARY, *ids(3, 4)]
        counts = []
        for begin in ([], [text]):
            async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", draft_depth=2)) as engine:
                for each in begin:
                    await ask(engine, each, 1)
                before = engine.statistics()
                got, cached = await ask(engine, prompt, 40)
                after = engine.statistics()
                assert (cached > 0) is bool(begin)
                proposed = [b - a for a, b in zip(before.drafts_proposed, after.drafts_proposed, strict=True)]
                accepted = [b - a for a, b in zip(before.drafts_accepted, after.drafts_accepted, strict=True)]
                counts.append((got.tokens, proposed, accepted))
        assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("rows", "held", "first"), [(128, 200, 127), (200, 200, 199), (65, 65, 63), (64, 64, 63), (1, 1, 0), (2, 2, 1), (100, 101, 100)]
)  # fmt: skip
def test_where_to_go_on_without_the_hidden_state(rows: int, held: int, first: int) -> None:
    """The row to begin with lies inside a block whose copy brings its MTP row along, and its token goes on as it is."""
    assert step_back(rows, held) == first
    assert first < held
    assert first % BLOCK_ROWS or first == 0


async def test_the_same_prompt_many_times_at_once(checkpoint: Path) -> None:
    """Eight equal prompts at once all give the tokens of one, whoever shares with whom, and one history more than need be is never lost."""
    wanted, _ = await fresh(checkpoint, ids(140, 1), 30)
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", sessions_max=3)) as engine:
        got = await asyncio.gather(*(ask(engine, ids(140, 1), 30) for _ in range(8)))
        assert engine.statistics().stored == 3
    for each, _ in got:
        alike(each, wanted)
