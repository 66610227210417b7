"""The choice of a step's rows whose digits were counted with their scores: two launches behind the scoring.

The counts name the digit that holds a row's cut. `_collect` runs over chunks of positions: it tallies what lies above that digit and lists
what lies in it, a few hundred ranks of a row. Every program of `_emit` then finds the cut in that list, two bits a pass until as many as
are wanted reach it, and writes the chosen positions of its own chunk: tallies and list say how many places earlier chunks took, so the
result is ascending without a sort.

Invariants:
1. Comparisons and integer sums only, so the choice is exact: ties at the cut are taken from the lowest position up, NaN ranks lowest.
2. The list has no order (a program reserves its stretch by an atomic sum); nothing that is read from it depends on one.
3. A row with fewer positions than picks has its cut at rank 0, and every one of them is taken.
4. Scores are read past a row's end too, as far as there are columns, and told apart after that.

Bytes: 200 KB of scores twice at 50,000 positions, from L2, and 4 KiB of list a program: launches and waits for loads are all there is.
Refused: the same search by one program a row (200 KB take one multiprocessor 2 us a pass, and a position's place needs a pass of its own).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import TableField
from kernels.select.digits import BINS, LOWEST, ROW_COUNTS, SHIFT, cut_digit, digit_of
from kernels.select.kernel import rank_of
from kernels.selection.scratch import Scratch

__all__ = ["choose"]

ROWS = tl.constexpr(TableField.ROWS)
COUNTS = tl.constexpr(ROW_COUNTS)
WARPS = 4
LISTED = 512  # ranks that a program of `_emit` holds in registers; longer lists are read anew in every pass


@triton.jit
def _row_end(table, place_of, positions, row, FIELDS: tl.constexpr):
    """One past the last position that a row may choose; 0 for a row whose place is free or -1."""
    position = tl.load(positions + row)
    place = tl.load(place_of + row).to(tl.int64)
    live = (place >= 0) & (tl.load(table + tl.maximum(place, 0) * FIELDS + ROWS) > 0)
    return tl.where(live, position + 1, 0)


@triton.jit
def _collect(table, place_of, positions, scores, stride, columns, counts, tallies, listed, rows, begin, limit, FIELDS: tl.constexpr,
             CHUNKS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    rank = rank_of(tl.load(scores + row * stride + position, mask=position < columns, other=0.0))  # not waiting for the row's end
    digit, _ = cut_digit(counts + row * COUNTS, limit)
    end = _row_end(table, place_of, positions, row, FIELDS)
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        inside = (position >= begin) & (position < end)
        own = digit_of(rank)
        above = (inside & (own > digit)).to(tl.int32)
        tied = inside & (own == digit)
        both = above | (tied.to(tl.int32) << 16)  # one prefix sum for two counts of at most CHUNK each
        until = tl.cumsum(both)
        total = tl.sum(both)
        tl.store(tallies + row * CHUNKS + chunk, total & 65535)
        found = total >> 16
        to = listed + row * stride + tl.atomic_add(counts + row * COUNTS + BINS, found, mask=found > 0, sem="relaxed")
        order = (until >> 16) - 1
        tl.store(to + order, rank.to(tl.int32, bitcast=True), mask=tied)
        tl.store(to + rows * stride + order, position, mask=tied)


@triton.jit
def _counted(first, second, third):
    """How many of each there are among at most 1,023; three counts in one sum."""
    counted = tl.sum(first.to(tl.int32) + (second.to(tl.int32) << 10) + (third.to(tl.int32) << 20))
    return counted & 1023, counted >> 10 & 1023, counted >> 20


@triton.jit
def _before(rank, position, known, cut, start):
    """How many known ranks are above the cut; of those before a position how many are above and at it."""
    above = known & (rank > cut)
    earlier = known & (position < start)
    return _counted(above, above & earlier, earlier & (rank == cut))


@triton.jit
def _listed(ranks, places, start, room, LISTED: tl.constexpr):
    """A piece of the list; what lies past the list's length is anything. Not waiting for that length."""
    at = start + tl.arange(0, LISTED)
    rank = tl.load(ranks + at, mask=at < room, other=0).to(tl.uint32, bitcast=True)
    return rank, tl.load(places + at, mask=at < room, other=0)


