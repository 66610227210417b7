"""Interpreted norms: the reference's own tests, then strided bf16 rows and poisoned outputs."""

import company
import interpreted
import torch

from kernels.norm import kernel, reference


def bf16_rows_agree() -> None:
    """Slices of wider bf16 rows agree with the reference to two bf16 roundings (the interpreter cuts where a device rounds)."""
    torch.manual_seed(1)
    x, weight, bias = torch.randn(5, 96).bfloat16()[:, 8:73], torch.randn(65).bfloat16(), torch.randn(65).bfloat16()
    for got, wanted in (
        (kernel.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (kernel.layer_norm(x, weight, bias, 1e-6), reference.layer_norm(x, weight, bias, 1e-6)),
    ):
        assert got.dtype == torch.bfloat16
        assert bool(((got.float() - wanted.float()).abs() <= 2**-6 * wanted.float().abs() + 1e-6).all())


def joined_norms_are_the_kernels_own() -> None:
    """Either half has the bits of the norm alone; a float32 second input is rounded to the first's type (here: has its values already)."""
    torch.manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        first, second = torch.randn(5, 40).to(dtype)[:, 7:], torch.randn(5, 33).to(dtype)
        weights = [torch.randn(33).to(dtype) for _ in range(2)]
        halves = [kernel.rms_norm(x, weight, 1e-5) for x, weight in zip((first, second), weights, strict=True)]
        for kept in (second, second.float()):
            got = kernel.join_norms(first, weights[0], kept, weights[1], 1e-5)
            interpreted.same(f"joined {dtype}", got, torch.cat(halves, 1))


def company_changes_no_bit() -> None:
    """A row has the same bits alone and among others."""
    x, weight, bias = torch.randn(5, 33), torch.randn(33), torch.randn(33)
    company.row_invariant(lambda picked: kernel.rms_norm(x[picked], weight, 1e-6), 5)
    company.row_invariant(lambda picked: kernel.layer_norm(x[picked], weight, bias, 1e-6), 5)


def main() -> None:
    bf16_rows_agree()
    joined_norms_are_the_kernels_own()
    company_changes_no_bit()
    # The interpreter cuts a bf16 where a device rounds it.
    interpreted.run_reference_tests("test_norm.py", without=("rounds_before_the_weight", "see_its_company", "joined_norms"))


if __name__ == "__main__":
    main()
