"""The selection on a device: a radix search for the k-th best score, then every chosen position straight to its place.

A score becomes an order-preserving unsigned 32-bit rank. Four launches find the rank of the k-th best (the cut), 8 bits each: programs
over chunks of 4,096 positions count digits among ranks that share the digits found so far. One launch tallies each chunk's ranks above
and at the cut, one writes positions: a chunk knows how many places earlier chunks took, so the result is ascending without a sort.

Invariants:
1. Comparisons and integer sums only (integer atomics on the digit counts), so the result is exact and free of order.
2. NaN has rank 0, below -inf; -0.0 has the rank of 0.0; ties at the cut are taken from the lowest position up.
3. Memory of the buffer is read also outside a row's range (whole 16-byte words then), and told apart after that.
4. Grids follow from the buffer's shape; ranges and limits are read on the device, and a chunk outside its row's range ends at once.

Bytes at 1,048,576 scores: 4 MiB six times, from L2 (just written by the scoring): 1 us each at 5 TB/s; 256 programs, one load each in
flight before its use. A digit of 8 bits keeps a histogram at 8 counters a lane; 11 bits would save one launch and count 64 a lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["CHUNK", "cut_of", "find_cuts", "rank_of", "select", "tally"]

CHUNK = 2048
WARPS = 4
_DIGITS = 256
_PASSES = 4
# A prompt's scores grow from tile to tile: their number must not make a kernel anew, which takes a quarter of a second.
GROWS = ("chunks",)
_CHUNKS_BLOCK = 256  # tallies of earlier chunks that are added at a time, whatever their number


@triton.jit
def rank_of(score):
    """Unsigned 32-bit rank of float32 scores, in their order."""
    bits = score.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rank = tl.where((bits >> 31 != 0) & (size != 0), bits ^ 0xFFFFFFFF, size | 0x80000000)
    return tl.where(size > 0x7F800000, 0, rank).to(tl.uint32)


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
def _count(
    scores, stride, columns, first, last, limits, limit, states, counts, PASS: tl.constexpr, PER_ROW: tl.constexpr, CHUNK: tl.constexpr
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    shift: tl.constexpr = 24 - 8 * PASS
    prefix = tl.full([], 0, tl.uint32)
    wanted = tl.load(limits + row).to(tl.int32) if PER_ROW else limit
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


@triton.jit(do_not_specialize=GROWS)
def tally(scores, stride, columns, first, last, states, counts, tallies, chunks, CHUNK: tl.constexpr):
    """Ranks above and at the cut in each chunk of a row's range: `tallies` [rows, chunks, 2]."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first + row), tl.load(last + row)
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        cut, _ = cut_of(states, counts, row)
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (position >= begin) & (position < end)
        rank = rank_of(tl.load(scores + row * stride + position, mask=position < columns, other=0.0))
        to_tally = tallies + (row * chunks + chunk) * 2
        tl.store(to_tally, tl.sum((inside & (rank > cut)).to(tl.int32)))
        tl.store(to_tally + 1, tl.sum((inside & (rank == cut)).to(tl.int32)))


