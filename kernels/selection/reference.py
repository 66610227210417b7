"""Selections of a decode step, defined in torch over real addresses (CPU). Source: `kernels/index_score`, `kernels/select`."""

import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.index_score import index_scores
from kernels.layout import PAGE_KEYS, KeyLayout, TableField
from kernels.place import live_rows
from kernels.select import select

__all__ = ["select_places"]


def select_places(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, out: Tensor, picked_scores: Tensor | None = None,
) -> None:  # fmt: skip
    """Select each row's top-k positions among its session's keys `first..position`.

    table         [places, fields]  int64  device
    place_of      [T]               int32  device
    positions     [T]               int64  device
    query         [T, I, Di]        f32    device
    head_weights  [T, I]            f32    device  unscaled
    out           [T, k]            int32  device  written in full; ascending, -1 tail; all -1 for padding rows
    picked_scores [T, k]            f32    device  score of each pick, anything for unused ones; None: not asked
    """
    rows = query.shape[0]
    _, live = live_rows(table, place_of)
    last = torch.where(live, positions + 1, torch.zeros_like(positions))
    keys_max = max(int(last.max()), 1)
    pages_max = -(-keys_max // PAGE_KEYS)
    scores = torch.empty((rows, pages_max * PAGE_KEYS), dtype=torch.float32)
    for row in range(rows):
        keys = int(last[row])
        if keys == 0:
            continue
        place = int(place_of[row])
        stride = int(table[place, TableField.PAGES_MAX])
        pages = tensor_at(int(table[place, TableField.PAGES]) + group * stride * 8, (-(-keys // PAGE_KEYS),), torch.int64)
        index_scores(query[row : row + 1], head_weights[row : row + 1], pages, keys, layout, scores[row : row + 1])
    select(scores, torch.full_like(positions, first), last, out.shape[1], out)
    if picked_scores is not None:
        torch.gather(scores, 1, out.clamp_min(0).long(), out=picked_scores)
