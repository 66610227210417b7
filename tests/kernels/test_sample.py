"""kernels/sample: exact draws, filters with ties, penalties, rows without company, and rows that are not numbers."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sample import count_token, log_probabilities, sample, top_logprobs
from kernels.sample.noise import gumbel, philox, uniform

INF, NAN = math.inf, math.nan


def parameters(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, repetition: float = 1.0, presence: float = 0.0,
    frequency: float = 0.0,
) -> list[float]:  # fmt: skip
    return [temperature, top_p, float(top_k), min_p, repetition, presence, frequency, 0.0]


def draw(
    logits: Tensor, row: list[float], *, seeds: Tensor | None = None, positions: Tensor | None = None, seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample every row with the same parameters and the same counts."""
    rows = logits.shape[0]
    zeros = torch.zeros(rows, dtype=torch.int64)
    return sample(
        logits,
        torch.tensor([row] * rows),
        zeros if seeds is None else seeds,
        zeros if positions is None else positions,
        zeros if seen is None else zeros + seen.data_ptr(),
        zeros if counts is None else zeros + counts.data_ptr(),
    )


def draws(logits: list[float], row: list[float], rows: int = 800, seed: int = 7) -> Tensor:
    """Tokens of one distribution at many positions."""
    return draw(
        torch.tensor([logits]).expand(rows, -1), row, seeds=torch.full((rows,), seed), positions=torch.arange(rows, dtype=torch.int64)
    )


def support(logits: list[float], row: list[float]) -> set[int]:
    return set(draws(logits, row, rows=300).tolist())


def chi_square(tokens: Tensor, expected: list[float]) -> float:
    """The p-value of the counts under the expected probabilities; 0 if an impossible token was drawn."""
    wanted = torch.tensor(expected, dtype=torch.float64) * tokens.shape[0]
    found = torch.bincount(tokens, minlength=len(expected)).double()
    possible = wanted > 0
    if bool((found[~possible] > 0).any()):
        return 0.0
    statistic = ((found - wanted)[possible] ** 2 / wanted[possible]).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def logs(*chances: float) -> list[float]:
    return [math.log(chance) if chance else -INF for chance in chances]


# Noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_the_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Philox-4x32-10 gives the known answers that its authors published."""
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), key)) == words


def test_uniforms_are_open_and_fill_the_interval() -> None:
    """Uniforms lie strictly between 0 and 1 and every thousandth of the interval gets its share."""
    numbers = uniform(3, 5, torch.arange(200_000))
    assert float(numbers.min()) > 0.0
    assert float(numbers.max()) < 1.0
    assert chi_square((numbers * 1000).long(), [1 / 1000] * 1000) > 1e-4


