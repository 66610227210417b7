"""Selections of a decode step on a device: scores through the step table, then the choice, no value read by the host.

Knows neither keys nor ranks; `kernels/index_score`, `kernels/select` and `counted.py` do. Three launches where digits are counted with the
scores, else nine.

Invariant: a row's range comes from its position and its place on the device; the scores' buffer alone bounds the launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.index_score.kernel import score_places
from kernels.layout import KeyLayout, TableField
from kernels.select.kernel import select
from kernels.selection.counted import choose
from kernels.selection.scratch import Scratch

__all__ = ["choose_rows", "score_rows", "select_places"]

ROWS = tl.constexpr(TableField.ROWS)


@triton.jit
def _ranges(table, place_of, positions, begin, first, last, rows, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """First and one past the last position that each row may choose; nothing for a row whose place is free or -1."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    place = tl.load(place_of + row, mask=inside, other=-1).to(tl.int64)
    live = tl.load(table + place * FIELDS + ROWS, mask=inside & (place >= 0), other=0) > 0
    end = tl.load(positions + row, mask=inside & live, other=-1) + 1
    tl.store(first + row, end * 0 + begin, mask=inside)
    tl.store(last + row, end, mask=inside)


def score_rows(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, scratch: Scratch, cleared: bool,
) -> None:  # fmt: skip
    """See the package page."""
    if query.shape[0] == 0:
        return
    if scratch.counts is not None and not cleared:
        scratch.counts.zero_()
    score_places(table, group, place_of, positions, query, head_weights, layout, scratch.scores, scratch.counts, first)


def choose_rows(table: Tensor, place_of: Tensor, positions: Tensor, first: int, out: Tensor, scratch: Scratch) -> None:
    """See the package page."""
    rows = out.shape[0]
    if rows == 0:
        return
    if scratch.counts is not None:
        choose(table, place_of, positions, first, out, scratch)
        return
    ranges = torch.empty((2, rows), dtype=torch.int64, device=out.device)
    _ranges[(triton.cdiv(rows, 32),)](
        table, place_of, positions, first, ranges[0], ranges[1], rows, FIELDS=table.shape[1], BLOCK=32, num_warps=1
    )
    select(scratch.scores[:rows], ranges[0], ranges[1], out.shape[1], out, scratch.chunk)


def select_places(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, out: Tensor, scratch: Scratch, cleared: bool = False,
) -> None:  # fmt: skip
    """See the package page."""
    score_rows(table, group, place_of, positions, query, head_weights, layout, first, scratch, cleared)
    choose_rows(table, place_of, positions, first, out, scratch)


COMPILE = [
    (_ranges, {
        "table": "*i64", "place_of": "*i32", "positions": "*i64", "begin": "i32", "first": "*i64", "last": "*i64", "rows": "i32",
        "FIELDS": 139, "BLOCK": 32, "num_warps": 1,
    }),
]  # fmt: skip
