"""Rotary positions on a device: the values of some rows of x, all pairs, in one launch.

Invariants:
1. A rotated value is the reference's to the bit for float32 (no fused multiply-add), and rounds each product as torch does otherwise.
2. An angle is the reference's float32 product. Its sine and cosine are computed in float64 with plain multiplications and additions, so
   they are correctly rounded to float32 but for what lies within 1e-7 of a tie, and are the same bits on every card; no card's own
   approximation, good or bad at a million radians, has a part in it.
"""

from fractions import Fraction

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rope_table", "rotate", "rotate_first", "turned"]

_HEADS_BLOCK = 8
_QUARTER = Fraction("3.14159265358979323846264338327950288419716939937510") / 2  # of a turn
_HEAD = Fraction(int(_QUARTER * 2**27), 2**27)  # 28 bits: a multiple of it below 2^25 is exact in float64
HEAD = tl.constexpr(float(_HEAD))
TAIL = tl.constexpr(float(_QUARTER - _HEAD))
QUARTERS = tl.constexpr(float(1 / _QUARTER))
_TERMS = 8  # of either series: the first one left out is below 1e-15 at an eighth of a turn


@triton.jit
def turned(even, odd, c, s):
    """Pairs of values turned by float32 cosines and sines, in the values' own type; every product is rounded to it first."""
    kind = even.dtype
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    first = (even * c).to(kind).to(tl.float32) - (odd * s).to(kind).to(tl.float32)
    second = (odd * c).to(kind).to(tl.float32) + (even * s).to(kind).to(tl.float32)
    return first.to(kind), second.to(kind)


@triton.jit
def _rotate(
    x, cos, sin, out, heads, x_row, x_head, x_value, out_row, out_head, t_row, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    known = pair < PAIRS
    inside = (head < heads)[:, None] & known[None, :]
    from_x = x + row * x_row + head[:, None] * x_head + pair[None, :] * 2 * x_value
    even = tl.load(from_x, mask=inside, other=0.0)
    odd = tl.load(from_x + x_value, mask=inside, other=0.0)
    c = tl.load(cos + row * t_row + pair, mask=known, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * t_row + pair, mask=known, other=0.0).to(tl.float32)[None, :]
    first, second = turned(even, odd, c, s)
    to_out = out + row * out_row + head[:, None] * out_head + pair[None, :] * 2
    tl.store(to_out, first, mask=inside)
    tl.store(to_out + 1, second, mask=inside)


@triton.jit
def _table(positions, frequencies, cos, sin, PAIRS: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    known = pair < PAIRS
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + pair, mask=known, other=0.0)
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * QUARTERS + 0.5)
    rest = (wide - quarters * HEAD) - quarters * TAIL  # within an eighth of a turn
    square = rest * rest
    even = square * 0.0 + 1.0
    odd = even
    for term in tl.static_range(TERMS):  # n = 2 * TERMS, ..., 4, 2: the innermost term first
        even = 1.0 - square * (1.0 / ((2 * TERMS - 2 * term) * (2 * TERMS - 2 * term - 1))) * even
        odd = 1.0 - square * (1.0 / ((2 * TERMS - 2 * term) * (2 * TERMS - 2 * term + 1))) * odd
    odd = rest * odd
    quadrant = quarters.to(tl.int64) & 3
    swapped = (quadrant & 1) == 1
    cosine = tl.where(swapped, odd, even)
    sine = tl.where(swapped, even, odd)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    sine = tl.where(quadrant >= 2, -sine, sine)
    kind = cos.dtype.element_ty
    tl.store(cos + row * PAIRS + pair, cosine.to(tl.float32).to(kind), mask=known)
    tl.store(sin + row * PAIRS + pair, sine.to(tl.float32).to(kind), mask=known)


def rope_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the package page. One launch; capturable."""
    rows, pairs = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty((rows, pairs), dtype=dtype, device=positions.device) for _ in range(2))
    if rows:
        block = triton.next_power_of_2(pairs)
        _table[(rows,)](positions.contiguous(), frequencies, cos, sin, pairs, block, _TERMS, num_warps=1, enable_fp_fusion=False)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See the package page."""
    rows, width = x.shape[0], x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x.reshape(rows, -1, width), cos, sin, out.view(rows, -1, width))
    return out


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See the package page. In place: a pair is read and written by one program."""
    assert x.is_contiguous(), "x is not contiguous"
    if x.numel():
        turning = x.view(x.shape[0], -1, x.shape[-1])[..., : 2 * cos.shape[-1]]
        _launch(turning, cos, sin, turning)
    return x


def _launch(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate x [rows, heads, width] to `out`, whose values of a head lie side by side; it may be x itself."""
    rows, heads, width = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    # Contraction into fused multiply-adds would change float32 bits.
    _rotate[(rows, triton.cdiv(heads, _HEADS_BLOCK))](
        x, cos, sin, out, heads, *x.stride(), out.stride(0), out.stride(1), cos.stride(0),
        PAIRS=width // 2, HEADS=_HEADS_BLOCK, BLOCK=triton.next_power_of_2(width // 2), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


_TABLE = {"positions": "*i64", "frequencies": "*fp32", "TERMS": _TERMS, "num_warps": 1}
COMPILE = [
    (_rotate, {
        "x": "*bf16", "cos": "*bf16", "sin": "*bf16", "out": "*bf16", "heads": "i32", "x_row": "i32", "x_head": "i32", "x_value": 1,
        "out_row": "i32", "out_head": "i32", "t_row": "i32", "PAIRS": 32, "HEADS": _HEADS_BLOCK, "BLOCK": 32, "num_warps": 1,
    }),
    (_table, _TABLE | {"cos": "*bf16", "sin": "*bf16", "PAIRS": 32, "BLOCK": 32}),
    (_table, _TABLE | {"cos": "*fp32", "sin": "*fp32", "PAIRS": 4, "BLOCK": 4}),
]  # fmt: skip
