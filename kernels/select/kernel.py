"""The selection on a device: the k-th best score (the cut) digit by digit, and every chosen position straight to its place.

Three launches over chunks of positions. `_count` counts first digits; `_narrow` finds the cut's first digit from the counts, tallies scores
above it in each chunk, and lists the scores that have it (the candidates) while it counts their second digits; `_write` finds the rest of
the cut among the candidates, which are few, and writes positions. A chunk knows how many places earlier chunks take: their tallies, and
the candidates at lower positions. So the result is ascending without a sort. The scoring of a step counts first digits itself
(`kernels/index_score`), and two launches are left.

Digits. A score is an ordered integer (`cuts.order_of`). The first of 4,096 digits is its sign, five bits of exponent, and six of the
fraction: 32 octaves from 2^-18 on, cut in 64 each. Some hundreds of scores share the cut's digit wherever scores spread over an octave, and
few atomics meet at one counter. The other 17 bits are a digit of 12 and one of 5. What is smaller (the middle), larger or NaN falls into a
digit that holds more than 2^17 integers: where the cut lies in such a one, its bits are found 8 at a time. The middle, where equal scores
are likeliest, is not counted: it has what the others leave.

Invariants:
1. Comparisons and integer sums only (integer atomics on counts and on the list's length), so the result is exact and free of order: the
   list's order is that of arrival, and only sums over it are used.
2. NaN ranks below -inf; -0.0 as 0.0. Ties at the cut are taken from the lowest position up.
3. Memory of the buffer is read also outside a row's range (whole 16-byte words then), and told apart after that.
4. Grids follow from the buffer's shape; ranges are read on the device, and a chunk outside its row's range ends at once.
5. Counts of first digits are zero between selections: `_write`, which no longer needs them, zeroes them.
6. A row with more candidates than the list holds (heavy ties) reads its scores in place of the list: slower, and the same result.

Refused: `tl.histogram` in place of atomics a score. It compares every score with every digit, and 256 digits leave four launches.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.select.cuts import order_of
from kernels.select.room import COUNTS, DIGIT_AT, DIGITS, LISTED_AT, SECOND_AT, WANTED_AT, SelectRoom

__all__ = ["CHUNK", "count", "count_digits", "narrow_and_write", "select"]

CHUNK = 2048
WARPS = 4
CANDIDATES_TILE = 1024
_COUNTS = tl.constexpr(COUNTS)
_DIGIT_AT = tl.constexpr(DIGIT_AT)
_DIGITS = tl.constexpr(DIGITS)
_LISTED_AT = tl.constexpr(LISTED_AT)
_SECOND_AT = tl.constexpr(SECOND_AT)
_WANTED_AT = tl.constexpr(WANTED_AT)
_SIDE = tl.constexpr(64)  # digits in as many groups of as many
_MIDDLE = tl.constexpr(DIGITS // 2)
_STEP = tl.constexpr(17)  # bits below the first digit
_LEAST = tl.constexpr((127 - 18) << 23)  # the integer of 2^-18, where digits begin
_TOP = tl.constexpr(-(2**31))  # turns an ordered integer into an unsigned one


@triton.jit
def _first_digit(order):
    """First digits of ordered integers."""
    size = tl.where(order < 0, -1 - order, order)
    step = tl.minimum(tl.maximum(size - _LEAST, 0) >> _STEP, _MIDDLE - 1)
    return tl.where(order < 0, tl.where(step > 0, _MIDDLE - 1 - step, _MIDDLE), _MIDDLE + step)


@triton.jit
def _is_wide(digit):
    """Whether a first digit holds more than 2^17 integers."""
    return (digit == 0) | (digit == _MIDDLE) | (digit == _DIGITS - 1)


@triton.jit
def _below(digit):
    """The least integer of a first digit that is not wide."""
    return tl.where(digit > _MIDDLE, _LEAST + ((digit - _MIDDLE) << _STEP), -_LEAST - ((_MIDDLE - digit) << _STEP))


@triton.jit
def count_digits(score, counts, inside):
    """Count first digits of scores at `counts` (of their rows), where `inside`; not the middle."""
    digit = _first_digit(order_of(score))
    tl.atomic_add(counts + digit, 1, mask=inside & (digit != _MIDDLE), sem="relaxed")


@triton.jit
def _largest(digit, count, wanted):
    """The largest digit that leaves at least `wanted` at or above it, else 0; how many are wanted of that digit."""
    enough = tl.cumsum(count, 0, reverse=True) >= wanted  # of the digits from 0 to the one looked for
    rest = tl.where(enough, tl.full([], 1, tl.int64) << 32, tl.where(digit > 0, count, 0).to(tl.int64))
    rest = tl.sum(rest, 0)  # how many are enough, and what counts above them, in one reduction
    return tl.maximum((rest >> 32).to(tl.int32) - 1, 0), wanted - (rest & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _largest_of(counts, total, wanted, INFERRED: tl.constexpr):
    """`_largest` of 4,096 digits: first their group, then the digit in it. INFERRED: the middle has what others leave of `total`."""
    side = tl.arange(0, _SIDE)
    groups = tl.sum(tl.load(counts + side[:, None] * _SIDE + side[None, :]), 1)
    middle = total * 0
    if INFERRED:
        middle = total - tl.sum(groups, 0)
        groups += tl.where(side == _MIDDLE // _SIDE, middle, 0)
    group, wanted = _largest(side, groups, wanted)
    digit = group * _SIDE + side
    digit_in_group, wanted = _largest(side, tl.load(counts + digit) + tl.where(digit == _MIDDLE, middle, 0), wanted)
    return group * _SIDE + digit_in_group, wanted


@triton.jit
def _chunk_of(scores, stride, columns, row, chunk, begin, end, CHUNK: tl.constexpr):
    """Positions of a chunk, which of them lie in the row's range, and their scores."""
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + row * stride + position, mask=position < columns, other=0.0)
    return position, (position >= begin) & (position < end), score


