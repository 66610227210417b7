"""Interpreted sampling: token for token the reference over filters, ties, penalties and bad rows; noise and probabilities by themselves."""

import company
import interpreted
import torch
import triton
import triton.language as tl

from kernels.sample import count_token, kernel, reference, sample, top_logprobs
from kernels.sample.noise import gumbel
from kernels.select import kernel as choice

INF, NAN = float("inf"), float("nan")
VOCABULARY = 150


@triton.jit
def noise(seeds, positions, out, BLOCK: tl.constexpr):
    token = tl.arange(0, BLOCK)
    tl.store(out + token, kernel._gumbel(tl.load(seeds), tl.load(positions), token))


def noise_is_the_references() -> None:
    """Gumbel noise differs from the reference's by float32 rounding only, for seeds and positions of every size."""
    for seed, position in ((0, 0), (-1, 1), (2**62 + 5, 2**33 + 7), (123, 1_048_575)):
        out = torch.empty(256)
        noise[(1,)](torch.tensor([seed]), torch.tensor([position]), out, BLOCK=256)
        wanted = gumbel(seed, position, torch.arange(256))
        assert bool(((out - wanted).abs() <= 3e-7 * wanted.abs().clamp_min(1.0)).all()), f"seed {seed}, position {position}"


def compare(name: str, logits: torch.Tensor, rows: list[list[float]], seen: torch.Tensor, counts: torch.Tensor) -> None:
    """The same tokens from both forms, over raw logits that stay as they are."""
    count = len(rows)
    asked = (torch.tensor(rows), torch.arange(count) * 7919 - 3, torch.arange(count) * 2**31 + 5, seen, counts)
    before = logits.clone()
    got = sample(logits, *asked)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), f"{name}: the logits were changed"
    interpreted.same(name, got, reference.sample(logits, *asked))


def filters_agree() -> None:
    """Every filter alone and with others, over smooth and over heavily tied logits, gives the reference's token."""
    torch.manual_seed(1)
    rows = [[1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.3, 5.0, 0.5, 1.0, 0.0, 0.0, 0.0]]
    cuts = ((0.9, 0.0, 0.0), (0.2, 0.0, 0.0), (1.0, 20.0, 0.0), (1.0, 1.0, 0.05), (0.9, 20.0, 0.05), (0.2, 20.0, 0.0))
    rows += [[0.8, *cut, 1.0, 0.0, 0.0, 0.0] for cut in cuts]
    none = torch.zeros(len(rows), dtype=torch.int64)
    if interpreted.WHOLE:
        compare("smooth", torch.randn(len(rows), VOCABULARY) * 2, rows, none, none)
    tied = torch.randint(-2, 3, (len(rows), VOCABULARY)).float()
    tied[3:, ::3] = -INF
    compare("tied", tied, rows, none, none)


def penalties_agree() -> None:
    """Penalties from counts, from the prompt, from both or neither, give the reference's greedy and drawn tokens."""
    torch.manual_seed(2)
    seen = torch.randint(0, 2, (VOCABULARY,), dtype=torch.uint8)
    counts = torch.randint(0, 3, (VOCABULARY,), dtype=torch.int32)
    rows = [[t, 0.9, 30.0, 0.0, 1.7, 0.4, -0.3, 0.0] for t in (0.0, 0.0, 0.0, 1.1)]
    addresses = torch.tensor([seen.data_ptr(), 0, seen.data_ptr(), seen.data_ptr()]), torch.tensor([0] + [counts.data_ptr()] * 3)
    compare("penalties", torch.randn(4, VOCABULARY), rows, *addresses)
    before = torch.tensor([[5, 5, -1], [5, 5, 140], [-1, -1, -1], [0, 149, 0]])
    logits = torch.randn(4, VOCABULARY)
    logits[:, before[before >= 0]] += 3.0
    asked = (torch.tensor(rows), torch.arange(4), torch.arange(4), *addresses, before)
    got, wanted = sample(logits, *asked), reference.sample(logits, *asked)
    interpreted.same("drafts before", got, wanted)
    assert not torch.equal(wanted, reference.sample(logits, *asked[:-1])), "the drafts before a row change nothing here"


