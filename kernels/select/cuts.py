"""Ranks of scores, and the rank of each row's k-th best (the cut) by four launches of 8 bits each. For rows whose k differs.

A score becomes an order-preserving unsigned 32-bit rank. Programs over chunks of positions count digits among ranks that share the digits
found so far. `kernel.py` chooses positions and is faster where every row wants as many.

Invariants:
1. Comparisons and integer sums only (integer atomics on the digit counts), so the result is exact and free of order.
2. NaN has rank 0, below -inf; -0.0 has the rank of 0.0.
3. Grids follow from the buffer's shape; ranges and limits are read on the device, and a chunk outside its row's range ends at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["CHUNK", "cut_of", "find_cuts", "order_of", "rank_of"]

CHUNK = 2048
WARPS = 4
_DIGITS = 256
_PASSES = 4


@triton.jit
def order_of(score):
    """Signed 32-bit rank of float32 scores, in their order; the least for NaN."""
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where((bits < 0) & (size != 0), -1 - size, size)
    return tl.where(size > 0x7F800000, -(2**31), order)


@triton.jit
def rank_of(score):
    """Unsigned 32-bit rank of float32 scores, in their order; 0 for NaN."""
    return order_of(score).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _narrowed(digit_counts, prefix, wanted, SHIFT: tl.constexpr):
    """Add a digit to the cut: the largest one that leaves at least `wanted` ranks at or above it, else 0."""
    digit = tl.arange(0, 256)
    count = tl.load(digit_counts + digit)
    at_least = tl.sum(count) - tl.cumsum(count) + count
    chosen = tl.max(tl.where(at_least >= wanted, digit, 0))
    above = tl.sum(tl.where(digit > chosen, count, 0))
    return prefix | (chosen.to(tl.uint32) << SHIFT), wanted - above


@triton.jit
def cut_of(states, counts, row):
    """A row's cut (its k-th best rank) and how many ranks equal to it are taken."""
    prefix = tl.load(states + row * 8 + 6).to(tl.uint32)
    return _narrowed(counts + row * 1024 + 768, prefix, tl.load(states + row * 8 + 7), 0)


@triton.jit
def _count(scores, stride, columns, first, last, limits, states, counts, PASS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    shift: tl.constexpr = 24 - 8 * PASS
    prefix = tl.full([], 0, tl.uint32)
    wanted = tl.load(limits + row).to(tl.int32)
    if PASS > 0:
        if PASS > 1:
            prefix = tl.load(states + row * 8 + 2 * (PASS - 1)).to(tl.uint32)
            wanted = tl.load(states + row * 8 + 2 * (PASS - 1) + 1)
        prefix, wanted = _narrowed(counts + row * 1024 + (PASS - 1) * 256, prefix, wanted, shift + 8)
        if chunk == 0:
            tl.store(states + row * 8 + 2 * PASS, prefix.to(tl.int32, bitcast=True))
            tl.store(states + row * 8 + 2 * PASS + 1, wanted)
    begin, end = tl.load(first + row), tl.load(last + row)
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (position >= begin) & (position < end)
        rank = rank_of(tl.load(scores + row * stride + position, mask=position < columns, other=0.0))
        if PASS > 0:
            inside = inside & (rank >> (shift + 8) == prefix >> (shift + 8))
        found = tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=inside)
        tl.atomic_add(counts + row * 1024 + PASS * 256 + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")


def find_cuts(scores: Tensor, first: Tensor, last: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of each row's cut, for `cut_of`: states [rows, 4, 2] and counts [rows, 4, 256], int32.

    scores  [rows, columns]  float32  values of a row side by side
    limits  [rows]           int64    the k of each row
    """
    rows, columns = scores.shape
    states = torch.empty((rows, _PASSES, 2), dtype=torch.int32, device=scores.device)
    counts = torch.zeros((rows, _PASSES, _DIGITS), dtype=torch.int32, device=scores.device)
    for number in range(_PASSES):
        _count[(triton.cdiv(columns, CHUNK), rows)](
            scores, scores.stride(0), columns, first, last, limits, states, counts, PASS=number, CHUNK=CHUNK, num_warps=WARPS
        )  # fmt: skip
    return states, counts


_SCORES = {
    "scores": "*fp32",
    "stride": 1 << 20,
    "columns": 1 << 20,
    "first": "*i64",
    "last": "*i64",
    "limits": "*i64",
    "states": "*i32",
    "counts": "*i32",
    "CHUNK": CHUNK,
    "num_warps": WARPS,
}
COMPILE = [(_count, _SCORES | {"PASS": number}) for number in (0, 1, 3)]