@triton.jit
def _taken_of(rank, inside, cut, equals, tallies, row, chunk, begin, chunks, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Which of a chunk's ranks are among the best, and how many of the row's come before each."""
    above_before = 0
    equal_before = 0
    start = (tl.maximum(begin, 0) // CHUNK).to(tl.int32)
    while start < chunk:
        earlier = start + tl.arange(0, CHUNKS_BLOCK)
        from_tally = tallies + (row * chunks + earlier) * 2
        above_before += tl.sum(tl.load(from_tally, mask=earlier < chunk, other=0))
        equal_before += tl.sum(tl.load(from_tally + 1, mask=earlier < chunk, other=0))
        start += CHUNKS_BLOCK
    above = (inside & (rank > cut)).to(tl.int32)
    equal = (inside & (rank == cut)).to(tl.int32)
    both = above | (equal << 16)  # one prefix sum for two counts of at most 4,096
    before = tl.cumsum(both) - both
    equal_rank = equal_before + (before >> 16)
    taken = (above > 0) | ((equal > 0) & (equal_rank < equals))
    return taken, above_before + (before & 0xFFFF) + tl.minimum(equal_rank, equals)


@triton.jit(do_not_specialize=GROWS)
def _write(scores, stride, columns, first, last, limit, states, counts, tallies, out, out_stride, chunks,
           CHUNKS_BLOCK: tl.constexpr, PICKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first + row), tl.load(last + row)
    if chunk == 0:
        pick = tl.arange(0, PICKS_BLOCK)
        tl.store(
            out + row * out_stride + pick, tl.full([PICKS_BLOCK], -1, tl.int32), mask=(pick < limit) & (pick >= end - tl.maximum(begin, 0))
        )
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        cut, equals = cut_of(states, counts, row)
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (position >= begin) & (position < end)
        rank = rank_of(tl.load(scores + row * stride + position, mask=position < columns, other=0.0))
        taken, place = _taken_of(rank, inside, cut, equals, tallies, row, chunk, begin, chunks, CHUNKS_BLOCK, CHUNK)
        tl.store(out + row * out_stride + place, position, mask=taken)


def find_cuts(
    scores: Tensor, first: Tensor, last: Tensor, limit: int, limits: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Digits of each row's cut, for `cut_of`: states [rows, 4, 2] and counts [rows, 4, 256], int32.

    scores  [rows, columns]  float32  values of a row side by side
    limits  [rows]           int64    the k of each row in place of `limit`
    """
    rows, columns = scores.shape
    chunk = chunk or CHUNK
    states = torch.empty((rows, _PASSES, 2), dtype=torch.int32, device=scores.device)
    counts = torch.zeros((rows, _PASSES, _DIGITS), dtype=torch.int32, device=scores.device)
    for number in range(_PASSES):
        _count[(triton.cdiv(columns, chunk), rows)](
            scores, scores.stride(0), columns, first, last, first if limits is None else limits, limit, states, counts,
            PASS=number, PER_ROW=limits is not None, CHUNK=chunk, num_warps=WARPS,
        )  # fmt: skip
    return states, counts


def select(scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor, chunk: int | None = None) -> None:
    """See the package page. Values of a row of `scores` lie side by side, as do those of `out`.

    Args: chunk: positions a program, a power of two; CHUNK unless given.
    """
    rows, columns = scores.shape
    chunk = chunk or CHUNK
    if rows == 0 or k == 0:
        return
    if columns == 0:
        out.fill_(-1)
        return
    states, counts = find_cuts(scores, first, last, k, chunk=chunk)
    chunks = triton.cdiv(columns, chunk)
    tallies = torch.empty((rows, chunks, 2), dtype=torch.int32, device=scores.device)
    tally[(chunks, rows)](
        scores, scores.stride(0), columns, first, last, states, counts, tallies, chunks, CHUNK=chunk, num_warps=WARPS
    )  # fmt: skip
    _write[(chunks, rows)](
        scores, scores.stride(0), columns, first, last, k, states, counts, tallies, out, out.stride(0), chunks,
        CHUNKS_BLOCK=_CHUNKS_BLOCK, PICKS_BLOCK=triton.next_power_of_2(k), CHUNK=chunk, num_warps=WARPS,
    )  # fmt: skip


_SCORES = {
    "scores": "*fp32",
    "stride": 1 << 20,
    "columns": 1 << 20,
    "first": "*i64",
    "last": "*i64",
    "states": "*i32",
    "counts": "*i32",
    "num_warps": WARPS,
}
_FOUND = _SCORES | {"tallies": "*i32", "chunks": "i32", "CHUNK": CHUNK}
COMPILE = [
    *((_count, _SCORES | {"limits": "*i64", "limit": "i32", "PASS": number, "PER_ROW": per_row, "CHUNK": CHUNK})
      for number, per_row in ((0, True), (1, False), (3, False))),
    (tally, _FOUND),
    (_write, _FOUND | {"limit": "i32", "out": "*i32", "out_stride": 2048, "CHUNKS_BLOCK": _CHUNKS_BLOCK, "PICKS_BLOCK": 2048}),
]  # fmt: skip
