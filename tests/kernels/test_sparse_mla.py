"""Sparse attention: the formula, unused picks, gathered against indexed, and the same bits in any company."""

import pytest
import torch

from kernels.sparse_mla import sparse_mla, sparse_mla_indexed

NAN = float("nan")
SHAPES = [(8, 128, 32, 256), (1, 1, 2, 1), (3, 24, 6, 9), (5, 40, 16, 64), (16, 33, 10, 7)]


def _history(heads, width, rope, picks, rows, positions):
    """Queries, a history and an ascending selection of 0 to `picks` positions a row; rows nobody selected are NaN."""
    selection = torch.full((rows, picks), -1, dtype=torch.int32)
    for row in range(rows):
        used = min([picks, 0, 1, picks - 1, picks // 2][row % 5], positions)
        selection[row, :used] = torch.randperm(positions)[:used].sort().values.int()
    latent, keys = torch.randn(positions, width), torch.randn(positions, rope)
    idle = torch.ones(positions, dtype=torch.bool)
    idle[selection[selection >= 0].long()] = False
    latent[idle], keys[idle] = NAN, NAN
    return torch.randn(rows, heads, width), torch.randn(rows, heads, rope), latent, keys, selection


def _gathered(latent, keys, selection):
    """The rows of each pick; NaN where a pick is unused."""
    at = selection.clamp_min(0).long()
    unused = (selection < 0)[:, :, None]
    return latent[at].masked_fill(unused, NAN), keys[at].masked_fill(unused, NAN)


@pytest.mark.parametrize(("heads", "width", "rope", "picks"), SHAPES)
def test_attention_agrees_with_float64(heads, width, rope, picks, poisoned_empty):
    """Each row is the float64 softmax over its used picks to 2e-5; NaN in unused picks and unselected rows never shows; no picks: zeros."""
    torch.manual_seed(width)
    query, query_rope, latent, keys, selection = _history(heads, width, rope, picks, 11, 300)
    scale = (width + rope) ** -0.5
    got = sparse_mla_indexed(query, query_rope, latent, keys, selection, scale)
    for row in range(11):
        at = selection[row][selection[row] >= 0].long()
        if at.numel() == 0:
            assert bool((got[row] == 0).all())
            continue
        logits = (query[row].double() @ latent[at].double().t() + query_rope[row].double() @ keys[at].double().t()) * scale
        wanted = torch.softmax(logits, 1) @ latent[at].double()
        assert bool(((got[row] - wanted).abs() <= 2e-5).all())


@pytest.mark.parametrize(("heads", "width", "rope", "picks"), SHAPES)
def test_gathered_and_indexed_give_the_same_bits(heads, width, rope, picks, assert_same_bits):
    """Rows gathered first, with NaN in unused picks, give the bits of rows read by position."""
    torch.manual_seed(picks)
    query, query_rope, latent, keys, selection = _history(heads, width, rope, picks, 11, 300)
    indexed = sparse_mla_indexed(query, query_rope, latent, keys, selection, 0.25)
    gathered = sparse_mla(query, query_rope, *_gathered(latent, keys, selection), selection, 0.25)
    assert_same_bits(gathered, indexed)
    assert not bool(gathered.isnan().any())


@pytest.mark.parametrize(("heads", "width", "rope", "picks"), SHAPES)
def test_attention_row_does_not_see_its_company(heads, width, rope, picks, assert_row_invariant):
    """A row has the same bits alone, among 1 to 65 rows, at any place, and as a slice of wider queries."""
    torch.manual_seed(heads)
    query, query_rope, latent, keys, selection = _history(heads, width, rope, picks, 13, 300)
    both = torch.cat([query, query_rope], 2)
    gathered, gathered_keys = _gathered(latent, keys, selection)

    def indexed(picked):
        wide = both[picked]
        return sparse_mla_indexed(wide[:, :, :width], wide[:, :, width:], latent, keys, selection[picked], 0.25)

    def first_gathered(picked):
        return sparse_mla(query[picked], query_rope[picked], gathered[picked], gathered_keys[picked], selection[picked], 0.25)

    assert_row_invariant(indexed, 13)
    assert_row_invariant(first_gathered, 13)


def test_attention_does_not_see_the_length_of_the_history(assert_same_bits):
    """Rows appended later, whatever they hold, change no bit of an earlier row's result."""
    torch.manual_seed(9)
    query, query_rope, latent, keys, selection = _history(4, 24, 8, 16, 6, 65)
    longer, longer_keys = torch.full((1000, 24), NAN), torch.full((1000, 8), NAN)
    longer[:65], longer_keys[:65] = latent, keys
    assert_same_bits(
        sparse_mla_indexed(query, query_rope, longer, longer_keys, selection, 0.2),
        sparse_mla_indexed(query, query_rope, latent, keys, selection, 0.2),
    )


def test_an_unused_pick_anywhere_counts_for_nothing():
    """A -1 between used picks, its row NaN, leaves the attention over the others."""
    torch.manual_seed(10)
    query, query_rope, latent, keys = torch.randn(1, 3, 16), torch.randn(1, 3, 4), torch.randn(9, 16), torch.randn(9, 4)
    latent[0], keys[0] = NAN, NAN  # position 0 is what a clamped -1 would read
    got = sparse_mla_indexed(query, query_rope, latent, keys, torch.tensor([[2, -1, 5, -1]], dtype=torch.int32), 0.3)
    logits = (query[0].double() @ latent[[2, 5]].double().t() + query_rope[0].double() @ keys[[2, 5]].double().t()) * 0.3
    assert bool(((got[0] - torch.softmax(logits, 1) @ latent[[2, 5]].double()).abs() < 1e-5).all())


def test_a_single_pick_returns_its_latent(assert_same_bits):
    """With one used pick the softmax is 1 and the result is that latent exactly, even for logits of 1e4."""
    torch.manual_seed(11)
    query, query_rope, latent, keys = torch.randn(1, 2, 8) * 1e3, torch.randn(1, 2, 2), torch.randn(5, 8), torch.randn(5, 2)
    got = sparse_mla_indexed(query, query_rope, latent, keys, torch.tensor([[3, -1, -1]], dtype=torch.int32), 1.0)
    assert_same_bits(got[0], latent[3].expand(2, 8))


def test_a_nan_query_spoils_its_row_only(assert_same_bits):
    """NaN in one query row reaches no other row."""
    torch.manual_seed(12)
    query, query_rope, latent, keys, selection = _history(4, 24, 8, 16, 6, 65)
    clean = sparse_mla_indexed(query, query_rope, latent, keys, selection, 0.2)
    query[2] = NAN
    got = sparse_mla_indexed(query, query_rope, latent, keys, selection, 0.2)
    assert bool(got[2].isnan().all())
    keep = [0, 1, 3, 4, 5]
    assert_same_bits(got[keep], clean[keep])


def test_attention_of_no_rows_and_of_an_empty_history():
    """No query rows give no rows; no history and no picks give zeros."""
    none = sparse_mla_indexed(torch.empty(0, 2, 8), torch.empty(0, 2, 4), torch.randn(3, 8), torch.randn(3, 4),
                              torch.empty(0, 5, dtype=torch.int32), 1.0)  # fmt: skip
    assert none.shape == (0, 2, 8)
    zeros = sparse_mla_indexed(torch.randn(2, 2, 8), torch.randn(2, 2, 4), torch.empty(0, 8), torch.empty(0, 4),
                               torch.full((2, 5), -1, dtype=torch.int32), 1.0)  # fmt: skip
    assert bool((zeros == 0).all())
