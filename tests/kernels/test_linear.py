"""Products of rows with weights: right to float32, and the same bits in any company."""

import pytest
import torch

from kernels.linear import heads_linear, linear

# Widths whose rows do not fill 64 bytes, and 1 to 8 outputs, are where a library product follows the place of a row.
SHAPES = [(256, 768), (1, 1), (7, 5), (7, 8), (33, 3), (16, 1), (100, 8), (40, 24), (1024, 2), (65, 257)]


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_linear_agrees_with_float64(width, outputs, poisoned_empty):
    """Each output is the float64 dot product to within float32 rounding of `width` sums."""
    torch.manual_seed(width)
    for rows in (0, 1, 7, 8, 9, 65):
        x, weight = torch.randn(rows, width), torch.randn(outputs, width)
        got = linear(x, weight)
        wanted = x.double() @ weight.double().t()
        size = x.double().abs() @ weight.double().abs().t()
        assert got.shape == (rows, outputs)
        assert bool(((got - wanted).abs() <= 2e-7 * (width + 2) ** 0.5 * size + 1e-30).all())


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_linear_row_does_not_see_its_company(width, outputs, assert_row_invariant):
    """A row has the same bits alone, among 1 to 65 rows, and at any place among them."""
    torch.manual_seed(outputs)
    x, weight = torch.randn(13, width), torch.randn(outputs, width)
    assert_row_invariant(lambda picked: linear(x[picked], weight), 13)


@pytest.mark.parametrize("offset", [1, 2, 4, 7, 16])
def test_linear_does_not_see_alignment_or_strides(offset, assert_same_bits):
    """Rows that start anywhere in memory, or lie column by column, give the bits of a fresh copy."""
    torch.manual_seed(offset)
    weight = torch.randn(5, 48)
    memory = torch.full((16 * 48 + 16,), float("nan"))
    x = memory[offset : offset + 16 * 48].view(16, 48)
    x.copy_(torch.randn(16, 48))
    assert_same_bits(linear(x, weight), linear(x.clone(), weight))
    assert_same_bits(linear(x.t().contiguous().t(), weight), linear(x.clone(), weight))


def test_linear_keeps_nan_in_its_row(assert_same_bits):
    """A row of NaN beside others changes none of them."""
    torch.manual_seed(0)
    x, weight = torch.randn(9, 33), torch.randn(6, 33)
    clean = linear(x, weight)
    x[4] = float("nan")
    got = linear(x, weight)
    assert bool(got[4].isnan().all())
    keep = [row for row in range(9) if row != 4]
    assert_same_bits(got[keep], clean[keep])


@pytest.mark.parametrize(("heads", "width", "outputs"), [(8, 64, 128), (8, 128, 64), (5, 7, 9), (3, 33, 3), (1, 24, 1)])
def test_heads_linear_agrees_with_float64(heads, width, outputs, poisoned_empty):
    """Each head's outputs are the float64 product with that head's weight to within float32 rounding."""
    torch.manual_seed(heads)
    for rows in (0, 1, 8, 9, 65):
        x, weight = torch.randn(rows, heads, width), torch.randn(heads, outputs, width)
        wanted = torch.einsum("tnk,nmk->tnm", x.double(), weight.double())
        size = torch.einsum("tnk,nmk->tnm", x.double().abs(), weight.double().abs())
        got = heads_linear(x, weight)
        assert got.shape == (rows, heads, outputs)
        assert got.is_contiguous()
        assert bool(((got - wanted).abs() <= 2e-7 * (width + 2) ** 0.5 * size + 1e-30).all())


@pytest.mark.parametrize(("heads", "width", "outputs"), [(8, 64, 128), (5, 7, 9), (3, 33, 3), (1, 24, 1), (4, 64, 1), (4, 40, 2)])
def test_heads_linear_row_does_not_see_its_company(heads, width, outputs, assert_row_invariant):
    """A row's heads have the same bits alone, among 1 to 65 rows, and at any place, also as a slice of wider heads."""
    torch.manual_seed(width)
    wide, weight = torch.randn(13, heads, width + 3), torch.randn(heads, width, outputs).transpose(1, 2)
    assert_row_invariant(lambda picked: heads_linear(wide[picked][:, :, 1 : 1 + width], weight), 13)
    assert_row_invariant(lambda picked: heads_linear(wide[picked][:, :, :width], weight.contiguous()), 13)
