"""Interpreted residual sums: the reference's own tests, then a branch that is a slice of wider rows."""

import interpreted
import numpy
import torch

from kernels.residual import kernel, reference


def strided_branch_agrees() -> None:
    """A branch whose rows lie apart is read row by row."""
    torch.manual_seed(1)
    x, branch, weight = torch.randn(5, 65), torch.randn(5, 96)[:, 8:73], torch.randn(65)
    states, flags = [x.clone(), x.clone()], [torch.full((5,), -1), torch.full((5,), -1)]
    got = kernel.add_norm(states[0], branch, weight, 1e-5, flags[0], 4)
    wanted = reference.add_norm(states[1], branch, weight, 1e-5, flags[1], 4)
    interpreted.same("the state", states[0], states[1])
    interpreted.same("the flags", flags[0], flags[1])
    assert bool(((got - wanted).abs() <= 2e-6 * wanted.abs()).all())


def broken_rows_are_flagged() -> None:
    """Rows that are not finite are flagged as the reference flags them (NumPy, which interprets, warns of them)."""
    branch = torch.zeros(6, 33)
    branch[1, 32], branch[2, 0], branch[3, 5], branch[5, 1] = float("nan"), float("inf"), float("-inf"), float("nan")
    flags = [torch.tensor([-1, -1, -1, -1, 2, 2]) for _ in range(2)]
    with numpy.errstate(all="ignore"):
        kernel.add_norm(torch.ones(6, 33), branch, torch.ones(33), 1e-5, flags[0], 7)
    reference.add_norm(torch.ones(6, 33), branch, torch.ones(33), 1e-5, flags[1], 7)
    interpreted.same("the flags", flags[0], flags[1])
    assert flags[0].tolist() == [-1, 7, 7, 7, 2, 2]


def main() -> None:
    strided_branch_agrees()
    broken_rows_are_flagged()
    # The interpreter cuts a bf16 where a device rounds it.
    interpreted.run_reference_tests("test_residual.py", without=("dtype1", "overflows", "is_kept"))


if __name__ == "__main__":
    main()
