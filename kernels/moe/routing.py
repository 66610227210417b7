"""The router on a device: float32 products in splits, then one program a row that adds them and picks its experts one by one.

In a module of its own beside the MLPs; knows no expert's weights.

Invariants:
1. float32 throughout; equal choices go to the lower expert, equal groups to the lower group.
2. A choice is compared by rank, so a row of NaN still takes distinct experts; an expert is taken once.
3. Weights are summed from slot 0 up and divided with correct rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import bulk
from kernels.linear.kernel import linear_parts
from kernels.place import BULK_ROWS
from kernels.select.kernel import rank_of

__all__ = ["route"]


@triton.jit
def _first_largest(rank, index):
    """The lowest index that has the largest rank."""
    return tl.min(tl.where(rank == tl.max(rank), index, 2147483647))


@triton.jit
def _best_groups(choice, expert, known, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Which experts stand in the KEPT groups whose two best choices sum highest."""
    group = tl.arange(0, BLOCK)
    ranks = tl.full([BLOCK], -1, tl.int64)
    for number in tl.static_range(GROUPS):
        inside = known & (expert // GROUP_EXPERTS == number)
        rank = tl.where(inside, rank_of(choice).to(tl.int64), -1)
        best = _first_largest(rank, expert)
        score = tl.sum(tl.where(expert == best, choice, 0.0))
        if GROUP_EXPERTS > 1:
            second = _first_largest(tl.where(expert == best, -1, rank), expert)
            score += tl.sum(tl.where(expert == second, choice, 0.0))
        ranks = tl.where(group == number, rank_of(score).to(tl.int64), ranks)
    kept = expert < 0
    for _ in tl.static_range(KEPT):
        best = _first_largest(ranks, group)
        ranks = tl.where(group == best, -2, ranks)
        kept = kept | (expert // GROUP_EXPERTS == best)
    return kept & known


@triton.jit
def _choose(parts, bias, expert_of, weight_of, FACTOR: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
            KEPT: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr, SLOTS_BLOCK: tl.constexpr,
            GROUPS_BLOCK: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS_BLOCK)
    known = expert < EXPERTS
    logit = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):  # in order; num_programs is the number of rows
        logit += tl.load(parts + (split * tl.num_programs(0) + row) * EXPERTS + expert, mask=known, other=0.0)
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    choice = score + tl.load(bias + expert, mask=known, other=0.0)
    allowed = known
    if GROUPS > 1:
        allowed = _best_groups(choice, expert, known, GROUPS, KEPT, EXPERTS // GROUPS, GROUPS_BLOCK)
    rank = tl.where(allowed, rank_of(choice).to(tl.int64), -1)
    chosen = tl.zeros([SLOTS_BLOCK], tl.int64)
    weights = tl.zeros([SLOTS_BLOCK], tl.float32)
    total = 0.0
    for number in tl.static_range(SLOTS):
        best = _first_largest(rank, expert)
        weight = tl.sum(tl.where(expert == best, score, 0.0))
        rank = tl.where(expert == best, -2, rank)
        chosen = tl.where(slot == number, best.to(tl.int64), chosen)
        weights = tl.where(slot == number, weight, weights)
        total += weight
    if NORMALISE:
        weights = tl.div_rn(weights, total + 1e-20 + tl.zeros([SLOTS_BLOCK], tl.float32))
    tl.store(expert_of + row * SLOTS + slot, chosen, mask=slot < SLOTS)
    tl.store(weight_of + row * SLOTS + slot, weights * FACTOR, mask=slot < SLOTS)


def route(
    y: Tensor, gate: Tensor, bias: Tensor, *, experts_per_token: int, groups: int, groups_kept: int, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """See the package page."""
    rows, count = y.shape[0], gate.shape[0]
    expert_of = torch.empty((rows, experts_per_token), dtype=torch.int64, device=y.device)
    weight_of = torch.empty((rows, experts_per_token), dtype=torch.float32, device=y.device)
    if rows:
        parts = bulk.linear(y, gate.float(), torch.float32)[None] if rows > BULK_ROWS else linear_parts(y, gate.float())
        _choose[(rows,)](
            parts, bias, expert_of, weight_of, FACTOR=factor, EXPERTS=count, SLOTS=experts_per_token, GROUPS=groups,
             KEPT=groups_kept, NORMALISE=normalise, BLOCK=triton.next_power_of_2(count),
            SLOTS_BLOCK=triton.next_power_of_2(experts_per_token), GROUPS_BLOCK=triton.next_power_of_2(groups), SPLITS=parts.shape[0],
            num_warps=1,
        )  # fmt: skip
    return expert_of, weight_of


_GLM = {"parts": "*fp32", "bias": "*fp32", "expert_of": "*i64", "weight_of": "*fp32", "FACTOR": 2.5, "EXPERTS": 256, "SLOTS": 8,
        "NORMALISE": True, "BLOCK": 256, "SLOTS_BLOCK": 8, "SPLITS": 8,
        "num_warps": 1}  # fmt: skip
COMPILE = [
    (_choose, _GLM | {"GROUPS": 1, "KEPT": 1, "GROUPS_BLOCK": 1}),
    (_choose, _GLM | {"GROUPS": 8, "KEPT": 4, "GROUPS_BLOCK": 8}),
]
