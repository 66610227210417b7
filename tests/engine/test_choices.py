"""Several generations of one prompt as one stream of chunks."""

import asyncio
from collections.abc import Sequence

import pytest

from engine.choices import Choices
from engine.chunk import Chunk, Usage
from engine.errors import NotAdmitted, SessionBroken
from engine.protocol import Prompt
from engine.sampling import Sampling
from tests.fake_engine import FakeEngine, FakeGeneration, Item, words


def choices_of(engine: FakeEngine, count: int, prompt: Prompt = "hi") -> Choices:
    return Choices(engine.generate, prompt, [Sampling(seed=seed) for seed in range(count)])


async def read(choices: Choices) -> list[tuple[int, Chunk]]:
    return [item async for item in choices]


def text_of(items: Sequence[tuple[int, Chunk]], choice: int) -> str:
    return "".join(chunk.text for number, chunk in items if number == choice)


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_choice_gives_all_its_chunks_in_order(count: int) -> None:
    """Each choice's chunks come in order and whole, with a sampling of its own; the others continue the first one's token ids."""
    engine = FakeEngine([words(*(f"{choice}{part}" for part in "abc")) for choice in range(count)])
    async with choices_of(engine, count) as choices:
        items = await read(choices)
    assert [text_of(items, choice) for choice in range(count)] == [f"{choice}a{choice}b{choice}c" for choice in range(count)]
    assert [call.sampling.seed for call in engine.calls] == list(range(count))
    assert [call.prompt for call in engine.calls] == ["hi", *[(7, 8, 9)] * (count - 1)]
    assert all(generation.closed.is_set() for generation in engine.generations)


async def test_the_prompt_counts_once() -> None:
    """Usage has the prompt of the first choice and the generated tokens and drafts of all."""
    scripts = [
        [Chunk("a", (1,), Usage(3, 4, 2, 1, 1), finish_reason="stop")],
        [Chunk("b", (2,), Usage(3, 6, 3, 2, 0), finish_reason="stop")],
    ]
    async with choices_of(FakeEngine(list(scripts)), 2) as choices:
        assert choices.usage == Usage(3, 0)
        await read(choices)
        assert choices.usage == Usage(3, 10, 2, 3, 1)


async def test_the_others_start_when_the_first_has_read_the_prompt() -> None:
    """Nobody but the first is asked before its first chunk is there."""
    gate = asyncio.Event()
    engine = FakeEngine([[gate, *words("a")], words("b")])
    async with asyncio.TaskGroup() as group:

        async def visit() -> None:
            async with choices_of(engine, 2) as choices:
                assert {choice for choice, _ in await read(choices)} == {0, 1}

        group.create_task(visit())
        await engine.started.wait()
        await engine.generations[0].paused.wait()
        assert len(engine.calls) == 1
        gate.set()
    assert len(engine.calls) == 2


class _Refusing(FakeEngine):
    """Takes one request and no more."""

    def generate(self, *arguments: object, **named: object) -> FakeGeneration:
        if self.generations:
            raise NotAdmitted("full", retry_after_s=1.0)
        return super().generate(*arguments, **named)  # type: ignore[arg-type]


async def test_a_choice_that_is_refused_ends_the_first_one() -> None:
    """When another choice is refused nothing was handed out, and the first is closed."""
    engine = _Refusing([[words("a", "b")[0], asyncio.Event()]])
    with pytest.raises(NotAdmitted, match="full"):
        async with choices_of(engine, 3):
            pytest.fail("nothing is handed out")
    assert engine.generations[0].closed.is_set()


@pytest.mark.parametrize("failing", [0, 1])
async def test_an_error_of_one_choice_ends_all(failing: int) -> None:
    """The error of any choice is raised to the reader as it is, and every generation is closed."""
    scripts: list[list[Item]] = [[words("a", "b")[0], asyncio.Event()], [words("c", "d")[0], asyncio.Event()]]
    scripts[failing] = [words("a", "b")[0], SessionBroken("layer 2")]
    engine = FakeEngine(list(scripts))
    with pytest.raises(SessionBroken, match="layer 2"):
        async with choices_of(engine, 2) as choices:
            await read(choices)
    assert [generation.closed.is_set() for generation in engine.generations] == [True, True]


@pytest.mark.parametrize("count", [1, 2])
async def test_leaving_closes_everything(count: int) -> None:
    """The reader's own error leaves as it was; what still ran is aborted."""
    engine = FakeEngine([[words("a", "b")[0], asyncio.Event()] for _ in range(count)])

    async def visit() -> None:
        async with choices_of(engine, count) as choices:
            await anext(choices)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await visit()
    assert engine.aborted == count


@pytest.mark.parametrize("count", [1, 2])
async def test_a_cancelled_reader_closes_everything(count: int) -> None:
    """Cancelled while it waits, the reader leaves no generation and no task behind."""
    engine = FakeEngine([[words("a", "b")[0], asyncio.Event()] for _ in range(count)])

    async def visit() -> None:
        async with choices_of(engine, count) as choices:
            await read(choices)

    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(visit())
        await engine.started.wait()
        while len(engine.generations) < count or not engine.generations[-1].paused.is_set():  # noqa: ASYNC110 - one look a turn of the loop
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    assert engine.aborted == count
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("count", [1, 3])
async def test_a_client_that_leaves_before_the_first_token(count: int) -> None:
    """Cancelled while the prompt is read, nothing of the first choice stays, and the others never began."""
    engine = FakeEngine([[asyncio.Event()]])

    async def visit() -> None:
        async with choices_of(engine, count) as choices:
            await read(choices)

    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(visit())
        await engine.started.wait()
        await engine.generations[0].paused.wait()
        task.cancel()
    assert task.cancelled()
    assert (len(engine.calls), engine.aborted) == (1, 1)
    assert asyncio.all_tasks() == before


async def test_one_choice_may_be_left() -> None:
    """A choice that was left gives nothing more, and the others go on to their ends."""
    engine = FakeEngine([words("a", "b", "c"), words("d", "e", "f")])
    async with choices_of(engine, 2) as choices:
        first = await anext(choices)
        await choices.leave(0)
        assert engine.generations[0].closed.is_set(), "it is left at once, not with the others"
        items = [first, *await read(choices)]
    assert (text_of(items, 0), text_of(items, 1)) == ("a", "def")
    async with choices_of(FakeEngine([words("a", "b")]), 1) as alone:
        await anext(alone)
        await alone.leave(0)
        assert await read(alone) == []
