"""Sampling under masks: which tokens of a row may come at all."""

import pytest
import torch

from kernels.sample import sample

VOCABULARY = 70  # three words, the last one ragged
ZEROS = torch.zeros(40, dtype=torch.int64)


def mask_of(*tokens: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """A bit a token, 32 a word."""
    words = [0] * -(-vocabulary // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


def choose(logits: torch.Tensor, rows: list[list[float]], masks: torch.Tensor | None, counts: int = 0) -> list[int]:
    count, numbers = len(rows), torch.arange(len(rows)) * 7919
    none = torch.zeros(count, dtype=torch.int64)
    return sample(logits, torch.tensor(rows), numbers, numbers, none, none + counts, None, None, masks).tolist()


@pytest.mark.parametrize(
    "row",
    [
        [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [1.3, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.6, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 5.0, 0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0], [1.0, 0.9, 60.0, 0.01, 1.0, 0.0, 0.0, 0.0],
    ],
)  # fmt: skip
def test_what_is_left_is_sampled_as_if_there_were_nothing_else(row: list[float]) -> None:
    """Tokens are those of logits whose other places are -inf, whatever filters there are: never one outside the mask."""
    allowed = [0, 31, 32, 33, 63, 64, 69]
    logits = torch.randn((40, VOCABULARY), generator=torch.Generator().manual_seed(3))
    logits[:, 1] = 9.0  # what is not allowed is far the best
    mask, left = mask_of(*allowed), torch.full_like(logits, -torch.inf)
    left[:, allowed] = logits[:, allowed]
    got = choose(logits, [row] * 40, torch.full((40,), mask.data_ptr()))
    assert set(got) <= set(allowed)
    assert got == choose(left, [row] * 40, None)
    assert choose(logits, [row] * 40, None) != got


def test_no_mask_moves_nothing() -> None:
    """Rows without an address, beside rows that have one, give what they give without any."""
    logits = torch.randn((3, VOCABULARY), generator=torch.Generator().manual_seed(4))
    row = [[0.9, 0.9, 20.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 3
    mask = mask_of(50)
    plain = choose(logits, row, None)
    assert choose(logits, row, ZEROS[:3]) == plain
    assert choose(logits, row, torch.tensor([0, mask.data_ptr(), 0])) == [plain[0], 50, plain[2]]


def test_a_single_token_comes_whatever_speaks_against_it() -> None:
    """Penalties, bias of the worst and filters leave the one token that may come; a mask of nothing gives token 0."""
    logits = torch.full((1, VOCABULARY), 5.0)
    logits[0, 66] = -80.0
    counts = torch.zeros(VOCABULARY, dtype=torch.int32)
    counts[66] = 9
    one, nothing = mask_of(66), mask_of()
    for row in ([0.0, 1.0, 0.0, 0.0, 1.9, 2.0, 2.0, 0.0], [0.01, 0.1, 1.0, 1.0, 1.9, 2.0, 2.0, 0.0]):
        assert choose(logits, [row], torch.tensor([one.data_ptr()]), counts.data_ptr()) == [66]
        assert choose(logits, [row], torch.tensor([nothing.data_ptr()]), counts.data_ptr()) == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_card_leaves_what_the_host_leaves(temperature: float) -> None:
    """At the model's vocabulary a card gives the tokens of logits that were masked before, on rows that have a mask and others."""
    rows, vocabulary = 8, 154_880
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((rows, vocabulary), generator=generator)
    allowed = torch.randperm(vocabulary, generator=generator)[:900]
    own, left = mask_of(*allowed.tolist(), vocabulary=vocabulary).cuda(), torch.full_like(logits, -torch.inf)
    left[:, allowed] = logits[:, allowed]
    parameters = torch.tensor([[temperature, 0.9, 50.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * rows).cuda()
    none, numbers = torch.zeros(rows, dtype=torch.int64).cuda(), torch.arange(rows).cuda()
    masks = torch.where(numbers % 2 == 0, own.data_ptr(), 0)
    got = sample(logits.cuda(), parameters, numbers, numbers, none, none, None, None, masks)
    wanted = sample(torch.where(numbers[:, None] % 2 == 0, left.cuda(), logits.cuda()), parameters, numbers, numbers, none, none)
    assert torch.equal(got, wanted)
    assert not torch.equal(got, sample(logits.cuda(), parameters, numbers, numbers, none, none))