@triton.jit
def _search(ranks, rank, length, digit, wanted, LISTED: tl.constexpr):
    """The rank of a listed row's `wanted`-th best, or its least possible where there are fewer. `rank` is the list's first piece."""
    cut = tl.where(digit > 0, (digit + LOWEST).to(tl.uint32) << SHIFT, 0).to(tl.uint32)  # the digit's least rank
    shift = tl.where((digit > 0) & (digit < BINS - 1), (SHIFT - 1) // 2 * 2, 30)  # the digits at either end are wider
    reached = length  # ranks that are at least the cut
    known = tl.arange(0, LISTED) < length
    while (shift >= 0) & (reached > wanted):
        step = tl.full([], 1, tl.uint32) << shift.to(tl.uint32)
        low, middle, high = cut + step, cut + 2 * step, cut + 3 * step
        lows, middles, highs = _counted(known & (rank >= low), known & (rank >= middle), known & (rank >= high))
        start = LISTED
        while start < length:
            at = start + tl.arange(0, LISTED)
            more = tl.load(ranks + at, mask=at < length, other=0).to(tl.uint32, bitcast=True)
            one, two, three = _counted(
                (at < length) & (more >= low), (at < length) & (more >= middle), (at < length) & (more >= high)
            )  # fmt: skip
            lows += one
            middles += two
            highs += three
            start += LISTED
        lows = tl.where(low > cut, lows, 0)  # past the largest rank a sum begins anew
        middles = tl.where(middle > cut, middles, 0)
        highs = tl.where(high > cut, highs, 0)
        cut = tl.where(highs >= wanted, high, tl.where(middles >= wanted, middle, tl.where(lows >= wanted, low, cut)))
        reached = tl.where(highs >= wanted, highs, tl.where(middles >= wanted, middles, tl.where(lows >= wanted, lows, reached)))
        shift -= 2
    return cut


@triton.jit
def _emit(table, place_of, positions, scores, stride, columns, counts, tallies, listed, out, out_stride, rows, begin, limit,
          FIELDS: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, PICKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
          LISTED: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = rank_of(tl.load(scores + row * stride + position, mask=position < columns, other=0.0))
    length = tl.load(counts + row * COUNTS + BINS)
    earlier = tl.arange(0, CHUNKS_BLOCK)
    tally = tl.load(tallies + row * CHUNKS + earlier, mask=earlier < chunk, other=0)
    ranks = listed + row * stride
    rank, place = _listed(ranks, ranks + rows * stride, 0, columns, LISTED)
    digit, wanted = cut_digit(counts + row * COUNTS, limit)
    end = _row_end(table, place_of, positions, row, FIELDS)
    if chunk == 0:
        pick = tl.arange(0, PICKS_BLOCK)
        unused = (pick < limit) & (pick >= end - begin)
        tl.store(out + row * out_stride + pick, tl.full([PICKS_BLOCK], -1, tl.int32), mask=unused)
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        cut = _search(ranks, rank, length, digit, wanted, LISTED)
        above_all, above_before, equal_before = _before(rank, place, tl.arange(0, LISTED) < length, cut, chunk * CHUNK)
        start = LISTED
        while start < length:
            rank, place = _listed(ranks, ranks + rows * stride, start, columns, LISTED)
            one, two, three = _before(rank, place, start + tl.arange(0, LISTED) < length, cut, chunk * CHUNK)
            above_all += one
            above_before += two
            equal_before += three
            start += LISTED
        equals = wanted - above_all
        above_before += tl.sum(tl.where(earlier >= begin // CHUNK, tally, 0))
        inside = (position >= begin) & (position < end)
        above = (inside & (mine > cut)).to(tl.int32)
        equal = (inside & (mine == cut)).to(tl.int32)
        both = above | (equal << 16)
        ahead = tl.cumsum(both) - both
        equal_rank = equal_before + (ahead >> 16)
        taken = (above > 0) | ((equal > 0) & (equal_rank < equals))
        to = above_before + (ahead & 65535) + tl.minimum(equal_rank, equals)
        tl.store(out + row * out_stride + to, position, mask=taken)


def choose(table: Tensor, place_of: Tensor, positions: Tensor, first: int, out: Tensor, scratch: Scratch) -> None:
    """Choose each row's best among its scores from position `first` to its own; arguments as in the package page.

    scratch  its scores hold each row's, its counts their digits (`score_places`)
    """
    assert scratch.counts is not None, "the scratch has no room for counts"
    assert scratch.candidates is not None, "the scratch has no room for candidates"
    rows, picks = out.shape
    columns, chunk = scratch.scores.shape[1], scratch.chunk
    chunks = triton.cdiv(columns, chunk)
    tallies = torch.empty((rows, chunks), dtype=torch.int32, device=out.device)
    shared = {"FIELDS": table.shape[1], "CHUNKS": chunks, "CHUNK": chunk, "num_warps": WARPS}
    _collect[(chunks, rows)](
        table, place_of, positions, scratch.scores, columns, columns, scratch.counts, tallies, scratch.candidates,
        scratch.candidates.shape[1], first, picks, **shared,
    )  # fmt: skip
    _emit[(chunks, rows)](
        table, place_of, positions, scratch.scores, columns, columns, scratch.counts, tallies, scratch.candidates, out, out.stride(0),
        scratch.candidates.shape[1], first, picks, CHUNKS_BLOCK=triton.next_power_of_2(chunks), PICKS_BLOCK=triton.next_power_of_2(picks),
        LISTED=LISTED, **shared,
    )  # fmt: skip


_ROWS = {
    "table": "*i64", "place_of": "*i32", "positions": "*i64", "scores": "*fp32", "stride": 1 << 16, "columns": 1 << 16, "counts": "*i32",
    "tallies": "*i32", "listed": "*i32", "rows": "i32", "begin": "i32", "limit": 2048, "FIELDS": 139, "CHUNKS": 128, "CHUNK": 512,
    "num_warps": WARPS,
}  # fmt: skip
COMPILE = [
    (_collect, _ROWS),
    (_emit, _ROWS | {"out": "*i32", "out_stride": 2048, "CHUNKS_BLOCK": 128, "PICKS_BLOCK": 2048, "LISTED": LISTED}),
]
