"""Products of rows with weights in tiles of 8 rows. Knows nothing of what the weights mean.

Invariant: a row's result is one product of a fixed shape, [8, width] by the weight of at least 16 outputs; see `kernels/tile.py`.
"""

import torch
from torch import Tensor

from kernels.tile import TILE_ROWS, empty_tiles, padded_rows, tiled_rows

__all__ = ["heads_linear", "linear"]

_OUTPUTS_MIN = 16  # of fewer, some processors' products have bits that follow from a row's place in its tile


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x · weight^T`; see the package page."""
    rows, outputs = x.shape[0], weight.shape[0]
    tiles = tiled_rows(x)
    transposed = _wide_enough(weight).t()
    out = torch.empty((tiles.shape[0], transposed.shape[1]), dtype=x.dtype)
    for start in range(0, tiles.shape[0], TILE_ROWS):
        torch.mm(tiles[start : start + TILE_ROWS], transposed, out=out[start : start + TILE_ROWS])
    return out[:rows, :outputs].contiguous()


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x[:, n] · weight[n]^T` for every head n; see the package page."""
    rows, heads, width = x.shape
    whole = padded_rows(rows)
    tiles = empty_tiles((whole // TILE_ROWS, heads, TILE_ROWS, width), x.dtype)
    by_row = tiles.transpose(1, 2)  # [tiles, 8, heads, width]
    full = rows // TILE_ROWS
    by_row[:full].copy_(x[: full * TILE_ROWS].unflatten(0, (full, TILE_ROWS)))
    if full < tiles.shape[0]:
        left = rows - full * TILE_ROWS
        by_row[full, :left].copy_(x[full * TILE_ROWS :])
        by_row[full, left:].zero_()
    outputs, transposed = weight.shape[1], _wide_enough(weight).transpose(1, 2)
    out = torch.empty((tiles.shape[0], heads, TILE_ROWS, transposed.shape[2]), dtype=x.dtype)
    for tile in range(tiles.shape[0]):
        torch.bmm(tiles[tile], transposed, out=out[tile])
    return out.transpose(1, 2).reshape(whole, heads, out.shape[-1])[:rows, :, :outputs].contiguous()


def _wide_enough(weight: Tensor) -> Tensor:
    """Itself, or with outputs of zeros behind its own: [.., at least _OUTPUTS_MIN, width]."""
    missing = _OUTPUTS_MIN - weight.shape[-2]
    return weight if missing <= 0 else torch.nn.functional.pad(weight, (0, 0, 0, missing))
