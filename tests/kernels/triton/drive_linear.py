"""Interpreted products: the reference's own tests, then bf16 and block-FP8 weights, splits, and company."""

import company
import interpreted
import torch

from kernels.linear import BlockFp8, heads_linear, kernel, linear


def weights_narrower_than_rows() -> None:
    """bf16 and FP8 weights under float32 rows give the float64 product of their exact values to float32 rounding."""
    torch.manual_seed(1)
    for rows, outputs, width in ((1, 65, 300), (17, 3, 128), (2, 130, 129)):
        x = torch.randn(rows, width)
        narrow = torch.randn(outputs, width).bfloat16()
        company.near("bf16", linear(x, narrow), x.double() @ narrow.double().t(), 2e-6)
        shape = (-(-outputs // 128), -(-width // 128))
        fp8 = BlockFp8(torch.randn(outputs, width).to(torch.float8_e4m3fn), torch.rand(shape) + 0.1)
        wanted = x.double() @ fp8.dequantised(torch.float64).t()
        company.near("FP8", linear(x, fp8), wanted, 2e-6)
        company.near("FP8 bf16", linear(x.bfloat16(), fp8), x.bfloat16().double() @ fp8.dequantised(torch.float64).t(), 2**-7)


def bf16_rows() -> None:
    """bf16 rows by bf16 weights give the exact product rounded once (cut, in the interpreter)."""
    torch.manual_seed(2)
    x, weight = torch.randn(5, 4, 40).bfloat16()[:, 1:3], torch.randn(2, 70, 40).bfloat16()
    wanted = torch.einsum("tnk,nmk->tnm", x.double(), weight.double())
    company.near("heads", heads_linear(x, weight), wanted, 2**-7)
    company.near("one", linear(x[:, 0], weight[0]), wanted[:, 0], 2**-7)


def splits_follow_the_weight() -> None:
    """A wide weight is summed in splits, whatever the rows, and a row's bits do not follow its company."""
    assert kernel.splits_of(1, 1024, 64) == 8
    assert kernel.splits_of(kernel.PROGRAMS, 1024, 64) == 1
    assert kernel.splits_of(1, 7 * 128, 128) == 1
    torch.manual_seed(3)
    x, weight = torch.randn(4, 520), torch.randn(5, 520)
    company.near("split", linear(x, weight), x.double() @ weight.double().t(), 2e-6)
    company.row_invariant(lambda picked: linear(x[picked], weight), 4)
    company.row_invariant(lambda picked: linear(x[picked], weight.bfloat16()), 4)
    heads, per_head = torch.randn(3, 2, 33), torch.randn(2, 9, 33)
    company.row_invariant(lambda picked: heads_linear(heads[picked], per_head), 3)


def main() -> None:
    weights_narrower_than_rows()
    bf16_rows()
    splits_follow_the_weight()
    interpreted.run_reference_tests("test_linear.py", without=("company", "256-768", "65-257", "1024-2", "8-128-64"))


if __name__ == "__main__":
    main()
