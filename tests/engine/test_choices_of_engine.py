"""Choices of one prompt on the real engine: each says what it would say alone, on rows that the first one has."""

from functools import partial
from pathlib import Path

import pytest

from engine.choices import Choices
from engine.engine import Engine
from engine.sampling import Sampling
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import small

COUNT = 4
VOCABULARY = int(named("shared").config["vocab_size"])
PROMPT = [(7 * place + place // 3) % VOCABULARY for place in range(150)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


def drawn(choice: int) -> Sampling:
    return Sampling(max_tokens=8, temperature=1.0, seed=choice, ignore_eos=True)


@pytest.mark.parametrize("placement", ["offload", "resident"])
async def test_choices_fork_the_prompt_and_say_what_they_say_alone(checkpoint: Path, placement: str) -> None:
    """With seeds of their own choices differ, each gives its tokens of a fresh engine, and the others pay for few rows of the prompt."""
    async with Engine.open(checkpoint, small(placement=placement, prefix_cache="on")) as engine:
        tokens: list[list[int]] = [[] for _ in range(COUNT)]
        cached = [0] * COUNT
        async with Choices(partial(engine.generate, namespace="n"), PROMPT, [drawn(choice) for choice in range(COUNT)]) as choices:
            async for choice, chunk in choices:
                tokens[choice].extend(chunk.token_ids)
                cached[choice] = chunk.usage.cached_tokens
        assert engine.statistics().running == 0
    assert choices.usage.completion_tokens == 8 * COUNT
    assert cached[0] == 0
    assert min(cached[1:]) >= 64  # a block: what the first one has and will not write again
    async with Engine.open(checkpoint, small(placement=placement, prefix_cache="off")) as engine:
        alone = [await engine.generate(PROMPT, drawn(choice)).complete() for choice in range(COUNT)]
    assert tokens == [list(one.token_ids) for one in alone]
    assert len({tuple(each) for each in tokens}) == COUNT


async def test_one_choice_is_left_and_the_others_go_on(checkpoint: Path) -> None:
    """A choice that is left ends within a step and gives nothing more; the rest reach their length."""
    async with Engine.open(checkpoint, small(prefix_cache="on")) as engine:
        taken = [0] * 3
        async with Choices(
            engine.generate, PROMPT, [Sampling(max_tokens=40, seed=choice, ignore_eos=True) for choice in range(3)]
        ) as choices:
            async for choice, chunk in choices:
                taken[choice] += len(chunk.token_ids)
                if choice == 1 and taken[1] == 1:
                    await choices.leave(1)
        assert taken == [40, 1, 40]
        assert engine.statistics().running == 0
