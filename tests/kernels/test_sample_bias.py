"""Sampling with biases: numbers added to the logits of some tokens before all else."""

import pytest
import torch

from kernels.sample import sample

VOCABULARY = 12
LOGITS = torch.tensor([[4.0, 3.0, 2.0, *[0.0] * 9]])
ZERO = torch.zeros(1, dtype=torch.int64)


def choose(bias: torch.Tensor | None, *row: float, counts: torch.Tensor | None = None, logits: torch.Tensor = LOGITS) -> int:
    parameters = torch.tensor([[*(row or (0.0,)), *(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)[len(row) - 1 if row else 0 :]]])
    counted = ZERO if counts is None else torch.tensor([counts.data_ptr()])
    biases = ZERO if bias is None else torch.tensor([bias.data_ptr()])
    return int(sample(logits, parameters, ZERO, ZERO, ZERO, counted, None, biases))


def bias_of(**values: float) -> torch.Tensor:
    bias = torch.zeros(VOCABULARY)
    for token, value in values.items():
        bias[int(token.removeprefix("t"))] = value
    return bias


def test_a_bias_moves_the_greedy_choice() -> None:
    """A token is raised to the top, or the top one taken out; without an address nothing moves, and the logits stay as they are."""
    assert choose(None) == 0
    assert choose(bias_of(t7=4.5)) == 7
    assert choose(bias_of(t0=-100.0)) == 1
    assert choose(bias_of(t0=-100.0, t1=-100.0)) == 2
    assert LOGITS[0, 0] == 4.0


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_bias_is_a_change_of_the_logits(temperature: float) -> None:
    """Drawn tokens are those of logits that the bias was added to, filters included."""
    generator = torch.Generator().manual_seed(5)
    bias, logits = torch.randn(VOCABULARY, generator=generator), torch.randn((40, VOCABULARY), generator=generator)
    parameters = torch.tensor([[temperature, 0.8, 5.0, 0.1, 1.0, 0.0, 0.0, 0.0]] * 40)
    zeros, numbers = torch.zeros(40, dtype=torch.int64), torch.arange(40)
    biased = sample(logits, parameters, numbers, numbers, zeros, zeros, None, torch.full((40,), bias.data_ptr()))
    assert torch.equal(biased, sample(logits + bias, parameters, numbers, numbers, zeros, zeros))
    assert not torch.equal(biased, sample(logits, parameters, numbers, numbers, zeros, zeros))


def test_a_bias_comes_before_the_penalties() -> None:
    """Repetition divides what the bias made of a logit: 4 + 6 halved is 5, while 4 halved and 6 added would be 8."""
    counts = torch.zeros(VOCABULARY, dtype=torch.int32)
    counts[0] = 1
    assert choose(bias_of(t0=6.0, t5=6.0), 0.0, 1.0, 0.0, 0.0, 2.0, counts=counts) == 5


def test_rows_have_biases_of_their_own() -> None:
    """Each row has the bias of its own address, or none."""
    one, other = bias_of(t3=9.0), bias_of(t4=9.0)
    rows = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 3)
    zeros = torch.zeros(3, dtype=torch.int64)
    biases = torch.tensor([one.data_ptr(), 0, other.data_ptr()])
    assert sample(LOGITS.expand(3, -1), rows, zeros, zeros, zeros, zeros, None, biases).tolist() == [3, 0, 4]


def test_a_bias_does_not_mend_a_bad_row() -> None:
    """A row that is not finite gives token 0 whatever is added."""
    bad = LOGITS.clone()
    bad[0, 5] = torch.nan
    assert choose(bias_of(t7=50.0), logits=bad) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_card_adds_the_bias_as_the_host_does(temperature: float) -> None:
    """At the model's vocabulary a card gives the tokens of logits that the bias was added to before, on rows that have one and others."""
    rows, vocabulary = 8, 154_880
    generator = torch.Generator().manual_seed(1)
    bias, logits = 4 * torch.randn(vocabulary, generator=generator), torch.randn((rows, vocabulary), generator=generator)
    parameters = torch.tensor([[temperature, 0.9, 50.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * rows)
    own, none, numbers = bias.cuda(), torch.zeros(rows, dtype=torch.int64).cuda(), torch.arange(rows).cuda()
    biases = torch.where(numbers % 2 == 0, own.data_ptr(), 0)
    added = torch.where(numbers[:, None] % 2 == 0, logits.cuda() + own, logits.cuda())
    got = sample(logits.cuda(), parameters.cuda(), numbers, numbers, none, none, None, biases)
    assert torch.equal(got, sample(added, parameters.cuda(), numbers, numbers, none, none))
    assert not torch.equal(got, sample(logits.cuda(), parameters.cuda(), numbers, numbers, none, none))
