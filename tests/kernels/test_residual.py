"""The residual sum: the three operations it stands for, in their order, with their roundings."""

import pytest
import torch

from kernels.norm import rms_norm
from kernels.residual import add_norm

INFINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("width", [1, 7, 64, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_is_stored_rounded_and_normed(width, dtype):
    """The state becomes the sum in its own dtype, and the result is the norm of exactly that; healthy rows raise no flag."""
    torch.manual_seed(width)
    x, branch = (torch.randn(5, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    wanted = (x.double() + branch.double()).to(dtype)
    bad = torch.full((5,), -1)
    normed = add_norm(x, branch, weight, 1e-5, bad, 3)
    assert torch.equal(x, wanted)
    assert normed.dtype == dtype
    assert bool(((normed.double() - rms_norm(wanted, weight, 1e-5).double()).abs() <= 2**-6 * normed.double().abs() + 1e-6).all())
    assert bad.tolist() == [-1] * 5


@pytest.mark.parametrize("value", INFINITE)
def test_first_layer_that_broke_a_row_is_kept(value):
    """A row that is not finite is flagged with the layer, once; an earlier flag stays, other rows stay clean."""
    x, branch = torch.ones(4, 33), torch.zeros(4, 33)
    branch[1, 32], x[2, 0], branch[3, 5] = value, value, value
    bad = torch.tensor([-1, -1, -1, 2])
    add_norm(x, branch, torch.ones(33), 1e-5, bad, 7)
    assert bad.tolist() == [-1, 7, 7, 2]


def test_sum_that_overflows_is_flagged():
    """Two finite values whose sum is past the largest bfloat16 are not a finite row."""
    large = torch.full((1, 8), 3e38).bfloat16()
    bad = torch.tensor([-1])
    add_norm(large.clone(), large, torch.ones(8).bfloat16(), 1e-5, bad, 0)
    assert bad.tolist() == [0]


def test_company_changes_no_bit():
    """A row has the same bits alone and among others."""
    torch.manual_seed(1)
    x, branch, weight = torch.randn(9, 65), torch.randn(9, 65), torch.randn(65)
    together = add_norm(x.clone(), branch, weight, 1e-6, torch.full((9,), -1), 0)
    for row in range(9):
        alone = add_norm(x[row : row + 1].clone(), branch[row : row + 1], weight, 1e-6, torch.full((1,), -1), 0)
        assert torch.equal(alone[0], together[row])
