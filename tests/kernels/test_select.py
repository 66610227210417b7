"""Selections: exactly min(k, n) distinct valid positions whatever the scores, and the right ones."""

import math

import pytest
import torch

from kernels.select import reference, select

NAN, INF = float("nan"), float("inf")


def _select(scores, first, last, k):
    out = torch.full((scores.shape[0], k), 123_456, dtype=torch.int32)
    select(scores, torch.tensor(first), torch.tensor(last), k, out)
    return out


def _plain(scores, first, last, k):
    """One row by Python's sort: NaN last, more first, then the lower position."""
    ranked = sorted(range(first, last), key=lambda p: (math.isnan(scores[p]), 0.0 if math.isnan(scores[p]) else -scores[p], p))
    picks = sorted(ranked[:k])
    return picks + [-1] * (k - len(picks))


def _assert_as_plain(scores, first, last, k):
    got = _select(scores, first, last, k).tolist()
    for row, picks in enumerate(scores.tolist()):
        assert got[row] == _plain(picks, first[row], last[row], k), f"row {row}, range {first[row]}..{last[row]}"


@pytest.mark.parametrize("k", [1, 8, 63, 64])
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_range_lengths_around_k(k, around):
    """Ranges of 0, 1, k-1, k, k+1 and more positions give exactly the plain answer, garbage outside them unseen."""
    torch.manual_seed(k)
    lengths = [0, 1, 2, max(k + around, 0), 2 * k + 1, 200]
    scores = torch.randn(len(lengths), 300)
    first = [0, 7, 3, 1, 0, 64]
    last = [begin + length for begin, length in zip(first, lengths, strict=True)]
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        scores[row, :begin], scores[row, end:] = INF, NAN
        if row % 2:
            scores[row, :begin], scores[row, end:] = NAN, INF
    _assert_as_plain(scores, first, last, k)


def test_all_scores_equal():
    """When all scores are equal the lowest k positions of the range are taken."""
    for value in (0.0, -1.5, INF, -INF, NAN):
        scores = torch.full((3, 9000), value)
        got = _select(scores, [0, 1, 8990], [9000, 9000, 9000], 100)
        assert got[0].tolist() == list(range(100))
        assert got[1].tolist() == list(range(1, 101))
        assert got[2].tolist() == [*range(8990, 9000), *[-1] * 90]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_five_thousand_ties_at_the_cut(zero):
    """Of 5,000 equal scores at the cut the lowest positions fill the places left, and -0.0 ties with 0.0."""
    torch.manual_seed(1)
    scores = -1.0 - torch.rand(2, 12_000)
    places = torch.randperm(12_000)
    tied, above = places[:5000], places[5000:5040]
    scores[:, tied] = 0.0
    scores[:, tied[::2]] = zero
    scores[0, above] = 1.0
    got = _select(scores, [0, 0], [12_000, 12_000], 256)
    lowest = sorted(tied.tolist())
    assert got[0].tolist() == sorted(above.tolist() + lowest[:216])
    assert got[1].tolist() == lowest[:256]


def test_minus_infinity_is_a_valid_score():
    """-inf is taken when better scores run out, in order of position, and before NaN."""
    scores = torch.tensor([[-INF, 2.0, -INF, NAN, -INF, 1.0, NAN]])
    assert _select(scores, [0], [7], 4).tolist() == [[0, 1, 2, 5]]
    assert _select(scores, [0], [7], 6).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert _select(scores, [0], [7], 9).tolist() == [[0, 1, 2, 3, 4, 5, 6, -1, -1]]


def test_nan_of_either_sign_ranks_lowest():
    """NaN with any sign bit and payload is chosen only when nothing else is left."""
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1, 0x7FFFFFFF, -0x7FFFFF], dtype=torch.int32)
    nans = bits.view(torch.float32)
    assert bool(nans.isnan().all())
    scores = torch.cat([nans, torch.tensor([-INF, -3.4e38, 1e-45, -1e-45])])[None]
    assert _select(scores, [0], [10], 4).tolist() == [[6, 7, 8, 9]]
    assert _select(scores, [0], [10], 3).tolist() == [[7, 8, 9]]
    assert _select(scores, [0], [10], 6).tolist() == [[0, 1, 6, 7, 8, 9]]


