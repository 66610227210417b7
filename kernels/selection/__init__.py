"""Score and select for the rows of a step: every row over its own session's key pages, reached through the step table.

On the CPU this is `index_scores` a row and `select` over all; rows never see another session's pages.
"""

import torch
from torch import Tensor

from kernels.layout import KeyLayout
from kernels.place import on_cpu
from kernels.selection import reference
from kernels.selection.scratch import Scratch, SelectionForm

__all__ = ["Scratch", "SelectionForm", "choose_rows", "score_rows", "select_places"]


def select_places(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, out: Tensor, scratch: Scratch | None = None, cleared: bool = False, scores: Tensor | None = None,
) -> None:  # fmt: skip
    """Select each row's top-k positions among its session's keys `first..position`.

    table         [places, fields]  int64    device
    place_of      [T]               int32    device  rows of one place in any order; padding rows name a free place or -1
    positions     [T]               int64    device
    query         [T, I, Di]        float    device
    head_weights  [T, I]            float32  device  unscaled
    out           [T, k]            int32    device  written in full; ascending, -1 tail; all -1 for padding rows
    scratch       room for at least T rows, needed on a device: its columns bound the launches
    scores        [T, k]            float32  device  what each pick was chosen by, anything for unused ones; None: not asked
    Args: cleared: the scratch's counts are zero; else they are cleared first, by a launch of its own.
    """
    if on_cpu("select_places", table):
        reference.select_places(table, group, place_of, positions, query, head_weights, layout, first, out, scores)
        return
    from kernels.selection import kernel

    assert scratch is not None, "a device's selection needs room for scores: the host knows no length"
    assert scratch.scores.shape[0] >= query.shape[0], f"{scratch.scores.shape[0]} rows of scores for {query.shape[0]} queries"
    kernel.select_places(table, group, place_of, positions, query, head_weights, layout, first, out, scratch, cleared)
    if scores is not None:
        torch.gather(scratch.scores[: out.shape[0]], 1, out.clamp_min(0).long(), out=scores)


def score_rows(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, scratch: Scratch, cleared: bool = False,
) -> None:  # fmt: skip
    """The first half of `select_places`, on a device alone: the scores and what is counted with them, left in the scratch."""
    from kernels.selection import kernel

    kernel.score_rows(table, group, place_of, positions, query, head_weights, layout, first, scratch, cleared)


def choose_rows(table: Tensor, place_of: Tensor, positions: Tensor, first: int, out: Tensor, scratch: Scratch) -> None:
    """The second half: the choice among the scores that `score_rows` of the same rows left. Arguments as there."""
    from kernels.selection import kernel

    kernel.choose_rows(table, place_of, positions, first, out, scratch)
