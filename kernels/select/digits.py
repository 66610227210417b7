"""Digits of scores that are counted where the scores are made, and what the counts say of a row's cut.

A digit is 16 steps an octave over 32 octaves around 1, sign and exponent and four bits of the fraction: one count of them leaves a few
hundred scores of a long row undecided, wherever its values lie. What is below the octaves (negative and NaN too) or above them is one digit
at either end: such a cut costs time, and is exact all the same.

Invariant: digits are in the order of ranks, and integers are counted (below 2^22 a row), so sums are free of order.
"""

import triton
import triton.language as tl

from kernels.select.kernel import rank_of

__all__ = ["BINS", "DIGITS", "LOWEST", "ROW_COUNTS", "SHIFT", "count_digits", "cut_digit", "digit_of"]

DIGITS = 512
ROW_COUNTS = DIGITS + 32  # int32 a row: the digits' counts, then how many candidates are listed; a row begins at whole 128 bytes

_SHIFT = 19
_LOWEST = (0x80000000 >> _SHIFT) + ((127 - 16) << 4)  # digits of 2^-16 and on
BINS = tl.constexpr(DIGITS)
SHIFT = tl.constexpr(_SHIFT)
LOWEST = tl.constexpr(_LOWEST)


@triton.jit
def digit_of(rank):
    """Digits of ranks, int32."""
    digit = (rank >> SHIFT).to(tl.int32) - LOWEST
    return tl.minimum(tl.maximum(digit, 0), BINS - 1)


@triton.jit
def count_digits(scores, counts, begin, end, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Add the digits of one row's scores at `begin .. end - 1` to its counts: of the blocks that this program of PROGRAMS has stored,
    TILE positions at a time."""
    at = tl.arange(0, TILE)
    digit = tl.arange(0, BINS)
    first = tl.program_id(0)
    while first * BLOCK < end:
        position = (first + at // BLOCK * PROGRAMS) * BLOCK + at % BLOCK
        inside = (position >= begin) & (position < end)
        rank = rank_of(tl.load(scores + position, mask=inside, other=0.0))
        found = tl.histogram(digit_of(rank), BINS, mask=inside)
        tl.atomic_add(counts + digit, found, mask=found > 0, sem="relaxed")
        first += TILE // BLOCK * PROGRAMS


@triton.jit
def cut_digit(counts, wanted):
    """The digit that holds a row's `wanted`-th best rank, or 0 where there are fewer, and how many of that digit are taken."""
    digit = tl.arange(0, BINS)
    at_least = tl.cumsum(tl.load(counts + digit), reverse=True)
    # The lowest digit but 0 that too few reach, and how many do: both in one reduction, since the digit decides it.
    beyond = tl.max(tl.where((at_least < wanted) & (digit > 0), ((digit * -1 + BINS) << 22) | at_least, 0))
    return (beyond >> 22) * -1 + (BINS - 1), wanted - (beyond & 0x3FFFFF)