def test_coarse_scores_in_many_bands():
    """Rows of heavily tied scores over ranges of their own agree with the plain answer in every band of rows."""
    torch.manual_seed(2)
    rows, columns = 90, 4096  # a band holds 64 rows here
    scores = torch.randint(-4, 4, (rows, columns)).float()
    scores[torch.rand(rows, columns) < 0.01] = NAN
    scores[torch.rand(rows, columns) < 0.01] = -INF
    first = torch.randint(0, 50, (rows,)).tolist()
    last = torch.randint(40, columns + 1, (rows,)).tolist()
    _assert_as_plain(scores, first, [max(begin, end) for begin, end in zip(first, last, strict=True)], 33)


@pytest.mark.parametrize("columns", [31, 32, 33, 63, 64, 65, 127, 129, 500])
def test_long_rows_are_narrowed_without_loss(columns, monkeypatch):
    """Around every width at which rows are narrowed first, few and many ties, NaN and -inf give the plain answer."""
    monkeypatch.setattr(reference, "_NARROW_VALUES", 0)
    torch.manual_seed(columns)
    scores = torch.randn(24, columns)
    scores[6:12] = scores[6:12].round()
    scores[12:] = torch.randint(0, 2, (12, columns)).float() - 0.5
    scores[14:18][torch.rand(4, columns) < 0.7] = NAN
    scores[18:20] = NAN
    scores[18, columns // 2] = 1.0
    scores[20:22][torch.rand(2, columns) < 0.9] = -INF
    first, last = [row % 4 for row in range(24)], [columns - row % 5 for row in range(24)]
    for row in range(24):  # a row that must choose NaN or -inf takes its whole band another way, so each also goes alone
        _assert_as_plain(scores[row : row + 1], first[row : row + 1], last[row : row + 1], 8)
    _assert_as_plain(scores, first, last, 8)
    _assert_as_plain(scores[:12], first[:12], last[:12], 8)


def test_selection_does_not_see_its_company():
    """A row's selection is the same alone, beside others with longer ranges, and in a strided buffer."""
    torch.manual_seed(3)
    scores = torch.randn(17, 3000)
    first, last = [row % 3 for row in range(17)], [100 * row + 5 for row in range(17)]
    together = _select(scores, first, last, 64)
    wide = torch.full((17, 3500), NAN)
    wide[:, 200:3200] = scores
    assert torch.equal(_select(wide[:, 200:3200], first, last, 64), together)
    for row in range(17):
        assert torch.equal(_select(scores[row : row + 1].clone(), first[row : row + 1], last[row : row + 1], 64)[0], together[row])


def test_nothing_to_choose():
    """Empty ranges, last before first, no rows and no places give only -1, or nothing."""
    assert _select(torch.full((3, 10), NAN), [0, 5, 10], [0, 5, 2], 3).tolist() == [[-1] * 3] * 3
    out = torch.empty(0, 3, dtype=torch.int32)
    select(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 3, out)
    assert _select(torch.zeros(2, 10), [0, 0], [10, 10], 0).shape == (2, 0)


def test_select_writes_into_a_slice():
    """An output that is part of a larger buffer is written in full and nothing beside it."""
    buffer = torch.full((4, 8), 77, dtype=torch.int32)
    select(torch.zeros(2, 5), torch.tensor([0, 0]), torch.tensor([5, 1]), 3, buffer[1:3, 2:5])
    assert buffer[1:3, 2:5].tolist() == [[0, 1, 2], [0, -1, -1]]
    buffer[1:3, 2:5] = 77
    assert bool((buffer == 77).all())
