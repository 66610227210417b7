"""The residual sum on a device: one program a row, which it reads once and keeps in registers.

Invariants:
1. The sum is rounded to the state's dtype before it is checked and normed, as if it had been stored and read.
2. The norm reduces in `kernels/norm`'s shape, so both give the same bits.

Floor at width 6,144 bf16: 48 KiB moved a row, nothing beside a launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm"]


@triton.jit
def _add_norm(x, branch, branch_stride, weight, out, bad_layer, layer, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    added = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    total = (given.to(tl.float32) + added).to(given.dtype)
    tl.store(x + row * WIDTH + column, total, mask=inside)
    wide = total.to(tl.float32)
    infinite = tl.sum((inside & ((wide != wide) | (tl.abs(wide) == float("inf")))).to(tl.int32))
    first = tl.load(bad_layer + row)
    tl.store(bad_layer + row, tl.where((infinite > 0) & (first < 0), layer, first))
    scale = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    normed = (wide * scale).to(given.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float, bad_layer: Tensor, layer: int) -> Tensor:
    """See the package page."""
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    block = triton.next_power_of_2(width)
    branch = branch if branch.stride(1) == 1 or width == 1 else branch.contiguous()
    if rows:
        _add_norm[(rows,)](
            x, branch, branch.stride(0), weight.contiguous(), out, bad_layer, layer, eps, WIDTH=width, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


_ROW = {"branch_stride": "i32", "bad_layer": "*i64", "layer": "i32", "eps": "fp32", "WIDTH": 6144, "BLOCK": 8192, "num_warps": 16}
COMPILE = [
    (_add_norm, _ROW | dict.fromkeys(("x", "branch", "weight", "out"), "*bf16")),
    (_add_norm, _ROW | dict.fromkeys(("x", "branch", "weight", "out"), "*fp32")),
    (_add_norm, _ROW | dict.fromkeys(("x", "branch", "weight", "out"), "*bf16") | {"layer": 1}),
]
