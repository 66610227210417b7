"""Interpreted products: the reference's own tests, then bf16 and block-FP8 weights, splits, and company."""

import company
import interpreted
import torch

from kernels.linear import BlockFp8, heads_linear, kernel, linear, tiling


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
    assert tiling.tiling_of(1, 32, 1024, wide=True).splits == 8
    assert tiling.tiling_of(tiling.PROGRAMS, 32, 1024, wide=True).splits == 1
    assert tiling.tiling_of(1, 5, 7 * 64, wide=True).splits == 1
    assert tiling.tiling_of(1, 5, 576, wide=True).splits == 3
    torch.manual_seed(3)
    x, weight = torch.randn(4, 570), torch.randn(5, 570)
    company.near("split", linear(x, weight), x.double() @ weight.double().t(), 2e-6)
    company.row_invariant(lambda picked: linear(x[picked], weight), 4)
    company.row_invariant(lambda picked: linear(x[picked], weight.bfloat16()), 4)
    half = x.bfloat16()
    company.row_invariant(lambda picked: linear(half[picked], weight.bfloat16()).float(), 4)
    heads, per_head = torch.randn(3, 2, 33), torch.randn(2, 9, 33)
    company.row_invariant(lambda picked: heads_linear(heads[picked], per_head), 3)


def float_weights_under_bf16_rows() -> None:
    """float32 weights under bf16 rows give the float64 product to float32 rounding, with splits and without."""
    torch.manual_seed(6)
    for outputs, width in ((5, 64), (40, 1500)):
        x, weight = torch.randn(3, width).bfloat16(), torch.randn(outputs, width)
        company.near(f"{width}", kernel.linear(x, weight, torch.float32), x.double() @ weight.double().t(), 2e-6)
        parts = kernel.linear_parts(x, weight)
        company.near("in splits", parts.sum(0), x.double() @ weight.double().t(), 2e-6)
    assert parts.shape[0] > 1


def every_kind_of_tiling() -> None:
    """One part or several, splits or none, steps that end past the width or on it: the exact product, bf16 and FP8, alike alone."""
    torch.manual_seed(4)
    for outputs, width in ((35, 192), (20, 330), (16, 256)):
        x, weight = torch.randn(3, width).bfloat16(), torch.randn(outputs, width).bfloat16()
        fp8 = BlockFp8(torch.randn(outputs, width).to(torch.float8_e4m3fn), torch.rand(-(-outputs // 128), -(-width // 128)) + 0.1)
        wanted, wanted_fp8 = x.double() @ weight.double().t(), x.double() @ fp8.dequantised(torch.float64).t()
        for how in ((16, 64, 4, 1), (32, 64, 1, 1), (16, 32, 2, 3), (64, 128, 2, 1), (16, 16, 8, 2)):
            splits = how[3] if -(-width // (how[1] * how[2])) % how[3] == 0 else 1
            chosen = tiling.Tiling(*how[:3], warps=4, stages=2, splits=splits)
            company.near(f"{how} {width}", kernel.linear(x, weight, torch.float32, chosen), wanted, 2e-6)
            company.near(f"FP8 {how} {width}", kernel.linear(x, fp8, torch.float32, chosen), wanted_fp8, 2e-6)
        company.row_invariant(lambda p, x=x, w=weight, how=chosen: kernel.linear(x[p], w, torch.float32, how), 3, (2, 17))  # type: ignore[misc]


def main() -> None:
    every_kind_of_tiling()
    float_weights_under_bf16_rows()
    weights_narrower_than_rows()
    bf16_rows()
    splits_follow_the_weight()
    interpreted.run_reference_tests("test_linear.py", without=("company", "256-768", "65-257", "1024-2", "8-128-64"))


if __name__ == "__main__":
    main()