def biases_agree() -> None:
    """A bias is added before penalties, on the rows that have one, and gives the reference's greedy and drawn tokens."""
    torch.manual_seed(3)
    bias = torch.zeros(VOCABULARY)
    bias[149], bias[:100], bias[120] = 3.0, -100.0, 2.5
    counts = torch.randint(0, 3, (VOCABULARY,), dtype=torch.int32)
    rows = [[t, 0.9, 30.0, 0.0, 1.7, 0.4, -0.3, 0.0] for t in (0.0, 0.0, 1.1, 0.7)]
    none, counted = torch.zeros(4, dtype=torch.int64), torch.tensor([0, counts.data_ptr(), counts.data_ptr(), 0])
    biases = torch.tensor([bias.data_ptr(), 0, bias.data_ptr(), bias.data_ptr()])
    asked = (torch.randn(4, VOCABULARY), torch.tensor(rows), torch.arange(4), torch.arange(4), none, counted)
    got, wanted = sample(*asked, None, biases), reference.sample(*asked, None, biases)
    interpreted.same("biases", got, wanted)
    assert not torch.equal(wanted, reference.sample(*asked)), "the biases change nothing here"


def masks_agree() -> None:
    """Tokens outside a row's mask never come, through every filter, and what comes is the reference's; rows without one keep theirs."""
    torch.manual_seed(4)
    mask = torch.tensor([0b1001, 0, -(2**31), 5, 1 << 21], dtype=torch.int32)  # 0, 3, 95, 96, 98, 149
    counts = torch.randint(0, 3, (VOCABULARY,), dtype=torch.int32)
    rows = [
        [t, p, k, m, 1.3, 0.4, -0.3, 0.0] for t, p, k, m in ((0, 1, 0, 0), (1, 0.6, 0, 0), (1, 1, 30, 0), (1, 0.9, 4, 0.1), (1, 1, 0, 0))
    ]
    none, counted = torch.zeros(5, dtype=torch.int64), torch.tensor([0, counts.data_ptr(), counts.data_ptr(), 0, 0])
    masks = torch.tensor([mask.data_ptr()] * 4 + [0])
    asked = (torch.randn(5, VOCABULARY), torch.tensor(rows), torch.arange(5), torch.arange(5), none, counted, None, None)
    got, wanted = sample(*asked, masks), reference.sample(*asked, masks)
    interpreted.same("masks", got, wanted)
    assert set(got[:4].tolist()) <= {0, 3, 95, 96, 98, 149}
    assert not torch.equal(wanted, reference.sample(*asked)), "the masks change nothing here"
    assert got[4] == sample(*asked)[4]


def bad_rows_give_token_zero() -> None:
    """A NaN anywhere, an infinity, or nothing but -inf gives token 0 and leaves the other rows alone."""
    logits = torch.randn(5, VOCABULARY)
    logits[0, 140], logits[1, 3], logits[2] = NAN, INF, -INF
    none = torch.zeros(5, dtype=torch.int64)
    rows = ([1.0, 0.5, 9.0, 0.1, 1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    for row in interpreted.some(rows, 2):
        compare("bad rows", logits, [row] * 5, none, none)


def counting_and_log_probabilities() -> None:
    """One is added where an address is; the most likely tokens come in the reference's order, ties and NaN included."""
    counts = torch.zeros(2, 9, dtype=torch.int32)
    count_token(torch.tensor([counts[0].data_ptr(), 0, counts[1].data_ptr()]), torch.tensor([4, 5, 8]))
    assert counts.nonzero().tolist() == [[0, 4], [1, 8]]
    logprobs = torch.randint(-9, 0, (3, VOCABULARY)).float()
    logprobs[1, 10:] = NAN
    for count in (0, 1, 20, VOCABULARY + 1):
        for got, wanted in zip(top_logprobs(logprobs, count), reference.top_logprobs(logprobs, count), strict=True):
            assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)), f"{count} of each row"


def company_changes_no_token() -> None:
    """A row's token is the same alone and among others."""
    logits, number, none = torch.randn(3, 70), torch.arange(3), torch.zeros(3, dtype=torch.int64)
    row = torch.tensor([[0.9, 0.8, 9.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 3)
    company.row_invariant(lambda p: sample(logits[p], row[p], number[p], number[p], none[p], none[p]), 3, (1, 4))


def main() -> None:
    kernel.CHUNK, choice.CHUNK = 128, 128
    noise_is_the_references()
    counting_and_log_probabilities()
    bad_rows_give_token_zero()
    if interpreted.WHOLE:
        penalties_agree()
        biases_agree()
    masks_agree()
    filters_agree()
    company_changes_no_token()


if __name__ == "__main__":
    main()
