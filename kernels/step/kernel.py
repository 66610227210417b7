"""A step's inputs and outputs on a device: a row or a place a lane, hidden states a tile a program.

Bytes: some hundred a place; hidden states 24 KiB a row at 6,144 values, read and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, StateField, TableField, TableLayout

__all__ = ["advance", "load_hidden", "snapshot", "store_hidden"]

ROWS = tl.constexpr(TableField.ROWS)
STATE = tl.constexpr(TableField.STATE)
HIDDEN = tl.constexpr(TableField.HIDDEN)
LOGICAL = tl.constexpr(StateField.LOGICAL)
MIRRORED = tl.constexpr(StateField.MIRRORED)
TOKEN = tl.constexpr(StateField.TOKEN)
BAD_LAYER = tl.constexpr(StateField.BAD_LAYER)
B_ROWS = tl.constexpr(BLOCK_ROWS)
H_ROWS = tl.constexpr(HIDDEN_ROWS)
INT64 = tl.constexpr(tl.pointer_type(tl.int64))
FLOAT32 = tl.constexpr(tl.pointer_type(tl.float32))


@triton.jit
def _live_fields(table, place, wanted, FIELDS: tl.constexpr):
    """Fields of places, and whether each holds a session; a negative place is a free one."""
    fields = table + tl.maximum(place, 0).to(tl.int64) * FIELDS
    return fields, wanted & (place >= 0) & (tl.load(fields + ROWS, mask=wanted, other=0) > 0)


@triton.jit
def _snapshot(table, place_of, positions, tokens, mirrored, rows, places, FIELDS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.load(place_of + row, mask=row < rows, other=-1)
    fields, live = _live_fields(table, place, row < rows, FIELDS)
    state = tl.load(fields + STATE, mask=live, other=0).to(INT64)
    tl.store(positions + row, tl.load(state + LOGICAL, mask=live, other=0), mask=row < rows)
    tl.store(tokens + row, tl.load(state + TOKEN, mask=live, other=0), mask=row < rows)
    fields, live = _live_fields(table, row, row < places, FIELDS)  # here a lane is a place
    state = tl.load(fields + STATE, mask=live, other=0).to(INT64)
    tl.store(mirrored + row, tl.load(state + MIRRORED, mask=live, other=0) // B_ROWS * B_ROWS, mask=row < places)


@triton.jit
def _load_hidden(table, place_of, positions, out, FIELDS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(positions + row)
    fields, live = _live_fields(table, tl.load(place_of + row), True, FIELDS)
    present = live & (position > 0)
    kept = tl.load(fields + HIDDEN, mask=present, other=0).to(FLOAT32) + tl.where(present, (position - 1) % H_ROWS, 0) * WIDTH
    x = tl.load(tl.multiple_of(kept, ALIGNED) + column, mask=present & (column < WIDTH), other=0)
    tl.store(out + row.to(tl.int64) * WIDTH + column, x, mask=column < WIDTH)


@triton.jit
def _store_hidden(table, place_of, positions, hidden, FIELDS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(positions + row)
    fields, live = _live_fields(table, tl.load(place_of + row), True, FIELDS)
    x = tl.load(hidden + row.to(tl.int64) * WIDTH + column, mask=live & (column < WIDTH), other=0)
    kept = tl.load(fields + HIDDEN, mask=live, other=0).to(FLOAT32) + tl.where(live, position % H_ROWS, 0) * WIDTH
    tl.store(tl.multiple_of(kept, ALIGNED) + column, x, mask=live & (column < WIDTH))


@triton.jit
def _advance(table, place_of, tokens, bad_layer, rows, FIELDS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.load(place_of + row, mask=row < rows, other=-1)
    fields, live = _live_fields(table, place, row < rows, FIELDS)
    state = tl.load(fields + STATE, mask=live, other=0).to(INT64)
    tl.store(state + TOKEN, tl.load(tokens + row, mask=live, other=0), mask=live)
    tl.store(state + LOGICAL, tl.load(state + LOGICAL, mask=live, other=0) + 1, mask=live)
    first = live & (tl.load(state + BAD_LAYER, mask=live, other=0) < 0)
    tl.store(state + BAD_LAYER, tl.load(bad_layer + row, mask=first, other=-1), mask=first)


ROWS_TILE = 64
HIDDEN_TILE = 1024


def _alignment(width: int) -> int:
    """Bytes that every kept hidden state's address is a multiple of; the buffer's is 16."""
    return 16 if width % 4 == 0 else 4


def snapshot(table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor) -> None:
    """See kernels/step."""
    rows, places = place_of.shape[0], table.shape[0]
    grid = (triton.cdiv(max(rows, places), ROWS_TILE),)
    _snapshot[grid](table, place_of, positions, tokens, mirrored, rows, places, table.shape[1], ROWS_TILE)


def load_hidden(table: Tensor, place_of: Tensor, positions: Tensor, out: Tensor) -> None:
    """See kernels/step."""
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, HIDDEN_TILE))
        _load_hidden[grid](table, place_of, positions, out, table.shape[1], width, _alignment(width), HIDDEN_TILE)


def store_hidden(table: Tensor, place_of: Tensor, positions: Tensor, hidden: Tensor) -> None:
    """See kernels/step."""
    rows, width = hidden.shape
    hidden = hidden.contiguous()
    if rows:
        grid = (rows, triton.cdiv(width, HIDDEN_TILE))
        _store_hidden[grid](table, place_of, positions, hidden, table.shape[1], width, _alignment(width), HIDDEN_TILE)


def advance(table: Tensor, place_of: Tensor, tokens: Tensor, bad_layer: Tensor) -> None:
    """See kernels/step."""
    rows = place_of.shape[0]
    if rows:
        _advance[(triton.cdiv(rows, ROWS_TILE),)](table, place_of, tokens, bad_layer, rows, table.shape[1], ROWS_TILE)


_TABLE = {"table": "*i64", "place_of": "*i32", "FIELDS": TableLayout(22).fields}
_HIDDEN = {**_TABLE, "positions": "*i64", "WIDTH": 6144, "ALIGNED": 16, "TILE": HIDDEN_TILE}
_INPUTS = {"positions": "*i64", "tokens": "*i64", "mirrored": "*i64", "rows": "i32", "places": "i32", "TILE": ROWS_TILE}
_OUTPUTS = {"tokens": "*i64", "bad_layer": "*i64", "rows": "i32", "TILE": ROWS_TILE}
COMPILE = [
    (_snapshot, {**_TABLE, **_INPUTS}),
    (_snapshot, {**_TABLE, **_INPUTS, "rows": 1, "places": 1}),  # Triton makes a constant of an argument that is 1
    (_load_hidden, {**_HIDDEN, "out": "*fp32"}),
    (_store_hidden, {**_HIDDEN, "hidden": "*fp32"}),
    (_advance, {**_TABLE, **_OUTPUTS}),
    (_advance, {**_TABLE, **_OUTPUTS, "rows": 1}),
]
