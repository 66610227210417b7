"""Interpreted MLPs of an append's rows: crowded and idle experts, every kind of weight, NaN rows, company, and any order of programs."""

import company
import interpreted
import torch

from kernels.linear import BlockFp8
from kernels.moe import bulk, experts, gated_mlp, reference, route
from kernels.place import BULK_ROWS

CHOICES = ("random", "one expert", "ends only")


def chosen(kind: str, rows: int, slots: int, count: int) -> torch.Tensor:
    """Distinct experts of each row."""
    if kind == "random":
        return torch.stack([torch.randperm(count)[:slots] for _ in range(rows)])
    if kind == "one expert":  # all rows on one; what is left of the slots on its neighbours
        return (torch.arange(slots) + count // 2).remainder(count).repeat(rows, 1)
    first = torch.arange(slots).repeat(rows, 1)
    return torch.where((torch.arange(rows) % 3 == 0)[:, None], first, count - 1 - first)


def weights_of(count: int, hidden: int, width: int, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the experts; NaN for those nobody chose."""
    gate_up, down = torch.full((count, 2 * width, hidden), float("nan")), torch.full((count, hidden, width), float("nan"))
    for expert in used.unique():
        gate_up[expert], down[expert] = torch.randn(2 * width, hidden) / hidden**0.5, torch.randn(hidden, width)
    return gate_up, down


def experts_agree() -> None:
    """Around a tile's and a launch's edges, with experts unused or all rows on one, results are the reference's."""
    torch.manual_seed(1)
    shapes = ((BULK_ROWS + 1, 2, 8, 40, 33), (255, 2, 5, 7, 35), (256, 1, 1, 32, 32), (257, 2, 6, 33, 1))
    kinds = (*CHOICES[:2], CHOICES[0], CHOICES[2])
    for (rows, slots, count, hidden, width), kind in interpreted.some(zip(shapes, kinds, strict=True), 4):
        y, weight_of = torch.randn(rows, hidden), torch.rand(rows, slots)
        expert_of = chosen(kind, rows, slots, count)
        weights = weights_of(count, hidden, width, expert_of)
        wanted = reference.experts(y, expert_of, weight_of, *weights)
        got = experts(y, expert_of, weight_of, *weights)
        terms = reference.experts(y.abs(), expert_of, weight_of, *(one.abs() for one in weights))  # an expert of width 1 sums but once
        company.near(f"{rows} rows, {kind}", got, wanted, 1e-6, terms)
    bulk.BAND_ROWS, kept = 200, bulk.BAND_ROWS
    with interpreted.programs_backwards():
        interpreted.same("in bands, programs last to first", experts(y, expert_of, weight_of, *weights), got)
    bulk.BAND_ROWS = kept


def weights_of_every_kind() -> None:
    """bf16 rows and weights, bf16 and FP8 weights under float32 rows, and FP8 under bf16 ones: the reference on the same values."""
    torch.manual_seed(2)
    rows, slots, count, hidden, width = 98, 1, 3, 130, 128  # 65 pairs on one expert: a tile of bf16 and one more
    y, weight_of, expert_of = torch.randn(rows, hidden), torch.rand(rows, slots), chosen("ends only", rows, slots, count)
    gate_up, down = weights_of(count, hidden, width, expert_of)
    narrow = gate_up.bfloat16(), down.bfloat16()
    exact = reference.experts(y, expert_of, weight_of, *(weight.float() for weight in narrow))
    company.near("bf16 weights", bulk.experts(y, expert_of, weight_of, *narrow), exact, 1e-5)
    got = bulk.experts(y.bfloat16(), expert_of, weight_of, *narrow)
    assert got.dtype == torch.bfloat16
    company.near("bf16", got, reference.experts(y.bfloat16().float(), expert_of, weight_of, *(one.float() for one in narrow)), 0.04)
    fp8 = [
        BlockFp8(torch.randn(count, 2 * width, hidden).to(torch.float8_e4m3fn), torch.rand(count, 2, 2) / 10),
        BlockFp8(torch.randn(count, hidden, width).to(torch.float8_e4m3fn), torch.rand(count, 2, 1) / 10),
    ]
    wide = [weight.dequantised(torch.float32) for weight in fp8]
    company.near("FP8", bulk.experts(y, expert_of, weight_of, *fp8), reference.experts(y, expert_of, weight_of, *wide), 1e-5)
    got = bulk.experts(y.bfloat16(), expert_of, weight_of, *fp8)
    company.near("FP8 bf16", got, reference.experts(y.bfloat16().float(), expert_of, weight_of, *wide), 0.04)


def rows_stay_alone() -> None:
    """A NaN row makes only itself NaN, and a routed row has the same bits in any company."""
    torch.manual_seed(3)
    rows, slots, count, hidden, width = 40, 2, 5, 20, 9
    y, weight_of, expert_of = torch.randn(rows, hidden), torch.rand(rows, slots), chosen("random", rows, slots, count)
    weights = weights_of(count, hidden, width, expert_of)
    clean = bulk.experts(y, expert_of, weight_of, *weights)
    order = torch.randperm(rows)[:19]
    interpreted.same("shuffled", bulk.experts(y[order], expert_of[order], weight_of[order], *weights), clean[order])
    y[7] = float("nan")
    got = bulk.experts(y, expert_of, weight_of, *weights)
    assert bool(got[7].isnan().all())
    got[7] = clean[7]
    interpreted.same("others", got, clean)


def slots_are_added_in_order() -> None:
    """A row's result has the bits of ((a + b) + c) over its slots, each product rounded to float32."""
    torch.manual_seed(4)
    rows = 3
    y, expert_of, weight_of = torch.randn(rows, 16), torch.tensor([[2, 0, 1]]).repeat(rows, 1), torch.tensor([[0.3, 1e-4, 7.0]])
    weights, one = weights_of(3, 16, 10, expert_of), torch.ones(rows, 1)
    parts = [bulk.experts(y, expert_of[:, slot : slot + 1], one, *weights) * weight_of[:, slot] for slot in range(3)]
    interpreted.same("sum", bulk.experts(y, expert_of, weight_of.repeat(rows, 1), *weights), parts[0] + parts[1] + parts[2])


def dense_and_router() -> None:
    """A dense MLP and the router's choice of many rows are the reference's."""
    torch.manual_seed(5)
    for rows in (BULK_ROWS + 1,):
        y, gate, up, down = torch.randn(rows, 33), torch.randn(40, 33) / 6, torch.randn(40, 33), torch.randn(33, 40)
        company.near("dense", gated_mlp(y, gate, up, down), reference.gated_mlp(y, gate, up, down), 1e-5)
        narrow = [weight.bfloat16() for weight in (gate, up, down)]
        wanted = reference.gated_mlp(y.bfloat16().float(), *(weight.float() for weight in narrow))
        company.near("dense bf16", gated_mlp(y.bfloat16(), *narrow), wanted, 0.04)
        router, bias = torch.randn(12, 33), torch.randn(12)
        settings = {"experts_per_token": 4, "groups": 3, "groups_kept": 2, "normalise": True, "factor": 2.5}
        (got_of, got), (wanted_of, wanted) = route(y, router, bias, **settings), reference.route(y, router, bias, **settings)
        interpreted.same("experts", got_of, wanted_of)
        company.near("weights", got, wanted, 1e-5)


def main() -> None:
    experts_agree()
    if interpreted.WHOLE:
        weights_of_every_kind()
    rows_stay_alone()
    slots_are_added_in_order()
    if interpreted.WHOLE:
        dense_and_router()


if __name__ == "__main__":
    main()
