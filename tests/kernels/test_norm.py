"""Norms: the formula, the order of casts, and the same bits in any company."""

import pytest
import torch

from kernels.norm import join_norms, layer_norm, rms_norm

WIDTHS = [1, 2, 7, 24, 33, 64, 256, 1000]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_agrees_with_float64(width):
    """Every value is x over the root mean square, times the weight, to 2e-6 of its size."""
    torch.manual_seed(width)
    x, weight = torch.randn(9, width) * 30, torch.randn(width)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert bool(((rms_norm(x, weight, 1e-5) - wanted).abs() <= 2e-6 * wanted.abs()).all())


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_agrees_with_float64(width):
    """The mean is removed, the variance (not its unbiased kin) divided out, the bias added."""
    torch.manual_seed(width)
    x, weight, bias = torch.randn(9, width) * 3 + 5, torch.randn(width), torch.randn(width)
    wide = x.double()
    middle = wide - wide.mean(-1, keepdim=True)
    wanted = middle / (middle.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() + bias.double()
    # Removing a mean of 5 costs a few float32 roundings of values up to 14.
    assert bool(((layer_norm(x, weight, bias, 1e-6) - wanted).abs() <= 1e-4).all())


def test_rms_norm_eps_counts_for_tiny_rows():
    """A row of size 1e-3 is divided by sqrt(mean + eps), so two eps of 1e-5 and 1e-6 give results 2.3 times apart."""
    x = torch.full((1, 64), 1e-3)
    one = torch.ones(64)
    ratio = rms_norm(x, one, 1e-6) / rms_norm(x, one, 1e-5)
    assert bool(((ratio - (1.1e-5 / 2e-6) ** 0.5).abs() < 1e-3).all())


def test_rms_norm_rounds_before_the_weight():
    """A bf16 row is rounded to bf16 after normalising and again after the weight, not once at the end."""
    torch.manual_seed(3)
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed = exact.float().bfloat16()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, normed * weight)
    assert not torch.equal(got, (exact * weight.double()).bfloat16())  # the other order shows on these rows


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_row_does_not_see_its_company(width, assert_row_invariant):
    """A normalised row has the same bits alone, among 1 to 65 rows, at any place, and in any strides."""
    torch.manual_seed(width)
    x, weight, bias = torch.randn(13, width), torch.randn(width), torch.randn(width)

    def by_columns(picked):
        return x[picked].t().contiguous().t()

    assert_row_invariant(lambda picked: rms_norm(x[picked], weight, 1e-6), 13)
    assert_row_invariant(lambda picked: layer_norm(x[picked], weight, bias, 1e-6), 13)
    assert_row_invariant(lambda picked: rms_norm(x[picked] if len(picked) == 1 else by_columns(picked), weight, 1e-6), 13)
    assert_row_invariant(lambda picked: layer_norm(x[picked] if len(picked) == 1 else by_columns(picked), weight, bias, 1e-6), 13)


def test_norm_keeps_nan_in_its_row():
    """One NaN spoils its own row and no other."""
    x = torch.randn(3, 40)
    x[1, 7] = float("nan")
    for got in (rms_norm(x, torch.ones(40), 1e-6), layer_norm(x, torch.ones(40), torch.zeros(40), 1e-6)):
        assert got.isnan().all(1).tolist() == [False, True, False]
        assert not bool(got[[0, 2]].isnan().any())


def test_norm_of_no_rows():
    """No rows in, no rows out."""
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert layer_norm(torch.empty(0, 8), torch.ones(8), torch.zeros(8), 1e-6).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 33, 64])
def test_joined_norms_are_two_norms(dtype, width):
    """The halves are the norms of either input by its own weight; a float32 second input is rounded first."""
    generator = torch.Generator().manual_seed(width)
    first, second = (torch.randn(5, width + 7, generator=generator)[:, 7:] for _ in range(2))
    weights = [torch.randn(width, generator=generator).to(dtype) for _ in range(2)]
    joined = join_norms(first.to(dtype), weights[0], second, weights[1], 1e-5)
    assert joined.dtype == dtype
    assert joined.is_contiguous()
    assert torch.equal(joined[:, :width], rms_norm(first.to(dtype), weights[0], 1e-5))
    assert torch.equal(joined[:, width:], rms_norm(second.to(dtype), weights[1], 1e-5))
    assert join_norms(first[:0].to(dtype), weights[0], second[:0], weights[1], 1e-5).shape == (0, 2 * width)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [6144, 48, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_card_joins_norms(width, dtype):
    """One launch follows the CPU's two norms to rounding, of bf16 states kept in float32 too; a row has its bits in any company."""
    generator = torch.Generator().manual_seed(width)
    first, second = (torch.randn(17, width, generator=generator).to(dtype) for _ in range(2))
    weights = [torch.randn(width, generator=generator).to(dtype) for _ in range(2)]
    there = [weight.cuda() for weight in weights]
    wanted = join_norms(first, weights[0], second, weights[1], 1e-5).float()
    for kept in (second, second.float()):
        joined = join_norms(first.cuda(), there[0], kept.cuda(), there[1], 1e-5)
        error = (joined.float().cpu() - wanted).abs()
        assert bool((error <= (1e-5 if dtype == torch.float32 else 2**-6) * wanted.abs() + 1e-6).all())
        for row in range(17):
            alone = join_norms(first[row : row + 1].cuda(), there[0], kept[row : row + 1].cuda(), there[1], 1e-5)
            assert torch.equal(alone[0], joined[row])