@triton.jit
def _count(scores, stride, columns, first, last, counts, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first + row), tl.load(last + row)
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        _, inside, score = _chunk_of(scores, stride, columns, row, chunk, begin, end, CHUNK)
        count_digits(score, counts + row * _COUNTS, inside)


@triton.jit
def _narrow(scores, stride, columns, first, last, limit, counts, tallies, candidates, chunks, listed_max, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin, end = tl.maximum(tl.load(first + row), 0), tl.load(last + row)
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        position, inside, score = _chunk_of(scores, stride, columns, row, chunk, begin, end, CHUNK)
        of_row = counts + row * _COUNTS
        digit, wanted = _largest_of(of_row, (end - begin).to(tl.int32), limit, True)
        if chunk == begin // CHUNK:
            tl.store(of_row + _DIGIT_AT, digit)
            tl.store(of_row + _WANTED_AT, wanted)
        order = order_of(score)
        found = _first_digit(order)
        candidate = inside & (found == digit)
        both = candidate.to(tl.int32) + ((inside & (found > digit)).to(tl.int32) << 16)  # two counts of at most CHUNK each
        listed = tl.cumsum(candidate.to(tl.int32), 0)
        both = tl.sum(both, 0)
        tl.store(tallies + row * chunks + chunk, both >> 16)
        second = (order - _below(digit)) >> 5
        tl.atomic_add(of_row + _SECOND_AT + second, 1, mask=candidate & ~_is_wide(digit), sem="relaxed")
        at = tl.atomic_add(of_row + _LISTED_AT, both & 0xFFFF, sem="relaxed") + listed - 1
        to = candidates + row * 2 * listed_max
        tl.store(to + at, order, mask=candidate & (at < listed_max))
        tl.store(to + listed_max + at, position, mask=candidate & (at < listed_max))


@triton.jit
def _candidates(scores, stride, row, candidates, at, end, digit, whole, listed_max):
    """Ordered integers and positions of candidates at these places of the list, or of the row itself; and which are there."""
    there = at < end
    listed = candidates + row * 2 * listed_max + at
    score = tl.load(scores + row * stride + at, mask=there & whole, other=0.0)
    order = tl.where(whole, order_of(score), tl.load(listed, mask=there & ~whole, other=0))
    position = tl.where(whole, at, tl.load(listed + listed_max, mask=there & ~whole, other=0))
    return order, position, there & (_first_digit(order) == digit)


@triton.jit
def _cut_in(scores, stride, row, candidates, start, until, digit, whole, listed_max, second, wanted, TILE: tl.constexpr):
    """The cut and how many equal to it are taken: the last 5 bits of a digit that is not wide."""
    base = _below(digit) + (second << 5)
    counted = tl.zeros([32], tl.int32)
    while start < until:
        order, _, there = _candidates(scores, stride, row, candidates, start + tl.arange(0, TILE), until, digit, whole, listed_max)
        counted += tl.histogram(order & 31, 32, mask=there & ((order - base) >> 5 == 0))
        start += TILE
    third, equals = _largest(tl.arange(0, 32), counted, wanted)
    return base + third, equals


@triton.jit
def _cut_in_wide(scores, stride, row, candidates, start, until, digit, whole, listed_max, wanted, TILE: tl.constexpr):
    """The cut and how many equal to it are taken, in a wide digit: 8 bits at a time."""
    cut = wanted * 0
    for number in tl.static_range(4):
        place = start
        counted = tl.zeros([256], tl.int32)
        while place < until:
            order, _, there = _candidates(scores, stride, row, candidates, place + tl.arange(0, TILE), until, digit, whole, listed_max)
            rank = (order ^ _TOP).to(tl.int64) & 0xFFFFFFFF
            if number > 0:
                there = there & (rank >> (32 - 8 * number) == (cut.to(tl.int64) & 0xFFFFFFFF) >> (32 - 8 * number))
            counted += tl.histogram((rank >> (24 - 8 * number) & 255).to(tl.int32), 256, mask=there)
            place += TILE
        found, wanted = _largest(tl.arange(0, 256), counted, wanted)
        cut = cut | (found << (24 - 8 * number))
    return cut ^ _TOP, wanted


@triton.jit
def _write(scores, stride, columns, first, last, limit, counts, tallies, candidates, out, out_stride, chunks, listed_max,
           CHUNKS_BLOCK: tl.constexpr, PICKS_BLOCK: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin, end = tl.maximum(tl.load(first + row), 0), tl.load(last + row)
    of_row = counts + row * _COUNTS
    if chunk == 0:
        pick = tl.arange(0, PICKS_BLOCK)
        unused = (pick < limit) & (pick >= end - begin)
        tl.store(out + row * out_stride + pick, tl.full([PICKS_BLOCK], -1, tl.int32), mask=unused)
        tl.store(of_row + tl.arange(0, _DIGITS), tl.zeros([_DIGITS], tl.int32))
    if (chunk * CHUNK < end) & (chunk * CHUNK + CHUNK > begin):
        position, inside, score = _chunk_of(scores, stride, columns, row, chunk, begin, end, CHUNK)
        earlier = tl.arange(0, CHUNKS_BLOCK)
        counted = (earlier < chunk) & (earlier >= begin // CHUNK)
        sure = tl.sum(tl.load(tallies + row * chunks + earlier, mask=counted, other=0), 0)
        digit, listed, wanted = tl.load(of_row + _DIGIT_AT), tl.load(of_row + _LISTED_AT), tl.load(of_row + _WANTED_AT)
        whole = listed > listed_max
        start = tl.where(whole, begin, 0).to(tl.int32)
        until = tl.where(whole, end, listed).to(tl.int32)
        if _is_wide(digit):
            cut, equals = _cut_in_wide(scores, stride, row, candidates, start, until, digit, whole, listed_max, wanted, TILE)
        else:
            second, wanted = _largest_of(of_row + _SECOND_AT, wanted, wanted, False)
            cut, equals = _cut_in(scores, stride, row, candidates, start, until, digit, whole, listed_max, second, wanted, TILE)
        earlier_ones = tl.zeros([TILE], tl.int64)  # above the cut, and at it in the upper half
        while start < until:
            other, at, there = _candidates(scores, stride, row, candidates, start + tl.arange(0, TILE), until, digit, whole, listed_max)
            there = there & (at < chunk * CHUNK)
            earlier_ones += (there & (other > cut)).to(tl.int64) + ((there & (other == cut)).to(tl.int64) << 32)
            start += TILE
        order = order_of(score)
        above = (inside & (order > cut)).to(tl.int32)
        equal = (inside & (order == cut)).to(tl.int32)
        both = above | (equal << 16)  # one prefix sum for two counts of at most CHUNK each
        before = tl.cumsum(both, 0) - both
        found_before = tl.sum(earlier_ones, 0)
        equal_rank = (found_before >> 32).to(tl.int32) + (before >> 16)
        taken = (above > 0) | ((equal > 0) & (equal_rank < equals))
        place = sure + (found_before & 0xFFFFFFFF).to(tl.int32) + (before & 0xFFFF) + tl.minimum(equal_rank, equals)
        tl.store(out + row * out_stride + place, position, mask=taken)


def narrow_and_write(scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor, room: SelectRoom) -> None:
    """The selection behind the count of first digits in `room.counts`, whose other values are zero. Two launches; capturable."""
    rows, columns = scores.shape
    chunks, stride, listed_max = triton.cdiv(columns, CHUNK), room.tallies.shape[1], room.candidates.shape[2]
    assert room.counts.shape[0] >= rows, f"room for {room.counts.shape[0]} rows, not {rows}"
    assert stride >= chunks, f"room for {stride} tallies a row, not {chunks}"
    _narrow[(chunks, rows)](
        scores, scores.stride(0), columns, first, last, k, room.counts, room.tallies, room.candidates, stride, listed_max, CHUNK=CHUNK,
        num_warps=WARPS,
    )  # fmt: skip
    _write[(chunks, rows)](
        scores, scores.stride(0), columns, first, last, k, room.counts, room.tallies, room.candidates, out, out.stride(0), stride,
        listed_max, CHUNKS_BLOCK=triton.next_power_of_2(chunks), PICKS_BLOCK=triton.next_power_of_2(k), TILE=CANDIDATES_TILE,
        CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip


def count(scores: Tensor, first: Tensor, last: Tensor, room: SelectRoom) -> None:
    """Count first digits into `room.counts`. One launch."""
    rows, columns = scores.shape
    _count[(triton.cdiv(columns, CHUNK), rows)](
        scores, scores.stride(0), columns, first, last, room.counts, CHUNK=CHUNK, num_warps=WARPS
    )  # fmt: skip


def select(scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor) -> None:
    """See the package page. Values of a row of `scores` lie side by side, as do those of `out`."""
    rows, columns = scores.shape
    if rows == 0 or k == 0:
        return
    if columns == 0:
        out.fill_(-1)
        return
    room = SelectRoom.empty(rows, columns, scores.device)
    count(scores, first, last, room)
    narrow_and_write(scores, first, last, k, out, room)


_SCORES = {
    "scores": "*fp32",
    "stride": 1 << 20,
    "columns": 1 << 20,
    "first": "*i64",
    "last": "*i64",
    "counts": "*i32",
    "CHUNK": CHUNK,
    "num_warps": WARPS,
}
_FOUND = _SCORES | {"limit": "i32", "tallies": "*i32", "candidates": "*i32", "chunks": "i32", "listed_max": "i32"}
_OUT = {"out": "*i32", "out_stride": 2048, "CHUNKS_BLOCK": 512, "PICKS_BLOCK": 2048, "TILE": CANDIDATES_TILE}
COMPILE = [(_count, _SCORES), (_narrow, _FOUND), (_write, _FOUND | _OUT)]
