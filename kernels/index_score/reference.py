"""The lightning indexer's score of every key, in tiles of (8 rows x heads) by one page. Knows no causality: the selection masks.

Invariants:
1. A score is one product of a fixed shape, [8 * heads, width] by a whole page, then a sum over heads of a fixed shape.
2. A column depends on its own key only, so what lies in a page past the last key harms nobody.
3. Both constant factors are folded into the head weights: they are positive, and relu(s * x) = s * relu(x) for positive s.
4. For the same reason an e4m3 key's scale multiplies the sum over heads, and its values are multiplied as they are. A scale of NaN shows.
"""

import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout
from kernels.tile import TILE_ROWS, empty_tiles, padded_rows

__all__ = ["index_scores"]


def index_scores(query: Tensor, head_weights: Tensor, pages: Tensor, keys: int, layout: KeyLayout, out: Tensor) -> None:
    """`sum_h weight[t, h] * relu(query[t, h] · key[j] / sqrt(width)) / sqrt(heads)`; see the package page."""
    rows, heads, width = query.shape
    if rows == 0:
        return
    tiles = _query_tiles(query)
    weights = torch.zeros((padded_rows(rows), heads, 1))
    weights[:rows, :, 0] = head_weights * heads**-0.5 * width**-0.5
    product = torch.empty((TILE_ROWS * heads, PAGE_KEYS))
    by_head = product.view(TILE_ROWS, heads, PAGE_KEYS)
    score = torch.empty((TILE_ROWS, PAGE_KEYS))
    for page, address in enumerate(pages[: -(-keys // PAGE_KEYS)].tolist()):
        transposed = _page_keys(address, layout).t()
        scales = _page_scales(address, layout) if layout.scale_bytes else None
        columns = out[:, page * PAGE_KEYS : (page + 1) * PAGE_KEYS]
        for tile in range(tiles.shape[0]):
            start = tile * TILE_ROWS
            torch.mm(tiles[tile], transposed, out=product)
            product.clamp_min_(0.0)
            by_head.mul_(weights[start : start + TILE_ROWS])
            torch.sum(by_head, 1, out=score)
            if scales is not None:
                score.mul_(scales)
            stop = min(start + TILE_ROWS, rows)
            columns[start:stop].copy_(score[: stop - start])


def _query_tiles(query: Tensor) -> Tensor:
    """Queries as aligned tiles, [tiles, 8 * heads, width] float32; padding rows zero."""
    rows, heads, width = query.shape
    tiles = empty_tiles((padded_rows(rows), heads, width), torch.float32)
    tiles[:rows].copy_(query)
    tiles[rows:].zero_()
    by_tile: Tensor = tiles.unflatten(0, (-1, TILE_ROWS))
    return by_tile.flatten(1, 2)


def _page_keys(address: int, layout: KeyLayout) -> Tensor:
    """A page's keys, [1024, width] float32, aligned; a view of the page where it can be. Without their scales."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[layout.encoding]
    runs = tensor_at(address, (PAGE_KEYS // BLOCK_ROWS, layout.run_bytes // dtype.itemsize), dtype)
    width = layout.values_bytes // dtype.itemsize
    by_run: Tensor = runs[:, : BLOCK_ROWS * width].unflatten(1, (BLOCK_ROWS, width))
    stored = by_run[..., : layout.width]
    if dtype == torch.float32 and address % 64 == 0 and layout.key_bytes % 64 == 0:
        return stored.flatten(0, 1)
    keys = empty_tiles((PAGE_KEYS, layout.width), torch.float32)
    keys.unflatten(0, (-1, BLOCK_ROWS)).copy_(stored)
    return keys


def _page_scales(address: int, layout: KeyLayout) -> Tensor:
    """Scales of a page's keys, [1024] float32."""
    runs = tensor_at(address, (PAGE_KEYS // BLOCK_ROWS, layout.run_bytes // 4), torch.float32)
    return runs[:, BLOCK_ROWS * layout.values_bytes // 4 :].flatten()
