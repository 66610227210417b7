"""Index scores on a device: every key of a session, read once from its pages, against one to four of the session's query rows.

One kernel body behind two forms: rows of a step, each place over its own pages and its own length (`score_places`), and rows that share
one list of pages (`index_scores`). Programs walk blocks of 64 keys with a stride, so a grid made for the longest history costs a short
one nothing.

Invariants:
1. A score is one chain of products over the width, then a sum over one row's heads of a fixed shape: how many rows stand beside it in the
   product of a program, and how many programs there are, changes no bit.
2. A column depends on its own key only; columns past a row's last key are not written (`score_places`).
3. relu keeps NaN. Factors are applied to the head weights in the reference's order.
4. e4m3 values are multiplied as they are, exactly as bf16 ones are; a key's scale, which is not negative, multiplies the sum over heads.

Floor: 256 B a key, 62 us for 1,048,576 keys at 4.3 TB/s; 8.6 GFLOP a row, so products must run in the matrix units (bf16 by bf16):
16 KiB a block, five in flight a program, two programs a multiprocessor, because four rows take 211 registers a thread. float32 queries or
keys are multiplied as float32, for small models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout, TableField
from kernels.linear.kernel import dot_exact
from kernels.quantize.kernel import e4m3_as_bfloat16
from kernels.select.digits import ROW_COUNTS, count_digits

__all__ = ["index_scores", "score_places"]

BLOCK_KEYS = 64
ROWS_MAX = 4  # query rows that share one reading of the keys
PROGRAMS = 264
STAGES = 6
WARPS = 4
SCALED_PROGRAMS = 528  # of e4m3 keys: half the bytes a block, and its values are widened in registers; half as many for four rows
SCALED_STAGES = 12  # five blocks of 8 KiB and their scales
_HIP_STAGES = 2
RUN = tl.constexpr(BLOCK_ROWS)
INT64 = tl.constexpr(tl.pointer_type(tl.int64))
FLOAT32 = tl.constexpr(tl.pointer_type(tl.float32))
PAGE = tl.constexpr(PAGE_KEYS)
ROWS = tl.constexpr(TableField.ROWS)
PAGES = tl.constexpr(TableField.PAGES)
PAGES_MAX = tl.constexpr(TableField.PAGES_MAX)
COUNTS = tl.constexpr(ROW_COUNTS)


@triton.jit
def _place_rows(place_of, positions, rows, place, numbers, ROWS_BLOCK: tl.constexpr):
    """The place's rows of these numbers: which they are, and how many keys each sees (0: there is no such row)."""
    row = tl.arange(0, ROWS_BLOCK)
    mine = (tl.load(place_of + row, mask=row < rows, other=-1) == place).to(tl.int32)
    order = tl.cumsum(mine) - 1
    found = (mine > 0)[:, None] & (order[:, None] == numbers[None, :])
    which = tl.sum(tl.where(found, row[:, None], 0), 0).to(tl.int64)
    return which, tl.load(positions + which, mask=tl.sum(found.to(tl.int32), 0) > 0, other=-1) + 1