def test_gumbel_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest word give finite noise, in order."""
    for word, low, high in ((0, 22.8, 23.0), (0xFFFFFFFF, -2.9, -2.7)):
        monkeypatch.setattr("kernels.sample.noise.philox", lambda counters, keys, word=word: (np.array([word], dtype=np.uint64),) * 4)
        assert low < float(gumbel(0, 0, torch.tensor([0]))) < high


def test_noise_depends_on_every_bit_of_its_arguments() -> None:
    """Changing the seed's or the position's high word, or a sign, changes the noise."""
    ids = torch.arange(4)
    arguments = [(1, 1), (1 + 2**32, 1), (1, 1 + 2**32), (-1, 1), (2**63 - 1, 1), (-(2**63), 1), (1, 2)]
    rows = {tuple(gumbel(seed, position, ids).tolist()) for seed, position in arguments}
    assert len(rows) == len(arguments)


# Distributions


CHANCES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
TEMPERED = [chance**2 for chance in CHANCES]  # temperature 0.5


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (parameters(), CHANCES),
        (parameters(temperature=0.5), TEMPERED),
        (parameters(top_k=3), [0.4, 0.25, 0.15, 0, 0, 0]),
        (parameters(top_p=0.7), [0.4, 0.25, 0.15, 0, 0, 0]),
        (parameters(min_p=0.2), [0.4, 0.25, 0.15, 0.1, 0, 0]),
        # top-p counts what top-k left: 0.4/0.8 + 0.25/0.8 = 0.8125 reaches 0.75.
        (parameters(top_k=3, top_p=0.75), [0.4, 0.25, 0, 0, 0, 0]),
        (parameters(temperature=0.5, top_k=5, top_p=0.99, min_p=0.05), [0.16, 0.0625, 0.0225, 0.01, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_exact_distribution(row: list[float], expected: list[float]) -> None:
    """Frequencies fit the exact probabilities after each filter (chi-square, p > 1e-4) in any order of the vocabulary."""
    total = sum(expected)
    exact = [chance / total for chance in expected]
    assert chi_square(draws(logs(*CHANCES), row), exact) > 1e-4
    assert chi_square(draws(logs(*reversed(CHANCES)), row, seed=-11), exact[::-1]) > 1e-4


def test_seeds_draw_from_the_distribution_too() -> None:
    """At one position, different seeds give independent draws."""
    rows = 1200
    tokens = draw(torch.tensor([logs(*CHANCES)]).expand(rows, -1), parameters(), seeds=torch.arange(rows) - rows // 2)
    assert chi_square(tokens, CHANCES) > 1e-4


def test_neighbouring_positions_are_independent() -> None:
    """Pairs of neighbouring draws have the product distribution."""
    tokens = draws(logs(0.5, 0.3, 0.2), parameters())
    pairs = tokens[0::2] * 3 + tokens[1::2]
    assert chi_square(pairs, [a * b for a in (0.5, 0.3, 0.2) for b in (0.5, 0.3, 0.2)]) > 1e-4


def test_large_vocabulary_is_sampled_to_its_tail() -> None:
    """In a flat vocabulary of 10,000 each tenth of it is drawn equally often."""
    tokens = draws([0.0] * 10_000, parameters(), rows=400)
    assert chi_square(tokens // 1000, [0.1] * 10) > 1e-4


def test_a_row_repeats_exactly() -> None:
    """The same arguments give the same token; another position gives, somewhere, another."""
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(1))
    row, seeds = parameters(top_p=0.95), torch.arange(16)
    first = draw(logits, row, seeds=seeds)
    assert first.tolist() == draw(logits.clone(), row, seeds=seeds).tolist()
    assert first.tolist() != draw(logits, row, seeds=seeds, positions=torch.ones(16, dtype=torch.int64)).tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 64])
def test_a_row_does_not_depend_on_its_company(rows: int) -> None:
    """Tokens and log-probability bits of a row are those it has alone, whatever is beside it, NaN rows included."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 1037, generator=generator) * 3
    logits[1::3] = NAN
    table = torch.tensor(
        [parameters(0.5 + 0.1 * (i % 5), 0.9 + 0.02 * (i % 6), (0, 40, 1037, 1)[i % 4], 0.01 * (i % 3)) for i in range(rows)]
    )
    seeds, positions = torch.arange(rows) * 977 - 5, torch.arange(rows) + 2**33
    zeros = torch.zeros(rows, dtype=torch.int64)
    together = sample(logits, table, seeds, positions, zeros, zeros)
    chances = log_probabilities(logits)
    for i in range(rows):
        one = slice(i, i + 1)
        alone = sample(logits[one].clone(), table[one], seeds[one], positions[one], zeros[one], zeros[one])
        assert int(alone) == int(together[i])
        assert torch.equal(log_probabilities(logits[one].clone())[0].view(torch.int32), chances[i].view(torch.int32))


