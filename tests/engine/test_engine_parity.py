"""The engine against transformers on the same weights: appended prompts in chunks of any size, then decode steps."""

from pathlib import Path

import pytest
import torch

from tests.engine.model.parity import configurations, make_checkpoint, named, prompt_ids, transformers_logits
from tests.engine.runs import run, small

# A float32 forward pass written another way agrees to about 3e-5 on logits of size 10.
TOLERANCE = 1e-4
NEW_TOKENS = 24
CHUNKS = (1, 7, 64, 65, 1000)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {each.name: make_checkpoint(directory, each.name) for each in configurations()}


@pytest.mark.parametrize("name", [each.name for each in configurations()])
async def test_engine_agrees_with_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Logits of the first new token and of every decode step lie within 1e-4 of transformers', and greedy tokens are its own."""
    chosen = named(name)
    prompt = prompt_ids(chosen).tolist()
    config = small(row_format=chosen.rows, index_key_format=chosen.keys, hot_rows=0)
    # Rounded rows are tuned to the prompt's own length; a later token may sit on a rounding boundary.
    tokens = NEW_TOKENS if chosen.rows == "f32" else 1
    result = await run(checkpoints[name], config, [(prompt, tokens)])
    expected = transformers_logits(checkpoints[name], torch.tensor(result.context[:-1]), chosen.rows, chosen.keys)
    expected = expected[len(prompt) - 1 :]
    assert len(result.logits) == tokens
    worst = max(float((got - want).abs().max()) for got, want in zip(result.logits, expected, strict=True))
    assert worst <= TOLERANCE, f"largest logit difference {worst}"
    assert result.tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["shared", "grouped routing", "odd widths"])
async def test_chunk_size_changes_nothing_that_matters(checkpoints: dict[str, Path], name: str, chunk: int) -> None:
    """A prompt appended in chunks of any size, one token at a time included, gives transformers' logits and tokens."""
    chosen = named(name)
    prompt = prompt_ids(chosen).tolist()
    result = await run(checkpoints[name], small(append_chunk_rows=chunk), [(prompt[:50], 3), (prompt[50:], 4)])
    expected = transformers_logits(checkpoints[name], torch.tensor(result.context[:-1]))
    rows = [*range(49, 52), *range(len(result.context) - 5, len(result.context) - 1)]
    worst = max(float((got - expected[row]).abs().max()) for got, row in zip(result.logits, rows, strict=True))
    assert worst <= TOLERANCE, f"largest logit difference {worst}"
    assert result.tokens == [int(expected[row].argmax()) for row in rows]


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_one_prompt_cut_anywhere(checkpoints: dict[str, Path], chunk: int) -> None:
    """A prompt of 120 tokens in one turn, cut at 1, 7, 64, 65 or not at all, gives transformers' logits and tokens."""
    chosen = named("ragged row groups")
    prompt = prompt_ids(chosen).tolist()
    assert len(prompt) > 65
    result = await run(checkpoints[chosen.name], small(append_chunk_rows=chunk), [(prompt, 6)])
    expected = transformers_logits(checkpoints[chosen.name], torch.tensor(result.context[:-1]))[len(prompt) - 1 :]
    worst = max(float((got - want).abs().max()) for got, want in zip(result.logits, expected, strict=True))
    assert worst <= TOLERANCE, f"largest logit difference {worst}"
    assert result.tokens == expected.argmax(-1).tolist()


async def test_long_prompts_do_not_depend_on_their_cuts(checkpoints: dict[str, Path]) -> None:
    """1,100 tokens cut at 64, 65, 1,000 or not at all give the same bits: on the CPU a row never depends on its chunk."""
    prompt = torch.randint(0, 60, (1100,), generator=torch.Generator().manual_seed(5)).tolist()
    runs = [await run(checkpoints["shared"], small(append_chunk_rows=chunk), [(prompt, 4)]) for chunk in (4096, 64, 65, 1000)]
    for other in runs[1:]:
        assert other.same_bits(runs[0])
