"""Index scores of query rows that share one list of pages. For appends.

A program takes 128 keys, once, and multiplies them by every query row, some rows at a time: keys come from memory once a call, queries
(8 KiB a row) from L2.

Invariants:
1. A score is one product over the width, then a sum over heads of a fixed shape; a column depends on its own key only, a row on its query.
2. relu keeps NaN. Factors are applied to the head weights in the reference's order, a key's scale to the sum over heads.

Floor at 64 rows and 1,048,576 bf16 keys: 0.55 TFLOP, 1.1 ms at 500 TFLOP/s; keys 256 MiB from memory, queries 4 GiB from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout
from kernels.linear.kernel import dot_exact
from kernels.quantize.kernel import e4m3_as_bfloat16

__all__ = ["index_scores"]

INT64 = tl.constexpr(tl.pointer_type(tl.int64))
FLOAT32 = tl.constexpr(tl.pointer_type(tl.float32))
RUN = tl.constexpr(BLOCK_ROWS)
PAGE = tl.constexpr(PAGE_KEYS)


# A tile has any number of rows, and a layer's pages begin where the table's width puts them: neither may make the kernel anew.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["pages"])
def _score_rows(pages, query, head_weights, out, rows, q_row, q_head, q_value, w_row, w_head, out_row, HEADS: tl.constexpr,
                WIDTH: tl.constexpr, KEY_STRIDE: tl.constexpr, RUN_STRIDE: tl.constexpr, HEADS_BLOCK: tl.constexpr,
                WIDTH_BLOCK: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
                NATIVE: tl.constexpr, HEADS_FACTOR: tl.constexpr, WIDTH_FACTOR: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    kind: tl.constexpr = tl.pointer_type(tl.float32 if WIDE else tl.uint8 if SCALED else tl.bfloat16)
    page = tl.multiple_of(tl.load(pages + block * KEYS // PAGE).to(kind), 16)
    number = block * KEYS % PAGE + tl.arange(0, KEYS)
    key = (number // RUN * RUN_STRIDE + number % RUN * KEY_STRIDE)[:, None]
    value = tl.arange(0, WIDTH_BLOCK)
    if WIDTH == WIDTH_BLOCK:
        keys = tl.load(page + key + value[None, :])
    else:
        keys = tl.load(page + key + value[None, :], mask=value[None, :] < WIDTH, other=0)
    if SCALED:
        keys = e4m3_as_bfloat16(keys, NATIVE)
        scale = tl.load((page.to(tl.int64) + number // RUN * RUN_STRIDE + RUN * KEY_STRIDE + number % RUN * 4).to(FLOAT32))
    column = block.to(tl.int64) * KEYS + tl.arange(0, KEYS)
    pair = tl.arange(0, ROWS * HEADS_BLOCK)  # rows of a group, heads within
    head = pair % HEADS_BLOCK
    for first in range(0, rows, ROWS):
        row = first + pair // HEADS_BLOCK
        known = (row < rows) & (head < HEADS)
        from_query = query + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + value[None, :] * q_value
        asked = tl.load(from_query, mask=known[:, None] & (value < WIDTH)[None, :], other=0.0)
        weights = tl.load(head_weights + row.to(tl.int64) * w_row + head * w_head, mask=known, other=0.0) * HEADS_FACTOR * WIDTH_FACTOR
        product = dot_exact(keys, tl.trans(asked), tl.zeros([KEYS, ROWS * HEADS_BLOCK], tl.float32))
        product = tl.where(product < 0.0, 0.0, product) * weights[None, :]
        score = tl.sum(tl.reshape(product, [KEYS, ROWS, HEADS_BLOCK]), 2)
        if SCALED:
            score = score * scale[:, None]
        row = first + tl.arange(0, ROWS)
        tl.store(out + row.to(tl.int64)[None, :] * out_row + column[:, None], score, mask=(row < rows)[None, :])


def _shapes(query: Tensor, head_weights: Tensor, layout: KeyLayout) -> dict[str, int | float | bool]:
    """Launch constants; float32 takes small tiles for its registers and shared memory."""
    _, heads, width = query.shape
    wide, size = layout.encoding == "f32", layout.value_bytes
    exact = wide or query.dtype == torch.float32
    return {
        "q_row": query.stride(0), "q_head": query.stride(1), "q_value": query.stride(2), "w_row": head_weights.stride(0),
        "w_head": head_weights.stride(1), "HEADS": heads, "WIDTH": width, "KEY_STRIDE": layout.values_bytes // size,
        "RUN_STRIDE": layout.run_bytes // size, "SCALED": size == 1, "NATIVE": not torch.version.hip,
        "HEADS_BLOCK": max(16, triton.next_power_of_2(heads)), "WIDTH_BLOCK": max(16, triton.next_power_of_2(width)),
        "KEYS": 32 if exact else 128, "ROWS": 1 if exact else 4, "WIDE": wide, "HEADS_FACTOR": heads**-0.5, "WIDTH_FACTOR": width**-0.5,
        "num_warps": 4 if exact else 8, "num_stages": 2,
    }  # fmt: skip


def index_scores(query: Tensor, head_weights: Tensor, pages: Tensor, keys: int, layout: KeyLayout, out: Tensor) -> None:
    """See the package page; whole pages are written."""
    columns = triton.cdiv(keys, PAGE_KEYS) * PAGE_KEYS
    if query.shape[0] == 0 or columns == 0:
        return
    shapes = _shapes(query, head_weights, layout)
    _score_rows[(columns // shapes["KEYS"],)](pages, query, head_weights, out, query.shape[0], out_row=out.stride(0), **shapes)


def _case(query: torch.dtype, encoding: str) -> dict[str, object]:
    layout = KeyLayout(encoding, 128)  # type: ignore[arg-type]  # one of them
    shapes = _shapes(torch.empty((64, 32, 128), dtype=query, device="meta"), torch.empty((64, 32), device="meta"), layout)
    kind = "*bf16" if query == torch.bfloat16 else "*fp32"
    return shapes | {
        "pages": "*i64",
        "query": kind,
        "head_weights": "*fp32",
        "out": "*fp32",
        "rows": "i32",
        "out_row": 1 << 20,
        "NATIVE": {"cuda": True, "hip": False},
    }


COMPILE = [(_score_rows, _case(*each)) for each in ((torch.bfloat16, "bf16"), (torch.float32, "bf16"), (torch.bfloat16, "e4m3"))]
