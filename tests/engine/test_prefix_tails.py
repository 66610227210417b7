"""Prompts that go another way than a stored history: its tail is kept by a fork where that fits, and who pays where it does not."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import NotAdmitted
from kernels.layout import BLOCK_ROWS
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import greedy, small
from tests.engine.test_prefix_reuse import NAME, TOP_K, VOCABULARY, alike, ask, both, fresh, ids

SHARED = ids(200, 1)  # 3 blocks and a part


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@contextmanager
def blocks_left(engine: Engine, blocks: int) -> Iterator[None]:
    """The arena has so many blocks, for the length of the block."""
    arena = engine.stage.arena
    spare = arena.available - blocks
    arena.reserve(spare)
    yield
    arena.unreserve(spare)


def lengths(engine: Engine) -> list[int]:
    """Tokens of stored histories, in order."""
    return sorted(len(session.tokens) for session in engine._loop.stored.sessions)


async def leave(engine: Engine, number: int, tail: int = 70) -> int:
    """A prompt that begins like the others and goes on alone, as one asked again does behind its answer. Returns its cached tokens."""
    _, cached = await ask(engine, [*SHARED, *ids(tail, 100 + number)], 1)
    return cached


@both
async def test_two_agents_with_one_beginning_read_their_own_tails_once(checkpoint: Path, placement: str) -> None:
    """Turn by turn, in turns, two conversations that share more than half pay for what is new only, and give the tokens of fresh runs."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        contexts = [[*SHARED, *ids(90, 10)], [*SHARED, *ids(80, 11)]]
        for turn in range(2):
            for number, context in enumerate(contexts):
                before = len(context)
                if turn:
                    context.extend(ids(10, 20 + turn))
                got, cached = await ask(engine, context)
                assert turn == 0 or cached == before - 1, f"agent {number} read again in turn {turn}"
                alike(got, (await fresh(checkpoint, context, placement=placement))[0])
                contexts[number] = got.context
        assert engine.statistics().stored == 2


@both
async def test_a_tail_of_less_than_a_block_is_cut(checkpoint: Path, placement: str) -> None:
    """What would cost less to read again than a fork takes is cut off in place: a prompt asked again, with a short answer, stays one."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", placement=placement)) as engine:
        for number in range(4):
            assert await leave(engine, number, tail=BLOCK_ROWS - 4) >= (198 if number else 0)
        assert lengths(engine) == [197 + BLOCK_ROWS]


async def test_without_room_for_a_fork_the_tail_is_cut(checkpoint: Path) -> None:
    """With the arena full nobody waits for the sake of a tail: the history is cut where the prompt leaves it, and the answer is right."""
    prompt = [*SHARED, *ids(70, 5)]
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        with blocks_left(engine, 5):
            await leave(engine, 1)
            async with asyncio.timeout(60):
                got, cached = await ask(engine, prompt)
            assert cached >= 198
            assert lengths(engine) == [278]
    alike(got, (await fresh(checkpoint, prompt))[0])


@pytest.mark.parametrize(("other", "stays"), [(300, True), (40, False)])
async def test_a_tail_drives_out_no_longer_history(checkpoint: Path, other: int, stays: bool) -> None:
    """Where only an idle history could make room, one with more rows than the tail stays and the tail is cut; a shorter one goes."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        with blocks_left(engine, 5 + (5 if stays else 2)):  # without the other the fork's two blocks are there in any case
            await ask(engine, ids(other, 7), 1)
            await leave(engine, 1)
            assert await leave(engine, 2) >= 198
            assert lengths(engine) == ([271, 301] if stays else [271, 271])


async def test_a_prompt_asked_again_and_again_drives_out_its_own_answers(checkpoint: Path) -> None:
    """Old answers go first, however old another history is; each time all but the answer is there, and the newest answers stay."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        with blocks_left(engine, 1 + 5 + 2 + 2):
            await ask(engine, ids(40, 7), 1)
            for number in range(7):
                assert await leave(engine, number) >= (198 if number else 0)
                assert lengths(engine) == sorted([41, *[271] * min(number + 1, 3)])
            _, cached = await ask(engine, [*ids(40, 7), *ids(10, 8)])
            assert cached == 40


async def test_old_answers_go_first_where_histories_are_counted(checkpoint: Path) -> None:
    """At most `sessions_max` histories are kept: of a prompt asked again the answers that were left go, not the older history."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", sessions_max=3)) as engine:
        await ask(engine, ids(150, 7), 1)
        for number in range(5):
            await leave(engine, number)
        assert lengths(engine) == [151, 271, 271]


async def test_what_was_left_and_is_continued_is_no_longer_first_to_go(checkpoint: Path) -> None:
    """An agent that comes back to the history another one left behind counts as its user again."""
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on", sessions_max=2)) as engine:
        first, _ = await ask(engine, [*SHARED, *ids(90, 10)])
        second, cached = await ask(engine, [*SHARED, *ids(80, 11)])
        assert cached >= 198
        await ask(engine, [*first.context, (first.context[0] + 1) % VOCABULARY])
        await ask(engine, ids(100, 12))  # one too many: the second agent's history is the least recently used
        assert (await ask(engine, [*first.context, 1]))[1] > 290
        assert (await ask(engine, [*second.context, 1]))[1] <= 200


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("runs", [False, True])
async def test_a_cut_through_a_shared_block_asks_for_its_room_first(checkpoint: Path, blocks: int, runs: bool) -> None:
    """Who would cut a history whose block another session holds, beside a full arena, is refused or waits as others are; nothing breaks."""
    text = ids(3 * BLOCK_ROWS + 3, 1)
    prompt = [*text[: 2 * BLOCK_ROWS + 42], *ids(100, 3)]  # five blocks with its answer: of the history one is shared, one its own
    async with Engine.open(checkpoint, small(hot_rows=TOP_K, prefix_cache="on")) as engine:
        holder = await engine.create_session()
        await engine.generate(text, greedy(1), session=holder).complete()
        await ask(engine, [*text[:-1], *ids(10, 2)], 1)
        for session in engine._loop.stored.by_use:
            assert session.memory is not None
            engine.stage.placement.rest(session.memory)
        other = engine.generate(ids(70, 4), greedy(30))
        if runs:
            await anext(other)
        with blocks_left(engine, blocks):
            async with asyncio.timeout(60):
                if blocks < 2 and not runs:
                    with pytest.raises(NotAdmitted, match="does not fit"):
                        await ask(engine, prompt)
                else:
                    got, cached = await ask(engine, prompt)
                    assert cached >= 2 * BLOCK_ROWS
                    alike(got, (await fresh(checkpoint, prompt))[0])
        await other.aclose()
        assert (await engine.generate([1], greedy(1), session=holder).complete()).usage.completion_tokens == 1
