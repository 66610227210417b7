"""Rotary positions on a device: the values of some rows of x, all pairs, in one launch.

Knows no table's making: angles come from torch once a step, in the reference's order.

Invariant: a value is the reference's to the bit for float32 (no fused multiply-add), and rounds each product as torch does otherwise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotate"]

_HEADS_BLOCK = 8


@triton.jit
def _rotate(x, cos, sin, out, heads, x_row, x_head, x_value, t_row, PAIRS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    known = pair < PAIRS
    inside = (head < heads)[:, None] & known[None, :]
    from_x = x + row * x_row + head[:, None] * x_head + pair[None, :] * 2 * x_value
    even = tl.load(from_x, mask=inside, other=0.0)
    odd = tl.load(from_x + x_value, mask=inside, other=0.0).to(tl.float32)
    kind = even.dtype
    even = even.to(tl.float32)
    c = tl.load(cos + row * t_row + pair, mask=known, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * t_row + pair, mask=known, other=0.0).to(tl.float32)[None, :]
    first = (even * c).to(kind).to(tl.float32) - (odd * s).to(kind).to(tl.float32)
    second = (odd * c).to(kind).to(tl.float32) + (even * s).to(kind).to(tl.float32)
    to_out = out + (row * heads + head[:, None]) * 2 * PAIRS + pair[None, :] * 2
    tl.store(to_out, first.to(kind), mask=inside)
    tl.store(to_out + 1, second.to(kind), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See the package page."""
    rows, width = x.shape[0], x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    by_head = x.reshape(rows, -1, width)
    heads, pairs = by_head.shape[1], width // 2
    cos, sin = cos.contiguous(), sin.contiguous()
    # Contraction into fused multiply-adds would change float32 bits.
    _rotate[(rows, triton.cdiv(heads, _HEADS_BLOCK))](
        by_head, cos, sin, out, heads, *by_head.stride(), cos.stride(0),
        PAIRS=pairs, HEADS=_HEADS_BLOCK, BLOCK=triton.next_power_of_2(pairs), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


COMPILE = [
    (_rotate, {
        "x": "*bf16", "cos": "*bf16", "sin": "*bf16", "out": "*bf16", "heads": "i32", "x_row": "i32", "x_head": "i32", "x_value": 1,
        "t_row": "i32", "PAIRS": 32, "HEADS": _HEADS_BLOCK, "BLOCK": 32, "num_warps": 1,
    }),
]  # fmt: skip
