"""Selections of a decode step on a device: scores through the step table, then the choice; three launches, no value read by the host.

Knows neither keys nor ranks; `kernels/index_score` and `kernels/select` do.

Invariant: a row's range comes from its position and its place on the device; the scores' buffer alone bounds the launches.
"""

import torch
from torch import Tensor

from kernels.index_score.kernel import score_places
from kernels.layout import KeyLayout
from kernels.select.kernel import narrow_and_write
from kernels.selection.room import ScoreRoom

__all__ = ["select_places"]


def select_places(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, out: Tensor, room: ScoreRoom,
) -> None:  # fmt: skip
    """See the package page."""
    rows = query.shape[0]
    if rows == 0:
        return
    ranges = torch.empty((2, rows), dtype=torch.int64, device=out.device)
    score_places(table, group, place_of, positions, query, head_weights, layout, first, room.scores, ranges, room.select.counts)
    narrow_and_write(room.scores[:rows], ranges[0], ranges[1], out.shape[1], out, room.select)
