"""The shapes in which the CPU computes rows, so that a row's bits do not depend on its company.

Holds the tile size, aligned tiles, and the two activations that need padded buffers. Knows no operation's meaning.

Invariants:
1. A tile has TILE_ROWS rows, starts at a multiple of 64 bytes, and its rows are a multiple of 64 bytes apart.
2. Rows that pad the last tile are zero; nothing reads their results.
"""

import torch
from torch import Tensor

__all__ = ["TILE_ROWS", "empty_tiles", "padded_rows", "sigmoid", "silu", "tiled_rows"]

TILE_ROWS = 8
_ALIGN_BYTES = 64
_VECTOR_VALUES = 64  # no vector body on the CPU steps further than this many values


def padded_rows(rows: int) -> int:
    """`rows` rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def empty_tiles(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor `shape`, aligned at its start, whose innermost rows are a multiple of 64 bytes apart."""
    step = max(1, _ALIGN_BYTES // dtype.itemsize)
    width = shape[-1]
    tiles = torch.empty((*shape[:-1], -(-width // step) * step), dtype=dtype)
    assert tiles.data_ptr() % _ALIGN_BYTES == 0, "torch gave memory that is not aligned to 64 bytes"
    return tiles[..., :width]


def tiled_rows(x: Tensor) -> Tensor:
    """`x` as whole aligned tiles.

    x        [rows, width]          any float  CPU
    returns  [padded rows, width]   same       CPU  x itself if it already is whole aligned tiles; else a copy, padding rows zero
    """
    rows, width = x.shape
    row_bytes = width * x.element_size()
    if rows % TILE_ROWS == 0 and x.is_contiguous() and row_bytes % _ALIGN_BYTES == 0 and x.data_ptr() % _ALIGN_BYTES == 0:
        return x
    tiles = empty_tiles((padded_rows(rows), width), x.dtype)
    tiles[:rows].copy_(x)
    tiles[rows:].zero_()
    return tiles


def _padded_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of `x`'s values in a flat buffer that ends on a whole vector, and the view of it that has `x`'s shape."""
    values = x.numel()
    flat = torch.empty(-(-values // _VECTOR_VALUES) * _VECTOR_VALUES, dtype=x.dtype)
    flat[values:].zero_()
    view = flat[:values].view(x.shape)
    view.copy_(x)
    return flat, view


def silu(x: Tensor) -> Tensor:
    """A copy of `x` (any shape, any strides) through silu, each value with the bits of the vector body."""
    flat, view = _padded_values(x)
    torch.nn.functional.silu(flat, inplace=True)
    return view


def sigmoid(x: Tensor) -> Tensor:
    """A copy of `x` (any shape, any strides) through the logistic function, each value with the bits of the vector body."""
    flat, view = _padded_values(x)
    flat.sigmoid_()
    return view
