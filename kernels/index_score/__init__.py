"""Scores of all index keys for each query row: what the selection chooses by. Row-invariant: see `kernels`.

A page is always scored whole, so that the shape of a product does not follow the length of a history; the caller's buffer has room for it.
`kernels/selection` scores the rows of a step, each over its own session's pages.
"""

import torch
from torch import Tensor

from kernels.index_score import reference
from kernels.layout import PAGE_KEYS, KeyLayout
from kernels.place import on_cpu

__all__ = ["index_scores"]

_TILE_ROWS_MAX = 16  # more rows are a tile of an append's, for which the keys are read once; fewer would be padding in its products


def index_scores(
    query: Tensor, head_weights: Tensor, pages: Tensor, keys: int | Tensor, layout: KeyLayout, out: Tensor, *, tile: bool = False
) -> None:
    """Score positions 0 to keys - 1. Scores may be negative; nothing is masked.

    query         [rows, heads, width]  float    rotated; any strides
    head_weights  [rows, heads]         float32  unscaled: both constant factors (width^-1/2, heads^-1/2) are applied here
    pages         [pages]               int64    addresses of pages (`KeyLayout`); position p is key p % 1024 of page p // 1024
    out           [rows, columns]       float32  columns >= keys rounded up to whole pages; written in full up to there, where columns
                                                 from `keys` on hold what the page's unused keys happen to give (NaN included)
    Args: keys: how many positions have a key, >= 0; on a device also a tensor int64 [1] there, which a replayed launch reads anew (its
    bounds are then not checked). layout: how keys are stored. tile: a tile of an append's, which goes one way on a device however few its
    rows are: how programs of few rows share out the keys follows their number, and each way would be compiled while somebody waits.
    """
    assert query.shape[2] == layout.width, f"queries are {query.shape[2]} wide, keys {layout.width}"
    assert head_weights.dtype == torch.float32, f"head weights are {head_weights.dtype}"
    cpu = on_cpu("index_scores", query)
    if cpu or not isinstance(keys, Tensor):
        keys = int(keys)
        _check_room(keys, pages, out)
    if cpu:
        assert isinstance(keys, int), "the reference takes a count"
        reference.index_scores(query, head_weights, pages, keys, layout, out)
        return
    assert out.stride(1) == 1, "scores of a row do not lie side by side"
    if (tile or query.shape[0] > _TILE_ROWS_MAX) and isinstance(keys, int):
        from kernels.index_score import bulk

        bulk.index_scores(query, head_weights, pages, keys, layout, out)
        return
    from kernels.index_score import kernel

    kernel.index_scores(query, head_weights, pages, keys, layout, out)


def _check_room(keys: int, pages: Tensor, out: Tensor) -> None:
    needed = -(-keys // PAGE_KEYS)
    assert needed <= pages.shape[0], f"{keys} keys need {needed} pages, got {pages.shape[0]}"
    assert needed * PAGE_KEYS <= out.shape[1], f"{needed} pages do not fit {out.shape[1]} columns"