# Greedy


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_temperature_zero_takes_the_first_of_the_largest(size: int) -> None:
    """Greedy gives the lowest id among equal largest logits, for any width."""
    for first in {0, size // 2, size - 1}:
        logits = torch.zeros(1, size)
        logits[0, first:] = 5.0
        assert draw(logits, parameters(temperature=0)).tolist() == [first]


def test_temperature_zero_ignores_filters_and_seed() -> None:
    """Greedy gives the same token for any top-p, top-k, min-p and seed."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for row in (parameters(0, 0.01, 1, 1.0), parameters(0, 1.0, 0, 0.0)):
        assert draw(logits, row, seeds=torch.tensor([99])).tolist() == [1]


def test_a_tiny_temperature_is_greedy() -> None:
    """Temperatures near zero overflow to the largest logit, not to NaN."""
    for temperature in (1e-3, 1e-30, 1e-38):
        assert support([0.0, 1.0, 0.5], parameters(temperature=temperature)) == {1}


# Filters: edges and ties


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {0}), (2, {0, 1}), (3, {0, 1, 2}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3}), (0, {0, 1, 2, 3})]
)
def test_top_k_keeps_exactly_k_and_ties_go_to_lower_ids(top_k: int, kept: set[int]) -> None:
    """With all equal, top-k keeps the k lowest ids; 0 and k beyond the vocabulary keep all."""
    assert support([1.0] * 4, parameters(top_k=top_k)) == kept


def test_top_k_tie_at_the_cut_keeps_the_lower_ids() -> None:
    """A tie that crosses the cut loses its higher ids only, wherever the larger values stand."""
    assert support([0.0, 1.0, 0.0, 1.0, 0.0], parameters(top_k=3)) == {0, 1, 3}


def test_top_k_of_many_equal_values_keeps_the_lowest_ids() -> None:
    """Of 5,000 equal values top-k 2 keeps ids 0 and 1."""
    assert support([0.5] * 5000, parameters(top_k=2)) == {0, 1}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, {0}), (0.51, {0, 1}), (0.74, {0, 1}), (0.76, {0, 1, 2}), (0.9, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_tokens_until_their_sum_reaches_it(top_p: float, kept: set[int]) -> None:
    """Top-p keeps the token that reaches the sum and none after it."""
    assert support(logs(0.5, 0.25, 0.125, 0.125), parameters(top_p=top_p)) == kept


def test_top_p_tie_at_the_cut_keeps_the_lower_ids() -> None:
    """Of four equal tokens top-p 0.6 keeps the three lowest ids."""
    assert support([2.0] * 4, parameters(top_p=0.6)) == {0, 1, 2}


def test_top_p_tie_is_by_id_after_top_k() -> None:
    """Ties stay in id order when top-k has sorted them first."""
    assert support([0.0, 2.0, 0.0, 2.0, 2.0], parameters(top_k=3, top_p=0.5)) == {1, 3}


@pytest.mark.parametrize(("min_p", "kept"), [(1e-6, {0, 1, 2}), (0.24, {0, 1, 2}), (0.26, {0, 1}), (0.51, {0}), (1.0, {0})])
def test_min_p_compares_with_the_most_likely_token(min_p: float, kept: set[int]) -> None:
    """Min-p keeps tokens of at least that share of the largest probability."""
    assert support(logs(4 / 7, 2 / 7, 1 / 7), parameters(min_p=min_p)) == kept


def test_min_p_one_keeps_equals_of_the_largest() -> None:
    """Min-p 1 keeps every token that ties with the most likely one."""
    assert support([3.0, 1.0, 3.0], parameters(min_p=1.0)) == {0, 2}


def test_min_p_comes_after_top_p() -> None:
    """Top-p sees what min-p will remove: 0.5 of the whole does not reach 0.6, 0.5 of the remaining 0.8 would."""
    assert support(logs(0.5, 0.3, 0.2), parameters(top_p=0.6, min_p=0.5)) == {0, 1}


def test_the_strictest_filters_together_leave_one_token() -> None:
    """Top-k 1, the smallest top-p and min-p 1 leave the most likely token."""
    assert support([0.0, 4.0, 4.0, 1.0], parameters(top_p=1e-6, top_k=1, min_p=1.0)) == {1}


def test_filters_see_the_distribution_after_temperature() -> None:
    """A temperature that flattens lets more tokens through min-p."""
    chances = logs(0.9, 0.1)
    assert support(chances, parameters(min_p=0.2)) == {0}
    assert support(chances, parameters(temperature=4.0, min_p=0.2)) == {0, 1}


def test_impossible_tokens_are_never_drawn() -> None:
    """-inf logits are never chosen, with and without filters that would have room for them."""
    logits = [-INF, 0.0, -INF, 0.0]
    for row in (parameters(), parameters(top_k=3), parameters(top_p=0.999999), parameters(temperature=0)):
        assert support(logits, row) <= {1, 3}


def test_equal_scores_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even the noise is equal the lower id is chosen, also after a sort."""
    monkeypatch.setattr("kernels.sample.reference.gumbel", lambda seed, position, token_ids: torch.zeros(token_ids.shape))
    for row in (parameters(), parameters(top_k=3), parameters(top_p=0.9)):
        assert support([0.0, 1.0, 0.5, 1.0], row) == {1}


# Penalties


def penalised(logits: list[float], seen: list[int], counts: list[int], **values: float) -> int:
    row = parameters(temperature=0, **values)  # type: ignore[arg-type]
    result = draw(torch.tensor([logits]), row, seen=torch.tensor(seen, dtype=torch.uint8), counts=torch.tensor(counts, dtype=torch.int32))
    return int(result)


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    """A repeated token's logit moves down on either side of zero, whether it came from the prompt or the output."""
    assert penalised([4.0, 2.1], [1, 0], [0, 0], repetition=2.0) == 1
    assert penalised([4.0, 1.9], [1, 0], [0, 0], repetition=2.0) == 0
    assert penalised([4.0, 2.1], [0, 0], [3, 0], repetition=2.0) == 1
    assert penalised([-1.0, -1.9], [1, 0], [0, 0], repetition=2.0) == 1
    assert penalised([-1.0, -2.1], [1, 0], [0, 0], repetition=2.0) == 0


def test_repetition_counts_a_token_once() -> None:
    """Being in the prompt and ten times in the output penalises no more than once."""
    assert penalised([4.0, 1.9], [1, 0], [10, 0], repetition=2.0) == 0


def test_presence_and_frequency_look_at_the_output_only() -> None:
    """A token of the prompt alone keeps its logit."""
    assert penalised([1.0, 0.9], [1, 0], [0, 0], presence=2.0, frequency=2.0) == 0


def test_presence_is_flat_and_frequency_grows() -> None:
    """Presence subtracts once, frequency once a time."""
    assert penalised([2.0, 1.4], [0, 0], [9, 0], presence=0.5) == 0
    assert penalised([2.0, 1.6], [0, 0], [9, 0], presence=0.5) == 1
    assert penalised([2.0, 0.6], [0, 0], [3, 0], frequency=0.5) == 1
    assert penalised([2.0, 0.4], [0, 0], [3, 0], frequency=0.5) == 0


def test_repetition_comes_before_the_subtractions() -> None:
    """(4 / 2) - 1 = 1 beats 0.9 and loses to 1.1; the other order would give 1.5."""
    assert penalised([4.0, 0.9], [0, 0], [1, 0], repetition=2.0, presence=1.0) == 0
    assert penalised([4.0, 1.1], [0, 0], [1, 0], repetition=2.0, presence=1.0) == 1


def test_negative_penalties_favour_what_was_said() -> None:
    """Negative presence and frequency raise a token."""
    assert penalised([1.0, 1.5], [0, 0], [2, 0], presence=-0.2, frequency=-0.2) == 0


def test_penalties_come_before_temperature_and_filters() -> None:
    """A penalised token falls out of top-k, and the distribution is that of the penalised logits over the temperature."""
    counts = torch.tensor([1, 0, 0], dtype=torch.int32)
    rows = 1200
    logits = torch.tensor([[1.5, 1.0, 0.5]]).expand(rows, -1)
    positions = torch.arange(rows)
    tokens = draw(logits, parameters(temperature=2.0, top_k=2, presence=1.25), positions=positions, counts=counts)
    share = 1 / (1 + math.exp(-0.25))
    assert chi_square(tokens, [0.0, share, 1 - share]) > 1e-4


def test_penalties_leave_the_logits_as_they_were() -> None:
    """Sampling does not write to its input."""
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    draw(logits, parameters(repetition=2.0, presence=1.0), seen=torch.ones(8, dtype=torch.uint8), counts=torch.ones(8, dtype=torch.int32))
    assert torch.equal(logits, before)


def test_rows_have_their_own_counts() -> None:
    """Each row reads the counts at its own address, and a row without any is not penalised."""
    first, second = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    addresses = torch.tensor([first.data_ptr(), second.data_ptr(), 0])
    zeros = torch.zeros(3, dtype=torch.int64)
    table = torch.tensor([parameters(temperature=0, presence=2.0)] * 3)
    assert sample(torch.tensor([[1.0, 0.9]] * 3), table, zeros, zeros, zeros, addresses).tolist() == [1, 0, 0]


def test_counting_adds_one_at_the_token() -> None:
    """Each row's count grows at its token, the same address twice grows twice, and address 0 is skipped."""
    first, second = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    addresses = torch.tensor([first.data_ptr(), second.data_ptr(), 0, second.data_ptr()])
    count_token(addresses, torch.tensor([4, 0, -1, 0]))
    assert first.tolist() == [0, 0, 0, 0, 1]
    assert second.tolist() == [2, 0, 0, 0, 0]


# Rows that are not numbers


@pytest.mark.parametrize("bad", [[NAN] * 4, [1.0, NAN, 0.0, 2.0], [0.0, INF, 0.0, 0.0], [-INF] * 4, [NAN, INF, -INF, 0.0]])
def test_rows_that_are_not_finite_give_token_zero(bad: list[float]) -> None:
    """NaN, +inf and all -inf give token 0 under any parameters, and the rows beside them are unharmed."""
    logits = torch.tensor([bad, [0.0, 9.0, 0.0, 0.0], bad])
    for row in (parameters(temperature=0), parameters(0.1), parameters(0.1, 0.5, 2, 0.1)):
        assert draw(logits, row).tolist() == [0, 1, 0]


def test_no_rows_give_no_tokens() -> None:
    """Zero rows are sampled to an empty int64 tensor."""
    tokens = sample(torch.empty(0, 4), torch.empty(0, 8), *(torch.empty(0, dtype=torch.int64) for _ in range(4)))
    assert tokens.dtype == torch.int64
    assert tokens.shape == (0,)


# Log probabilities


def test_log_probabilities_are_a_log_softmax() -> None:
    """They agree with float64 arithmetic to 1e-5 (float32 rounding at this size) and sum to one."""
    logits = torch.randn(3, 301, generator=torch.Generator().manual_seed(4)) * 5
    exact = torch.log_softmax(logits.double(), dim=-1)
    found = log_probabilities(logits)
    assert found.dtype == torch.float32
    assert float((found.double() - exact).abs().max()) < 1e-5
    assert torch.allclose(found.exp().sum(-1), torch.ones(3), atol=1e-5)


def test_log_probabilities_of_a_bad_row_are_nan_and_stay_there() -> None:
    """A NaN row gives NaN in its own row only."""
    found = log_probabilities(torch.tensor([[NAN, 0.0], [0.0, 0.0]]))
    assert bool(found[0].isnan().all())
    assert torch.allclose(found[1], torch.full((2,), math.log(0.5)))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_top_logprobs_are_sorted_with_ties_by_id(count: int) -> None:
    """The most likely come first, equals by id; more than the vocabulary gives the vocabulary."""
    values, ids = top_logprobs(torch.tensor([[-2.0, -1.0, -2.0, -1.0], [-1.0, -1.0, -1.0, -1.0]]), count)
    assert ids.tolist() == [[1, 3, 0, 2][:count], [0, 1, 2, 3][:count]]
    assert values.tolist() == [[-1.0, -1.0, -2.0, -2.0][:count], [-1.0] * min(count, 4)]


def test_top_logprobs_of_nan_rows_do_not_crash() -> None:
    """NaN counts as least likely, and a row of NaN gives the lowest ids."""
    _, ids = top_logprobs(torch.tensor([[NAN, -1.0, NAN, -2.0], [NAN] * 4]), 3)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
