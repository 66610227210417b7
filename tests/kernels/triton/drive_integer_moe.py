"""Interpreted MLPs whose weights are integers: one row and many, crowded experts, only one of the products of integers, and company."""

from dataclasses import replace

import company
import interpreted
import torch
from torch import Tensor

from kernels.linear import GroupInt
from kernels.linear.integers import FORMS
from kernels.moe import experts, gated_mlp, kernel, reference
from kernels.place import BULK_ROWS


def made(*shape: int, bits: int, group: int, zeros: bool, seed: int) -> tuple[GroupInt, Tensor]:
    """A weight, and the float32 values it stands for; scales are powers of two, so that these are exact."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-shape[-1] // group)
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    scales = torch.exp2(torch.randint(-3, 1, (*shape[:-1], groups), generator=generator).float()) / (1 << bits)
    zero = torch.randint(0, 1 << bits, scales.shape, generator=generator)
    at = torch.arange(shape[-1]) // group
    offset = zero[..., at] if zeros else 1 << (bits - 1)
    weight = GroupInt.pack(codes.byte(), scales.bfloat16(), zero.byte() if zeros else None, bits, group)
    return weight, (codes - offset).float() * scales[..., at]


def routed() -> None:
    """One row, some, and more pairs than a tile holds on one expert: the reference on the same values."""
    torch.manual_seed(1)
    for number, (rows, bits, group, zeros) in interpreted.some(enumerate(((1, 4, 64, False), (11, 8, 32, True))), 2):
        hidden, width, count = 40, 16, 6
        y, weight_of = torch.randn(rows, hidden), torch.rand(rows, 2)
        expert_of = torch.tensor([[4, 2]]).repeat(rows, 1)
        expert_of[rows // 2] = torch.tensor([5, 4])
        gate_up, wide_up = made(count, 2 * width, hidden, bits=bits, group=group, zeros=zeros, seed=number)
        down, wide_down = made(count, hidden, width, bits=bits, group=group, zeros=zeros, seed=number + 10)
        wanted = reference.experts(y, expert_of, weight_of, wide_up, wide_down)
        company.near(f"{rows} rows, {bits} bits", experts(y, expert_of, weight_of, gate_up, down), wanted, 1e-5)
    company.near("plain down", experts(y, expert_of, weight_of, gate_up, wide_down), wanted, 1e-5)
    company.near("plain up", experts(y, expert_of, weight_of, wide_up, down), wanted, 1e-5)


def dense() -> None:
    """Gate, up and down of integers, or only some of them: the reference on the same values."""
    torch.manual_seed(2)
    y = torch.randn(9, 70)
    (gate, wide_gate), (up, wide_up) = (made(20, 70, bits=8, group=32, zeros=True, seed=seed) for seed in (1, 2))
    down, wide_down = made(70, 20, bits=4, group=64, zeros=False, seed=3)
    wanted = reference.gated_mlp(y, wide_gate, wide_up, wide_down)
    company.near("all", gated_mlp(y, gate, up, down), wanted, 1e-5)
    company.near("plain down", gated_mlp(y, gate, up, wide_down), wanted, 1e-5)
    company.near("plain gate and up", gated_mlp(y, wide_gate, wide_up, down), wanted, 1e-5)
    half = gated_mlp(y.bfloat16(), gate, up, down)
    company.near("bf16", half, reference.gated_mlp(y.bfloat16().float(), wide_gate, wide_up, wide_down), 0.03)


def every_form() -> None:
    """Each form of the sums for gate, up and down, a row alone and two on one expert: the reference on the same values, the same bits."""
    torch.manual_seed(5)
    y, weight_of, expert_of = torch.randn(2, 24).bfloat16(), torch.rand(2, 1), torch.tensor([[1], [1]])
    for number, how in interpreted.some(enumerate(FORMS), 5):
        zeros = number % 2 > 0
        gate_up, wide_up = made(2, 20, 24, bits=4, group=64, zeros=zeros, seed=number)
        down, wide_down = made(2, 24, 10, bits=4, group=64, zeros=not zeros, seed=number + 10)
        one = replace(how, splits=1, outputs=16, warps=how.parts)
        got = kernel.experts(y, expert_of, weight_of, gate_up, down, (one, one))
        company.near(f"{how}", got.float(), reference.experts(y.float(), expert_of, weight_of, wide_up, wide_down), 0.03)
        alone = kernel.experts(y[1:], expert_of[1:], weight_of[1:], gate_up, down, (one, one))
        interpreted.same(f"{how}, alone", alone, got[1:])


def company_changes_no_bit() -> None:
    """A row's result has the same bits alone, where its pairs need no grouping, and in any company."""
    torch.manual_seed(3)
    y, weight_of = torch.randn(4, 32), torch.rand(4, 3)
    expert_of = torch.stack([torch.randperm(4)[:3] for _ in range(4)])
    gate_up, down = made(4, 12, 32, bits=8, group=32, zeros=False, seed=1)[0], made(4, 32, 6, bits=8, group=64, zeros=True, seed=2)[0]
    company.row_invariant(lambda p: experts(y[p], expert_of[p], weight_of[p], gate_up, down), 4, (2, 9))
    company.row_invariant(lambda p: gated_mlp(y[p], gate_up[0][:6], gate_up[0][6:], down[0]), 4, (9,))


def many_rows() -> None:
    """Beyond BULK_ROWS rows, routed and dense: the reference on the same values."""
    torch.manual_seed(4)
    rows = BULK_ROWS + 1
    for bits, group, zeros in ((4, 64, True),):
        y, weight_of, expert_of = torch.randn(rows, 40), torch.rand(rows, 1), torch.arange(rows)[:, None] % 2 + 1
        gate_up, wide_up = made(3, 36, 40, bits=bits, group=group, zeros=zeros, seed=1)
        down, wide_down = made(3, 40, 18, bits=bits, group=group, zeros=zeros, seed=2)
        wanted = reference.experts(y, expert_of, weight_of, wide_up, wide_down)
        company.near("routed", experts(y, expert_of, weight_of, gate_up, down), wanted, 1e-5)
        company.near("plain down", experts(y, expert_of, weight_of, gate_up, wide_down), wanted, 1e-5)
        got = gated_mlp(y, gate_up[0][:18], gate_up[0][18:], down[0])
        company.near("dense", got, reference.gated_mlp(y, wide_up[0, :18], wide_up[0, 18:], wide_down[0]), 1e-5)


def main() -> None:
    routed()
    if interpreted.WHOLE:
        dense()
    every_form()
    company_changes_no_bit()
    many_rows()


if __name__ == "__main__":
    main()
