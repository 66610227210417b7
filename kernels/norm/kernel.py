"""Norms on a device: one program a row, which it reads once and keeps in registers.

Invariants:
1. A row is reduced in a shape given by its width alone; other rows are other programs.
2. The order of casts is the reference's: rms_norm rounds to the input's dtype before the weight.

Floor at width 6,144 bf16: 24 KiB moved a row, nothing beside a launch; the latency of one load and one reduction is what a row costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["join_norms", "layer_norm", "rms_norm", "rms_scaled"]


@triton.jit
def rms_scaled(given, weights, eps, WIDTH: tl.constexpr):
    """RMSNorm of one row of values, zero past WIDTH, times float32 weights: float32, before the last rounding."""
    wide = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    return (wide * scale).to(given.dtype).to(tl.float32) * weights


@triton.jit
def _rms(x, weight, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    given = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = rms_scaled(given, weights, eps, WIDTH)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer(x, weight, bias, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shifted = scaled + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, shifted.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join(
    first, first_weight, second, second_weight, out, first_stride, second_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = out.dtype.element_ty
    if half == 0:
        given = tl.load(first + row * first_stride + column, mask=inside, other=0.0)
        weights = tl.load(first_weight + column, mask=inside, other=0.0).to(tl.float32)
    else:
        given = tl.load(second + row * second_stride + column, mask=inside, other=0.0).to(kind)
        weights = tl.load(second_weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (2 * row + half) * WIDTH + column, rms_scaled(given, weights, eps, WIDTH).to(kind), mask=inside)


def _rows(x: Tensor) -> Tensor:
    """`x` as [rows, width] whose values lie side by side; a copy only where they do not."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or x.shape[-1] == 1 else flat.contiguous()


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the package page."""
    flat, width = _rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    block = triton.next_power_of_2(width)
    if flat.shape[0]:
        _rms[(flat.shape[0],)](flat, weight.contiguous(), out, flat.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=_warps(block))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See the package page."""
    flat, width = _rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    if flat.shape[0]:
        _layer[(flat.shape[0],)](
            flat, weight.contiguous(), bias.contiguous(), out, flat.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=_warps(block)
        )
    return out


def join_norms(first: Tensor, first_weight: Tensor, second: Tensor, second_weight: Tensor, eps: float) -> Tensor:
    """See the package page. One launch; capturable."""
    rows, width = first.shape
    first, second = _rows(first), _rows(second)
    out = torch.empty((rows, 2 * width), dtype=first.dtype, device=first.device)
    block = triton.next_power_of_2(width)
    if rows:
        _join[(rows, 2)](
            first, first_weight.contiguous(), second, second_weight.contiguous(), out, first.stride(0), second.stride(0), eps,
            WIDTH=width, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


_HIDDEN = {"x": "*bf16", "out": "*bf16", "weight": "*bf16", "x_stride": "i32", "eps": "fp32"}
_PAIR: dict[str, str | int] = {"first": "*bf16", "first_weight": "*bf16", "second_weight": "*bf16", "out": "*bf16", "eps": "fp32"}
_PAIR |= {"first_stride": "i32", "second_stride": "i32", "WIDTH": 6144, "BLOCK": 8192, "num_warps": 16}
COMPILE = [
    (_join, _PAIR | {"second": "*fp32"}),
    (_join, _PAIR | {"second": "*bf16"}),
    (
        _join,
        _PAIR
        | dict.fromkeys(("first", "first_weight", "second", "second_weight", "out"), "*fp32")
        | {"WIDTH": 48, "BLOCK": 64, "num_warps": 1},
    ),
    (_rms, _HIDDEN | {"WIDTH": 6144, "BLOCK": 8192, "num_warps": 16}),
    (_rms, _HIDDEN | {"x": "*fp32", "WIDTH": 512, "BLOCK": 512, "num_warps": 1}),
    (_layer, _HIDDEN | {"bias": "*bf16", "WIDTH": 128, "BLOCK": 128, "num_warps": 1}),
]
