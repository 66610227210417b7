"""Interpreted MLPs and routing: the reference's own tests, then narrow weights, crowded experts and company."""

import company
import interpreted
import torch

from kernels.linear import BlockFp8, tiling
from kernels.moe import experts, gated_mlp, reference, route


def fp8(*shape: int) -> BlockFp8:
    scales = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) / shape[-1] ** 0.5
    return BlockFp8(torch.randn(*shape).to(torch.float8_e4m3fn), scales)


def narrow_weights() -> None:
    """Block-FP8 weights, and bf16 rows, give the reference's result on the same values to their rounding."""
    torch.manual_seed(1)
    y, weight_of, expert_of = torch.randn(3, 130), torch.rand(3, 2), torch.tensor([[2, 0], [0, 1], [2, 1]])
    gate_up, down = fp8(3, 256, 130), fp8(3, 130, 128)
    wide = gate_up.dequantised(torch.float32), down.dequantised(torch.float32)
    company.near("FP8", experts(y, expert_of, weight_of, gate_up, down), reference.experts(y, expert_of, weight_of, *wide), 1e-5)
    one = [fp8(40, 130), fp8(40, 130), fp8(130, 40)]
    wanted = reference.gated_mlp(y, *(weight.dequantised(torch.float32) for weight in one))
    company.near("dense FP8", gated_mlp(y, *one), wanted, 1e-5)
    small = [weight.bfloat16() for weight in (wide[0], wide[1])]
    got = experts(y.bfloat16(), expert_of, weight_of, *small)
    wanted = reference.experts(y.bfloat16().float(), expert_of, weight_of, *(weight.float() for weight in small))
    assert got.dtype == torch.bfloat16
    company.near("bf16", got, wanted, 0.03)


def crowded_experts() -> None:
    """More pairs than a tile holds on one expert, one on another, none on the rest (NaN), agree with the reference."""
    torch.manual_seed(2)
    for rows in interpreted.some((17, 1, 35), 3):
        y, weight_of = torch.randn(rows, 8), torch.rand(rows, 2)
        gate_up, down = torch.full((8, 6, 8), float("nan")), torch.full((8, 8, 3), float("nan"))
        expert_of = torch.tensor([[6, 3]]).repeat(rows, 1)
        expert_of[rows // 2] = torch.tensor([7, 6])
        for expert in (3, 6, 7):
            gate_up[expert], down[expert] = torch.randn(6, 8), torch.randn(8, 3)
        company.near(f"{rows} rows", experts(y, expert_of, weight_of, gate_up, down),
                     reference.experts(y, expert_of, weight_of, gate_up, down), 1e-5)  # fmt: skip


def company_changes_no_bit() -> None:
    """A row's experts, weights and results have the same bits alone and in any company, with splits."""
    torch.manual_seed(3)
    y, weight_of = torch.randn(4, 370), torch.rand(4, 3)
    expert_of = torch.stack([torch.randperm(5)[:3] for _ in range(4)])
    gate_up, down = torch.randn(5, 6, 370), torch.randn(5, 370, 3)
    gate, bias = torch.randn(15, 370), torch.randn(15)
    settings = {"experts_per_token": 4, "groups": 3, "groups_kept": 2, "normalise": True, "factor": 2.5}
    assert tiling.tiling_of(1, 370, 1024, wide=True).splits > 1
    company.row_invariant(lambda p: experts(y[p], expert_of[p], weight_of[p], gate_up, down), 4, (2, 17))
    company.row_invariant(lambda p: gated_mlp(y[p], gate_up[0], gate_up[1], down[0].repeat(1, 2)), 4, (3, 17))
    company.row_invariant(lambda p: torch.cat([part.double() for part in route(y[p], gate, bias, **settings)], 1), 4, (2, 5))


def main() -> None:
    narrow_weights()
    crowded_experts()
    if interpreted.WHOLE:
        company_changes_no_bit()
    # Few of the shapes: an interpreted program takes milliseconds.
    without = ("company", "experts_agree", "256-96", "64-130", "16-4-4-2", "8-2-1-1", "5-5-1-1", "4-2-4-2", "12-2-6-1", "33-1")
    interpreted.run_reference_tests("test_moe.py", without=without)


if __name__ == "__main__":
    main()
