"""Gated MLPs: dense (`gated_mlp`), the router (`route`) and the routed experts (`experts`). Row-invariant: see `kernels`; on a device up
to BULK_ROWS rows, and `bulk.py` takes more.

Choices kept: the router's bias steers the choice only and never the weights; dropped groups get -inf, not 0 (biases may be negative).
The shared expert is a `gated_mlp` of its own that the model adds: no gate, no factor.
Weights may be `BlockFp8` or `GroupInt`; on a device also bf16 under float32 rows (`kernels/linear`).
"""

from torch import Tensor

from kernels.linear.block_fp8 import BlockFp8
from kernels.linear.group_int import GroupInt
from kernels.moe import reference
from kernels.place import BULK_ROWS, on_cpu

__all__ = ["gated_mlp", "route", "experts"]

Weight = Tensor | BlockFp8 | GroupInt


def gated_mlp(y: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """`(silu(y · gate^T) * (y · up^T)) · down^T`.

    y         [rows, hidden]   float  rows >= 0
    gate, up  [width, hidden]  same dtype
    down      [hidden, width]  same dtype
    returns   [rows, hidden]   same dtype
    """
    if on_cpu("gated_mlp", y):
        return reference.gated_mlp(y, *(_plain(weight, y) for weight in (gate, up, down)))
    if y.shape[0] > BULK_ROWS:
        from kernels.moe import bulk

        return bulk.gated_mlp(y, gate, up, down)
    from kernels.moe import kernel

    return kernel.gated_mlp(y, gate, up, down)


def route(
    y: Tensor, gate: Tensor, bias: Tensor, *, experts_per_token: int, groups: int, groups_kept: int, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """Choose each row's experts and their weights. Float32 throughout.

    y          [rows, hidden]     float
    gate       [experts, hidden]  float
    bias       [experts]          float32  added for the choice only
    expert_of  [rows, slots]      int64    distinct, best first; ties to the lower id; slots = experts_per_token
    weight_of  [rows, slots]      float32  unbiased sigmoid, divided by its sum if `normalise`, times `factor`
    Args: groups: consecutive equal groups of experts; groups_kept: how many a row may use (both 1: no groups).
    Returns: expert_of, weight_of. A row of NaN still gets valid, distinct experts.
    """
    count = gate.shape[0]
    assert count % groups == 0, f"{count} experts do not fall into {groups} groups"
    assert experts_per_token <= groups_kept * (count // groups), f"{groups_kept} groups cannot give {experts_per_token} experts"
    if on_cpu("route", y):
        return reference.route(
            y, gate, bias, experts_per_token=experts_per_token, groups=groups, groups_kept=groups_kept, normalise=normalise, factor=factor
        )
    from kernels.moe import routing

    return routing.route(
        y, gate, bias, experts_per_token=experts_per_token, groups=groups, groups_kept=groups_kept, normalise=normalise, factor=factor
    )


def experts(y: Tensor, expert_of: Tensor, weight_of: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Weighted sum of each row's chosen experts, added slot by slot in float32.

    y          [rows, hidden]               float  rows >= 0
    expert_of  [rows, slots]                int64    -1: one that is not among these, and adds nothing
    weight_of  [rows, slots]                float32  0 where the expert is -1
    gate_up    [experts, 2 * width, hidden] y's dtype  gate rows first
    down       [experts, hidden, width]     y's dtype
    returns    [rows, hidden]               y's dtype
    """
    assert expert_of.shape == weight_of.shape, f"{tuple(expert_of.shape)} experts, {tuple(weight_of.shape)} weights"
    assert gate_up.shape[1] == 2 * down.shape[2], f"gate_up {tuple(gate_up.shape)} does not fit down {tuple(down.shape)}"
    if on_cpu("experts", y):
        return reference.experts(y, expert_of, weight_of, _plain(gate_up, y), _plain(down, y))
    if y.shape[0] > BULK_ROWS:
        from kernels.moe import bulk

        return bulk.experts(y, expert_of, weight_of, gate_up, down)
    from kernels.moe import kernel

    return kernel.experts(y, expert_of, weight_of, gate_up, down)


def _plain(weight: Weight, y: Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised(y.dtype)
