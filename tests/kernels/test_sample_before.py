"""Sampling rows that come after drafts: tokens not counted yet weigh as counted ones do."""

import pytest
import torch

from kernels.sample import count_token, sample

VOCABULARY = 40


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("penalty", [(2.5, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.8), (1.4, 0.5, 0.3)])
def test_drafts_before_a_row_weigh_as_counted_tokens(temperature: float, penalty: tuple[float, float, float]) -> None:
    """A row behind drafts gives the token that it gives once they are counted, repeated drafts included, and counts nothing itself."""
    logits = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(3))
    parameters = torch.tensor([[temperature, 1.0, 0.0, 0.0, *penalty, 0.0]] * 12)
    seeds, positions, seen = torch.arange(12), torch.arange(12) * 31, torch.zeros(12, dtype=torch.int64)
    counts = torch.zeros((12, VOCABULARY), dtype=torch.int32)
    addresses = torch.tensor([row.data_ptr() for row in counts])
    plain = sample(logits, parameters, seeds, positions, seen, addresses)
    before = torch.stack([plain, plain, (plain + 1) % VOCABULARY], dim=1)
    before[::3, 1:] = -1
    ahead = sample(logits, parameters, seeds, positions, seen, addresses, before)
    assert not counts.any()
    for column in before.T:
        count_token(torch.where(column >= 0, addresses, 0), column)
    assert torch.equal(ahead, sample(logits, parameters, seeds, positions, seen, addresses))
    assert not torch.equal(ahead, plain), "the penalties change nothing here"


def test_a_row_without_counts_ignores_what_came_before() -> None:
    """Without an address nothing is penalised, whatever the drafts."""
    logits = torch.tensor([[1.0, 0.9]])
    zero = torch.zeros(1, dtype=torch.int64)
    row = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0]])
    assert sample(logits, row, zero, zero, zero, zero, torch.tensor([[0, 0]])).tolist() == [0]
