"""Index scores: the formula over real pages, page boundaries, poisoned tails, and the same bits in any company."""

import pytest
import torch

from kernels.index_score import index_scores
from kernels.layout import PAGE_KEYS, KeyLayout

NAN = float("nan")


def _pages(keys, layout, *, misalign=0):
    """Pages that hold `keys` [n, width] and NaN everywhere else, in an order unlike that of their addresses; keep the first alive."""
    dtype = torch.float32 if layout.encoding == "f32" else torch.bfloat16
    count = -(-keys.shape[0] // PAGE_KEYS)
    memory = torch.full((max(count, 1) * layout.page_bytes + 128,), 255, dtype=torch.uint8)  # 0xFFFF.. is NaN in both encodings
    start = (-memory.data_ptr()) % 64 + misalign
    addresses = []
    for page in range(count):
        place = start + (count - 1 - page) * layout.page_bytes
        stored = memory[place : place + layout.page_bytes].view(dtype).view(PAGE_KEYS, -1)
        part = keys[page * PAGE_KEYS : (page + 1) * PAGE_KEYS]
        stored[: part.shape[0], : layout.width] = part.to(dtype)
        addresses.append(memory.data_ptr() + place)
    return memory, torch.tensor(addresses, dtype=torch.int64)


def _scores(query, head_weights, keys, layout, *, misalign=0, extra=0):
    memory, pages = _pages(keys, layout, misalign=misalign)
    out = torch.full((query.shape[0], pages.shape[0] * PAGE_KEYS + extra), NAN)
    index_scores(query, head_weights, pages, keys.shape[0], layout, out)
    del memory
    return out


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (1, 1), (3, 40), (12, 6)])
@pytest.mark.parametrize("count", [1, 63, 1024, 1025])
def test_scores_agree_with_float64(encoding, heads, width, count, poisoned_empty):
    """Every key's score is the float64 formula on the stored keys to 1e-5 of its terms, though the rest of its page is NaN."""
    torch.manual_seed(count)
    layout = KeyLayout(encoding, width)
    query, head_weights, keys = torch.randn(9, heads, width), torch.randn(9, heads), torch.randn(count, width)
    stored = keys.double() if encoding == "f32" else keys.bfloat16().double()
    terms = (torch.einsum("thd,jd->thj", query.double(), stored) * width**-0.5).relu() * head_weights.double()[:, :, None] * heads**-0.5
    got = _scores(query, head_weights, keys, layout)[:, :count]
    bound = 1e-5 * (terms.abs().sum(1) + head_weights.double().abs().sum(1, keepdim=True))
    assert bool(((got - terms.sum(1)).abs() <= bound).all())
    assert bool((got < 0).any())  # negative head weights must show


def test_no_keys_and_no_rows():
    """Without keys nothing is written; without rows nothing happens."""
    layout = KeyLayout("f32", 8)
    out = torch.full((2, 4), 7.0)
    index_scores(torch.randn(2, 3, 8), torch.randn(2, 3), torch.empty(0, dtype=torch.int64), 0, layout, out)
    assert out.tolist() == [[7.0] * 4] * 2
    assert _scores(torch.randn(0, 3, 8), torch.randn(0, 3), torch.randn(5, 8), layout).shape == (0, PAGE_KEYS)


def test_columns_past_the_pages_are_left_alone():
    """A longer score buffer keeps what it held past the last page."""
    got = _scores(torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(1025, 8), KeyLayout("f32", 8), extra=5)
    assert bool(got[:, 2048:].isnan().all())
    assert not bool(got[:, :1025].isnan().any())


@pytest.mark.parametrize(("encoding", "heads", "width"), [("f32", 4, 64), ("bf16", 4, 64), ("f32", 3, 40), ("f32", 1, 7), ("bf16", 5, 6)])
def test_score_row_does_not_see_its_company(encoding, heads, width, assert_row_invariant):
    """A row's scores have the same bits alone, among 1 to 65 rows, and at any place."""
    torch.manual_seed(width)
    layout = KeyLayout(encoding, width)
    query, head_weights, keys = torch.randn(13, heads, width), torch.randn(13, heads), torch.randn(70, width)
    assert_row_invariant(lambda picked: _scores(query[picked], head_weights[picked], keys, layout)[:, :70], 13)


@pytest.mark.parametrize("width", [16, 40, 64])
def test_score_does_not_see_length_or_address(width, assert_same_bits):
    """A key's score has the same bits when later keys exist, whatever they hold, and wherever its page lies."""
    torch.manual_seed(width)
    layout = KeyLayout("f32", width)
    query, head_weights, keys = torch.randn(3, 4, width), torch.randn(3, 4), torch.randn(2100, width)
    whole = _scores(query, head_weights, keys, layout)
    for count in (1, 64, 1023, 1024, 1025, 2048):
        assert_same_bits(_scores(query, head_weights, keys[:count], layout)[:, :count], whole[:, :count])
        assert_same_bits(_scores(query, head_weights, keys[:count], layout, misalign=16)[:, :count], whole[:, :count])


def test_a_nan_key_and_a_nan_query_stay_where_they_are(assert_same_bits):
    """NaN in one key spoils its column only, NaN in one query its row only."""
    torch.manual_seed(4)
    layout = KeyLayout("f32", 64)
    query, head_weights, keys = torch.randn(10, 4, 64), torch.randn(10, 4), torch.randn(300, 64)
    clean = _scores(query, head_weights, keys, layout)[:, :300]
    query[9], keys[130] = NAN, NAN
    got = _scores(query, head_weights, keys, layout)[:, :300]
    assert bool(got[9].isnan().all())
    assert bool(got[:, 130].isnan().all())
    keep = [key for key in range(300) if key != 130]
    assert_same_bits(got[:9][:, keep], clean[:9][:, keep])
