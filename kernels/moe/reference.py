"""Gated MLPs, dense and routed. Hold no weights; know nothing of layers.

Invariants:
1. Every product runs in tiles of 8 rows, an expert's rows too; a row's result does not depend on which rows chose the same expert.
2. A row's expert outputs are summed in the order of its slots, in float32.
3. The router is float32 throughout, and ties go to the lower expert id.
"""

import torch
from torch import Tensor

from kernels.linear.reference import linear
from kernels.tile import sigmoid, silu

__all__ = ["experts", "gated_mlp", "route"]


def gated_mlp(y: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`(silu(y · gate^T) * (y · up^T)) · down^T`; see the package page."""
    hidden = silu(linear(y, gate))
    hidden *= linear(y, up)
    return linear(hidden, down)


def route(
    y: Tensor, gate: Tensor, bias: Tensor, *, experts_per_token: int, groups: int, groups_kept: int, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """Choose by biased sigmoid, weigh by the unbiased one; see the package page."""
    score = sigmoid(linear(y.float(), gate.float()))
    choice = score + bias
    if groups > 1:
        choice = _within_best_groups(choice, groups, groups_kept)
    expert_of = _largest(choice, experts_per_token)
    weight_of = score.gather(1, expert_of)
    if normalise:
        weight_of = weight_of / (_sum_in_order(weight_of) + 1e-20)
    return expert_of, weight_of * factor


def experts(y: Tensor, expert_of: Tensor, weight_of: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over slots of `weight_of * MLP_{expert_of}(y)`; see the package page."""
    rows, slots = expert_of.shape
    width = down.shape[2]
    order = torch.argsort(expert_of.flatten(), stable=True)  # (row, slot) pairs, expert by expert
    start = int((expert_of < 0).sum())  # pairs of experts that are not here come first, and have no output
    rows_of = torch.bincount(expert_of.flatten() + 1, minlength=down.shape[0] + 1).tolist()[1:]
    outputs = torch.zeros((rows * slots, y.shape[1]), dtype=y.dtype)
    for expert, count in enumerate(rows_of):
        if count == 0:
            continue
        pairs = order[start : start + count]
        both = linear(y.index_select(0, pairs // slots), gate_up[expert])
        hidden = silu(both[:, :width])
        hidden *= both[:, width:]
        outputs.index_copy_(0, pairs, linear(hidden, down[expert]))
        start += count
    by_slot = outputs.view(rows, slots, y.shape[1])
    total = by_slot[:, 0].float() * weight_of[:, :1]
    for slot in range(1, slots):
        total += by_slot[:, slot].float() * weight_of[:, slot : slot + 1]
    return total.to(y.dtype)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row, largest first; ties to the lower index (a stable sort keeps their order)."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count]


def _within_best_groups(choice: Tensor, groups: int, groups_kept: int) -> Tensor:
    """`choice` with -inf in all but the best groups; a group's score is the sum of its two largest."""
    rows, experts = choice.shape
    grouped = choice.view(rows, groups, experts // groups)
    best = grouped.topk(min(2, grouped.shape[2]), dim=2).values
    score = best.sum(2) if best.shape[2] == 1 else best[:, :, 0] + best[:, :, 1]
    dropped = torch.ones((rows, groups), dtype=torch.bool)
    dropped.scatter_(1, _largest(score, groups_kept), False)
    return grouped.masked_fill(dropped[:, :, None], float("-inf")).view(rows, experts)


def _sum_in_order(weights: Tensor) -> Tensor:
    """Row sums added from slot 0 up, [rows, 1]: a library reduction may take another order for another number of rows."""
    total = weights[:, :1].clone()
    for slot in range(1, weights.shape[1]):
        total += weights[:, slot : slot + 1]
    return total