@triton.jit
def _score(table, pages, keys, place_of, positions, query, head_weights, out, counts, begin, rows, group, q_row, q_head, q_value, w_row,
           w_head, out_row, COUNTING: tl.constexpr, WORKERS: tl.constexpr, FIELDS: tl.constexpr, PLACES: tl.constexpr,
           KEYS_LOADED: tl.constexpr, ROWS_BLOCK: tl.constexpr, GROUP_ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
           KEY_STRIDE: tl.constexpr, HEADS_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, BLOCK: tl.constexpr, RUN_BYTES: tl.constexpr,
           WIDE: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr, LOOP_STAGES: tl.constexpr, HEADS_FACTOR: tl.constexpr,
           WIDTH_FACTOR: tl.constexpr):  # fmt: skip
    owner = tl.program_id(1)  # a place, or a group of rows
    number = owner * GROUP_ROWS
    count = tl.minimum(number + GROUP_ROWS, rows)
    from_pages = pages
    if PLACES:
        fields = table + owner.to(tl.int64) * FIELDS
        row = tl.arange(0, ROWS_BLOCK)
        mine = (tl.load(place_of + row, mask=row < rows, other=-1) == owner) & (tl.load(fields + ROWS) > 0)
        number, count = owner * 0, tl.sum(mine.to(tl.int32))
        from_pages = (tl.load(fields + PAGES) + group * tl.load(fields + PAGES_MAX) * 8).to(INT64)
    elif KEYS_LOADED:
        keys = (tl.load(keys).to(tl.int64) + PAGE - 1) // PAGE * PAGE
    kind: tl.constexpr = tl.pointer_type(tl.float32 if WIDE else tl.uint8 if SCALED else tl.bfloat16)
    columns: tl.constexpr = GROUP_ROWS * HEADS_BLOCK
    place_in_block = tl.arange(0, BLOCK)
    value = tl.arange(0, WIDTH_BLOCK)
    head = tl.arange(0, HEADS_BLOCK)
    while number < count:
        numbers = number + tl.arange(0, GROUP_ROWS)
        which, end = numbers.to(tl.int64), tl.where(numbers < rows, keys, 0)
        if PLACES:
            which, end = _place_rows(place_of, positions, rows, owner, numbers, ROWS_BLOCK)
        known = tl.reshape((end > 0)[:, None] & (head < HEADS)[None, :], [columns])
        from_query = tl.reshape(which[:, None] * q_row + (head * q_head)[None, :], [columns])
        from_weight = tl.reshape(which[:, None] * w_row + (head * w_head)[None, :], [columns])
        asked = tl.load(query + from_query[None, :] + (value * q_value)[:, None], mask=known[None, :] & (value < WIDTH)[:, None], other=0.0)
        weights = tl.load(head_weights + from_weight, mask=known, other=0.0) * HEADS_FACTOR * WIDTH_FACTOR
        blocks = ((tl.max(end) + BLOCK - 1) // BLOCK).to(tl.int32)
        for step in tl.range(0, (blocks - tl.program_id(0) + WORKERS - 1) // WORKERS, num_stages=LOOP_STAGES):
            block = tl.program_id(0) + step * WORKERS
            page = tl.multiple_of(tl.load(from_pages + block * BLOCK // PAGE).to(kind), 16)
            if SCALED:  # bytes of runs: 64 keys' values, then their scales
                run = page + block * BLOCK % PAGE // RUN * RUN_BYTES
                from_key = run + (place_in_block // RUN * RUN_BYTES + place_in_block % RUN * KEY_STRIDE)[:, None] + value[None, :]
                from_scale = (run + RUN * KEY_STRIDE).to(FLOAT32) + (place_in_block // RUN * (RUN_BYTES // 4) + place_in_block % RUN)
            else:
                from_key = page + ((block * BLOCK % PAGE + place_in_block)[:, None] * KEY_STRIDE + value[None, :])
            if WIDTH == WIDTH_BLOCK:
                key = tl.load(from_key)
            else:
                key = tl.load(from_key, mask=value[None, :] < WIDTH, other=0)
            if SCALED:
                key = e4m3_as_bfloat16(key, NATIVE)
            product = dot_exact(key, asked, tl.zeros([BLOCK, columns], tl.float32))
            score = tl.where(product < 0.0, 0.0, product) * weights[None, :]
            score = tl.sum(tl.reshape(score, [BLOCK, GROUP_ROWS, HEADS_BLOCK]), 2)
            if SCALED:
                score = score * tl.load(from_scale)[:, None]
            column = block.to(tl.int64) * BLOCK + place_in_block
            tl.store(out + which[None, :] * out_row + column[:, None], score, mask=column[:, None] < end[None, :])
        if COUNTING > 0:  # positions at a time
            tl.debug_barrier()  # other threads of the program have stored the scores that are counted
            own = tl.arange(0, GROUP_ROWS)
            for each in tl.static_range(GROUP_ROWS):
                row_of = tl.sum(tl.where(own == each, which, 0))
                row_end = tl.sum(tl.where(own == each, end, 0))
                count_digits(out + row_of * out_row, counts + row_of * COUNTS, begin, row_end, WORKERS, BLOCK, COUNTING)
        number += GROUP_ROWS


def _shapes(
    query: Tensor, head_weights: Tensor, layout: KeyLayout, owners: int, columns: int, group_rows: int
) -> dict[str, int | float | bool]:
    """Launch constants: shapes of the weight, and how the work is cut, which changes no bit."""
    _, heads, width = query.shape
    size, scaled = layout.value_bytes, layout.scale_bytes > 0
    programs = PROGRAMS if not scaled else SCALED_PROGRAMS // (1 if group_rows < ROWS_MAX else 2)
    return {
        "q_row": query.stride(0), "q_head": query.stride(1), "q_value": query.stride(2), "w_row": head_weights.stride(0),
        "w_head": head_weights.stride(1), "WORKERS": max(1, min(programs // owners, triton.cdiv(columns, BLOCK_KEYS))),
        "GROUP_ROWS": group_rows, "HEADS": heads, "WIDTH": width, "KEY_STRIDE": layout.values_bytes // size,
        "HEADS_BLOCK": max(16, triton.next_power_of_2(heads)), "WIDTH_BLOCK": max(16, triton.next_power_of_2(width)), "BLOCK": BLOCK_KEYS,
        "RUN_BYTES": layout.run_bytes, "WIDE": size == 4, "SCALED": scaled, "NATIVE": not torch.version.hip,
        "LOOP_STAGES": _stages(scaled) if scaled else None,
        "HEADS_FACTOR": heads**-0.5, "WIDTH_FACTOR": width**-0.5, "num_warps": WARPS, "num_stages": _stages(scaled),
    }  # fmt: skip


def _stages(scaled: bool) -> int:
    """Of the loop over blocks. A loop told of its own has loads pipelined that feed no product too: the scales."""
    return _HIP_STAGES if torch.version.hip else SCALED_STAGES if scaled else STAGES


def _counting(columns: int, workers: float) -> int:
    """Positions that a program counts at a time: all of its own, if they are few."""
    blocks = int(triton.next_power_of_2(triton.cdiv(columns, BLOCK_KEYS * int(workers))))
    return BLOCK_KEYS * min(8, max(4, blocks))


def _group_rows(rows: int) -> int:
    return 1 if rows <= 1 else 2 if rows == 2 else ROWS_MAX


def index_scores(query: Tensor, head_weights: Tensor, pages: Tensor, keys: int | Tensor, layout: KeyLayout, out: Tensor) -> None:
    """See the package page; whole pages are written. `keys` as a tensor [1] on the device lets a captured launch replay at any length."""
    rows = query.shape[0]
    if rows == 0 or pages.shape[0] == 0:
        return
    loaded, group_rows = isinstance(keys, Tensor), _group_rows(rows)
    owners = triton.cdiv(rows, group_rows)
    shapes = _shapes(query, head_weights, layout, owners, min(out.shape[1], pages.shape[0] * PAGE_KEYS), group_rows)
    _score[(shapes["WORKERS"], owners)](
        pages, pages, keys if loaded else triton.cdiv(keys, PAGE_KEYS) * PAGE_KEYS, pages, pages, query, head_weights, out, pages, 0, rows,
        0, out_row=out.stride(0), COUNTING=0, FIELDS=0, PLACES=False, KEYS_LOADED=loaded, ROWS_BLOCK=1, **shapes,
    )  # fmt: skip


def score_places(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout, out: Tensor,
    counts: Tensor | None = None, begin: int = 0,
) -> None:  # fmt: skip
    """Score keys 0 .. position of each row's session, reached through the step table; columns past them are left alone.

    table         [places, fields]   int64    device
    place_of      [T]                int32    device  rows of a place in any order; rows of free places and -1 write nothing
    positions     [T]                int64    device
    query         [T, heads, width]  float    device  any strides
    head_weights  [T, heads]         float32  device  unscaled
    out           [T, columns]       float32  device  columns above every position
    counts        [T, ROW_COUNTS]    int32    device  the digits (`kernels/select/digits.py`) of each row's scores from `begin` on are added
    """
    rows, places = query.shape[0], table.shape[0]
    if rows == 0:
        return
    group_rows = _group_rows(triton.cdiv(rows, places))
    shapes = _shapes(query, head_weights, layout, places, out.shape[1], group_rows)
    _score[(shapes["WORKERS"], places)](
        table, table, 0, place_of, positions, query, head_weights, out, table if counts is None else counts, begin, rows, group,
        out_row=out.stride(0), COUNTING=0 if counts is None else _counting(out.shape[1], shapes["WORKERS"]), FIELDS=table.shape[1],
        PLACES=True, KEYS_LOADED=False,
        ROWS_BLOCK=triton.next_power_of_2(rows), **shapes,
    )  # fmt: skip


def _case(rows: int, keys: str, counting: int = 0) -> dict[str, object]:
    layout = KeyLayout(keys, 128)  # type: ignore[arg-type]  # one of them
    shapes = _shapes(torch.empty((rows, 32, 128), device="meta"), torch.empty((rows, 32), device="meta"), layout, 1, 1 << 20, rows)
    stages = {"cuda": SCALED_STAGES if layout.scale_bytes else STAGES, "hip": _HIP_STAGES}
    return shapes | {
        "table": "*i64", "pages": "*i64", "keys": "i64", "place_of": "*i32", "positions": "*i64", "query": "*bf16", "head_weights": "*fp32",
        "out": "*fp32", "counts": "*i32" if counting else "*i64", "begin": "i32", "rows": "i32", "group": "i32",
        "out_row": 1 << 20, "COUNTING": counting, "FIELDS": 139, "PLACES": rows != 2, "KEYS_LOADED": False,
        "ROWS_BLOCK": rows, "num_stages": stages, "LOOP_STAGES": stages if layout.scale_bytes else None,
        "NATIVE": {"cuda": True, "hip": False},
    }  # fmt: skip


COMPILE = [
    *((_score, _case(rows, "bf16")) for rows in (1, 2, 4)),
    *((_score, _case(rows, "e4m3")) for rows in (1, 4)),
    *((_score, _case(rows, keys, tile)) for rows, keys, tile in ((1, "bf16", 256), (4, "bf16", 512))),
]
