"""Drafted rows on a device: a program a place, its rows a tile of 8.

Counts are raised by integer atomics: two accepted rows may have sampled the same token, and a sum of ones has no order.

Bytes: some hundred a place. One launch each, two dependent loads.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, DRAFTS_MAX, STATE_FIELDS, StateField, TableField, TableLayout

__all__ = ["accept_rows", "keep_drafts", "read_standing", "spread_rows", "write_standing"]

ROWS = tl.constexpr(TableField.ROWS)
STATE = tl.constexpr(TableField.STATE)
LOGICAL = tl.constexpr(StateField.LOGICAL)
MIRRORED = tl.constexpr(StateField.MIRRORED)
TOKEN = tl.constexpr(StateField.TOKEN)
BAD_LAYER = tl.constexpr(StateField.BAD_LAYER)
DRAFT_COUNT = tl.constexpr(StateField.DRAFT_COUNT)
DRAFTS = tl.constexpr(StateField.DRAFTS)
TILE = tl.constexpr(DRAFTS_MAX + 1)  # rows a place has at most: a power of two
B_ROWS = tl.constexpr(BLOCK_ROWS)
STATE_WIDTH = tl.constexpr(STATE_FIELDS)
STATE_TILE = tl.constexpr(triton.next_power_of_2(STATE_FIELDS))
INT64 = tl.constexpr(tl.pointer_type(tl.int64))
COUNTS = tl.constexpr(tl.pointer_type(tl.int32))


@triton.jit
def _spread_rows(table, place_of, positions, tokens, mirrored, judged, bad_layer, FIELDS: tl.constexpr, EACH: tl.constexpr):
    place = tl.program_id(0)
    fields = table + place.to(tl.int64) * FIELDS
    rows = tl.load(fields + ROWS)
    busy = rows > 0
    state = tl.load(fields + STATE, mask=busy, other=0).to(INT64)
    drafts = tl.minimum(tl.load(state + DRAFT_COUNT, mask=busy, other=0), rows - 1)
    drafts = tl.minimum(drafts, EACH - 1)
    row = tl.arange(0, TILE)
    inside = row < EACH
    live = inside & busy & (row <= drafts)
    token = tl.load(state + tl.where(row == 0, TOKEN, DRAFTS + row - 1), mask=live, other=0)
    position = tl.load(state + LOGICAL, mask=busy, other=0) + row
    out = place * EACH + row
    tl.store(place_of + out, tl.where(live, place, -1), mask=inside)
    tl.store(positions + out, tl.where(live, position, 0), mask=inside)
    tl.store(tokens + out, token, mask=inside)
    tl.store(bad_layer + out, tl.full((TILE,), -1, tl.int64), mask=inside)
    tl.store(judged + place, tl.where(busy, drafts, 0))
    tl.store(mirrored + place, tl.load(state + MIRRORED, mask=busy, other=0) // B_ROWS * B_ROWS)


@triton.jit
def _accept_rows(table, place_of, tokens, samples, bad_layer, output_counts, accepted, next_of, FIELDS: tl.constexpr,
                 EACH: tl.constexpr):  # fmt: skip
    place = tl.program_id(0)
    fields = table + place.to(tl.int64) * FIELDS
    rows = tl.load(fields + ROWS)
    busy = rows > 0
    row = tl.arange(0, TILE)
    inside = row < EACH
    at = place * EACH + row
    sample = tl.load(samples + at, mask=inside, other=-1)
    # Row j is wrong when it has no draft or its draft is not the sample before it; rows from the first wrong one on do not count.
    drafted = inside & (row > 0) & (tl.load(place_of + at, mask=inside, other=-1) >= 0)
    same = tl.load(tokens + at, mask=drafted, other=0) == tl.load(samples + at - 1, mask=drafted, other=-1)
    wrong = (row > 0) & ~(drafted & same)
    count = tl.min(tl.where(wrong, row, EACH))
    counted = busy & (row < count)
    tl.store(accepted + place, tl.where(busy, count, 0).to(tl.int64))
    followed = busy & ((row < count - 1) | ((row == count - 1) & (rows > 1)))
    tl.store(next_of + at, tl.where(followed, place, -1), mask=inside)
    bad = tl.load(bad_layer + at, mask=counted, other=-1)
    first_bad = tl.min(tl.where(bad >= 0, row, TILE))
    broken = tl.sum(tl.where(row == first_bad, bad, 0))
    token = tl.sum(tl.where(row == count - 1, sample, 0))
    counts = tl.load(output_counts + place)
    if busy:
        state = tl.load(fields + STATE).to(INT64)
        logical = tl.load(state + LOGICAL)
        known = tl.load(state + BAD_LAYER)
        tl.store(state + TOKEN, token)
        tl.store(state + LOGICAL, logical + count)
        tl.store(state + DRAFT_COUNT, tl.zeros([], tl.int64))
        tl.store(state + BAD_LAYER, tl.where((known < 0) & (first_bad < TILE), broken, known))
        tl.atomic_add(counts.to(COUNTS) + sample, 1, mask=counted & (counts != 0))


@triton.jit
def _keep_drafts(table, drafts, ends, ends_count, FIELDS: tl.constexpr, WIDTH: tl.constexpr, ENDS_TILE: tl.constexpr):
    place = tl.program_id(0)
    fields = table + place.to(tl.int64) * FIELDS
    rows = tl.load(fields + ROWS)
    if rows > 0:
        state = tl.load(fields + STATE).to(INT64)
        end = tl.arange(0, ENDS_TILE)
        stop = tl.load(ends + end, mask=end < ends_count, other=-1)
        column = tl.arange(0, TILE)  # column c: TOKEN, then draft c
        draft = tl.load(drafts + place * WIDTH + column - 1, mask=(column > 0) & (column <= WIDTH), other=0)
        draft = tl.where(column == 0, tl.load(state + TOKEN), draft)
        stops = tl.max((draft[:, None] == stop[None, :]).to(tl.int32), 1) > 0
        first_stop = tl.min(tl.where(stops, column, TILE))  # drafts up to it are kept
        count = tl.minimum(tl.minimum(first_stop, WIDTH).to(tl.int64), rows - 1)
        tl.store(state + DRAFT_COUNT, count)
        tl.store(state + DRAFTS + column - 1, tl.where(column <= count, draft, 0), mask=column > 0)


@triton.jit
def _read_standing(table, standing, FIELDS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    fields = table + place * FIELDS
    busy = tl.load(fields + ROWS) > 0
    state = tl.load(fields + STATE, mask=busy, other=0).to(INT64)
    field = tl.arange(0, STATE_TILE)
    inside = field < STATE_WIDTH
    tl.store(standing + place * STATE_WIDTH + field, tl.load(state + field, mask=inside & busy, other=0), mask=inside)


@triton.jit
def _write_standing(table, standing, FIELDS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    fields = table + place * FIELDS
    busy = tl.load(fields + ROWS) > 0
    state = tl.load(fields + STATE, mask=busy, other=0).to(INT64)
    field = tl.arange(0, STATE_TILE)
    moved = busy & (field < STATE_WIDTH) & ((field == LOGICAL) | (field == TOKEN) | (field == DRAFT_COUNT) | (field >= DRAFTS))
    tl.store(state + field, tl.load(standing + place * STATE_WIDTH + field, mask=moved, other=0), mask=moved)


def spread_rows(
    table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor, judged: Tensor, bad_layer: Tensor
) -> None:  # fmt: skip
    """See kernels/verify."""
    places, fields = table.shape
    each = place_of.shape[0] // places
    _spread_rows[(places,)](table, place_of, positions, tokens, mirrored, judged, bad_layer, fields, each, num_warps=1)


def accept_rows(
    table: Tensor, place_of: Tensor, tokens: Tensor, samples: Tensor, bad_layer: Tensor, output_counts: Tensor, accepted: Tensor,
    next_of: Tensor,
) -> None:  # fmt: skip
    """See kernels/verify."""
    places, fields = table.shape
    each = place_of.shape[0] // places
    _accept_rows[(places,)](table, place_of, tokens, samples, bad_layer, output_counts, accepted, next_of, fields, each, num_warps=1)


def keep_drafts(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
    """See kernels/verify."""
    places, fields = table.shape
    tile = triton.next_power_of_2(max(1, ends.shape[0]))
    _keep_drafts[(places,)](table, drafts.contiguous(), ends, ends.shape[0], fields, drafts.shape[1], tile, num_warps=1)


def read_standing(table: Tensor, standing: Tensor) -> None:
    """See kernels/verify."""
    places, fields = table.shape
    _read_standing[(places,)](table, standing, fields, num_warps=1)


def write_standing(table: Tensor, standing: Tensor) -> None:
    """See kernels/verify."""
    places, fields = table.shape
    _write_standing[(places,)](table, standing, fields, num_warps=1)


_TABLE = {"table": "*i64", "FIELDS": TableLayout(22).fields, "num_warps": 1}
_JUDGED = {"place_of": "*i32", "tokens": "*i64", "samples": "*i64", "bad_layer": "*i64", "output_counts": "*i64", "accepted": "*i64"}
_SPREAD = {"place_of": "*i32"} | dict.fromkeys(("positions", "tokens", "mirrored", "judged", "bad_layer"), "*i64")
COMPILE = [
    (_spread_rows, _TABLE | _SPREAD | {"EACH": 4}),
    (_spread_rows, _TABLE | _SPREAD | {"EACH": 1}),
    (_accept_rows, _TABLE | _JUDGED | {"next_of": "*i32", "EACH": 4}),
    (_accept_rows, _TABLE | _JUDGED | {"next_of": "*i32", "EACH": 1}),
    (_keep_drafts, _TABLE | {"drafts": "*i64", "ends": "*i64", "ends_count": "i32", "WIDTH": 3, "ENDS_TILE": 4}),
    (_keep_drafts, _TABLE | {"drafts": "*i64", "ends": "*i64", "ends_count": 1, "WIDTH": 7, "ENDS_TILE": 1}),
    (_read_standing, _TABLE | {"standing": "*i64"}),
    (_write_standing, _TABLE | {"standing": "*i64"}),
]
