"""Biases of a request's logits: which tokens it gives, in company, and behind drafts."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import BadRequest
from engine.sampling import Sampling
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.runs import run, small

VOCABULARY = int(named("shared").config["vocab_size"])
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BIAS = ((5, 40.0), (7, -100.0), (11, 38.5), (13, 39.0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


def biased(**more: object) -> Sampling:
    settings: dict[str, object] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "keep_logits": True, "logit_bias": BIAS} | more
    return Sampling(**settings)  # type: ignore[arg-type]  # field names are checked by the dataclass itself


@pytest.mark.parametrize("graphs", ["off", "on"])
async def test_every_token_is_chosen_with_its_bias(checkpoint: Path, graphs: str) -> None:
    """Greedy tokens, the first one included, are the largest of raw logits and bias, which the raw logits do not show."""
    got = await run(checkpoint, small(graphs=graphs), [(PROMPT, 12)], biased())
    bias = torch.zeros(VOCABULARY)
    for token, value in BIAS:
        bias[token] = value
    assert got.tokens == [int((logits + bias).argmax()) for logits in got.logits]
    assert got.tokens != [int(logits.argmax()) for logits in got.logits]


async def test_company_neither_gets_nor_takes_a_bias(checkpoint: Path) -> None:
    """Requests with and without a bias in one batch give the tokens that they give alone."""
    samplings = [biased(), biased(logit_bias=()), biased(logit_bias=((17, 60.0),)), biased(temperature=0.8, seed=3)]
    async with Engine.open(checkpoint, small()) as engine:
        together = await asyncio.gather(*(engine.generate(PROMPT, each).complete() for each in samplings))
        alone = [await engine.generate(PROMPT, each).complete() for each in samplings]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert set(together[2].token_ids) == {17}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_drafts_change_no_token_of_a_biased_request(checkpoint: Path, temperature: float) -> None:
    """With three drafts a step the tokens are those without."""
    sampling = biased(temperature=temperature, seed=9, presence_penalty=0.5)
    plain = await run(checkpoint, small(), [(PROMPT, 12)], sampling)
    drafted = await run(checkpoint, small(draft_depth=3), [(PROMPT, 12)], sampling)
    assert drafted.tokens == plain.tokens


async def test_drafts_are_guessed_with_the_bias(checkpoint: Path) -> None:
    """Where a bias leaves one token every draft is right: guesses hear of it too."""
    drafted = await run(checkpoint, small(draft_depth=3), [(PROMPT, 24)], biased(max_tokens=24, logit_bias=((17, 100.0),)))
    assert set(drafted.tokens) == {17}
    assert drafted.statistics is not None
    proposed, accepted = drafted.statistics.drafts_proposed, drafted.statistics.drafts_accepted
    assert sum(proposed) > 0
    assert list(accepted) == list(proposed)


async def test_a_token_that_the_model_does_not_have(checkpoint: Path) -> None:
    """A bias of an id past the vocabulary is refused by name before anything begins."""
    async with Engine.open(checkpoint, small()) as engine:
        with pytest.raises(BadRequest, match=f"outside the vocabulary of {VOCABULARY}") as caught:
            await engine.generate(PROMPT, biased(logit_bias=((VOCABULARY, 1.0),))).prompt()
    assert caught.value.field == "logit_bias"
