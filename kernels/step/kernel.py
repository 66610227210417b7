"""Hidden states and logits of rows on a device: a tile a program.

Bytes: 24 KiB a row at 6,144 values, read and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, StateField, TableField, TableLayout

__all__ = ["follow_rows", "keep_logits", "load_hidden", "store_hidden"]

ROWS = tl.constexpr(TableField.ROWS)
HIDDEN = tl.constexpr(TableField.HIDDEN)
H_ROWS = tl.constexpr(HIDDEN_ROWS)
STATE = tl.constexpr(TableField.STATE)
LOGICAL = tl.constexpr(StateField.LOGICAL)
MIRRORED = tl.constexpr(StateField.MIRRORED)
B_ROWS = tl.constexpr(BLOCK_ROWS)
FLOAT32 = tl.constexpr(tl.pointer_type(tl.float32))
INT64 = tl.constexpr(tl.pointer_type(tl.int64))


@triton.jit
def _live_fields(table, place, wanted, FIELDS: tl.constexpr):
    """Fields of places, and whether each holds a session; a negative place is a free one."""
    fields = table + tl.maximum(place, 0).to(tl.int64) * FIELDS
    return fields, wanted & (place >= 0) & (tl.load(fields + ROWS, mask=wanted, other=0) > 0)


@triton.jit
def _load_hidden(
    table, place_of, positions, out, place_stride, position_stride, FIELDS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(positions + row * position_stride)
    fields, live = _live_fields(table, tl.load(place_of + row * place_stride), True, FIELDS)
    present = live & (position > 0)
    kept = tl.load(fields + HIDDEN, mask=present, other=0).to(FLOAT32) + tl.where(present, (position - 1) % H_ROWS, 0) * WIDTH
    x = tl.load(tl.multiple_of(kept, ALIGNED) + column, mask=present & (column < WIDTH), other=0)
    tl.store(out + row.to(tl.int64) * WIDTH + column, x.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _store_hidden(table, place_of, positions, hidden, FIELDS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(positions + row)
    fields, live = _live_fields(table, tl.load(place_of + row), True, FIELDS)
    x = tl.load(hidden + row.to(tl.int64) * WIDTH + column, mask=live & (column < WIDTH), other=0).to(tl.float32)
    kept = tl.load(fields + HIDDEN, mask=live, other=0).to(FLOAT32) + tl.where(live, position % H_ROWS, 0) * WIDTH
    tl.store(tl.multiple_of(kept, ALIGNED) + column, x, mask=live & (column < WIDTH))


@triton.jit
def _keep_logits(logits, out, bad_layer, logits_stride, layer, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    x = tl.load(logits + row * logits_stride + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + column, x, mask=inside)
    infinite = tl.sum(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32))
    first = tl.load(bad_layer + row)
    # Several programs of a row may find it broken: they store the same value, and none that sees it stores another.
    tl.store(bad_layer + row, first * 0 + layer, mask=(infinite > 0) & (first < 0))


@triton.jit
def _follow_rows(table, positions, mirrored, places, EACH: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    fields, live = _live_fields(table, place, inside, FIELDS)
    state = tl.load(fields + STATE, mask=live, other=0).to(INT64)
    tl.store(state + LOGICAL, tl.load(positions + place * EACH, mask=live, other=0), mask=live)
    rows = tl.load(state + MIRRORED, mask=live, other=0)
    tl.store(mirrored + place, tl.where(live, rows // B_ROWS * B_ROWS, 0), mask=inside)


HIDDEN_TILE = 1024
PLACES_BLOCK = 32
LOGITS_TILE = 2048


def _alignment(width: int) -> int:
    """Bytes that every kept hidden state's address is a multiple of; the buffer's is 16."""
    return 16 if width % 4 == 0 else 4


def load_hidden(table: Tensor, place_of: Tensor, positions: Tensor, out: Tensor) -> None:
    """See kernels/step."""
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, HIDDEN_TILE))
        _load_hidden[grid](
            table, place_of, positions, out, place_of.stride(0), positions.stride(0), table.shape[1], width, _alignment(width), HIDDEN_TILE
        )


def store_hidden(table: Tensor, place_of: Tensor, positions: Tensor, hidden: Tensor) -> None:
    """See kernels/step."""
    rows, width = hidden.shape
    hidden = hidden.contiguous()
    if rows:
        grid = (rows, triton.cdiv(width, HIDDEN_TILE))
        _store_hidden[grid](table, place_of, positions, hidden, table.shape[1], width, _alignment(width), HIDDEN_TILE)


def keep_logits(logits: Tensor, out: Tensor, bad_layer: Tensor, layer: int) -> None:
    """See kernels/step. One launch; capturable."""
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if rows:
        grid = (rows, triton.cdiv(width, LOGITS_TILE))
        _keep_logits[grid](logits, out, bad_layer, logits.stride(0), layer, width, LOGITS_TILE)


def follow_rows(table: Tensor, positions: Tensor, mirrored: Tensor) -> None:
    """See kernels/step. One launch; capturable."""
    places, each = table.shape[0], positions.shape[0] // table.shape[0]
    _follow_rows[(triton.cdiv(places, PLACES_BLOCK),)](
        table, positions, mirrored, places, EACH=each, FIELDS=table.shape[1], BLOCK=PLACES_BLOCK
    )


_TABLE = {"table": "*i64", "place_of": "*i32", "FIELDS": TableLayout(22).fields}
_HIDDEN = {**_TABLE, "positions": "*i64", "WIDTH": 6144, "ALIGNED": 16, "TILE": HIDDEN_TILE}
_LOGITS = {"out": "*fp32", "bad_layer": "*i64", "logits_stride": "i32", "layer": "i32", "WIDTH": 154880, "TILE": LOGITS_TILE}
_FOLLOW = {"table": "*i64", "positions": "*i64", "mirrored": "*i64", "places": "i32", "BLOCK": PLACES_BLOCK}
COMPILE = [
    (_follow_rows, {**_FOLLOW, "EACH": 4, "FIELDS": TableLayout(22).fields}),
    (_load_hidden, {**_HIDDEN, "out": "*bf16", "place_stride": 1, "position_stride": 1}),
    (_load_hidden, {**_HIDDEN, "out": "*fp32", "place_stride": "i32", "position_stride": "i32", "WIDTH": 48}),
    (_store_hidden, {**_HIDDEN, "hidden": "*bf16"}),
    (_store_hidden, {**_HIDDEN, "hidden": "*fp32", "WIDTH": 48}),
    (_keep_logits, {**_LOGITS, "logits": "*bf16"}),
    (_keep_logits, {**_LOGITS, "logits": "*fp32", "WIDTH": 96, "layer": 1}),  # Triton makes a constant of an argument that is 1
]
