"""Positions of a share of the pages, and the choice among two devices' candidates, in torch on any device.

Invariants:
1. Local positions of a share are in the order of the positions they stand for: what lies lower here lies lower there.
2. The choice is that of `kernels/select` over all candidates in order of position; its ranks of NaN and -inf and its ties are theirs.
3. Nothing waits for the device: shapes follow from shapes.
"""

import torch
from torch import Tensor

from kernels.layout import PAGE_KEYS, PageShare
from kernels.select import select

__all__ = ["local_positions", "merge_candidates", "to_positions"]

_NOWHERE = 2**31 - 1  # behind every position


def local_positions(positions: Tensor, share: PageShare) -> Tensor:
    """The last key of a share at or below each position, int64 as `positions`; -1: the share has none."""
    page = positions // PAGE_KEYS
    pages = torch.div(page + share.devices - share.device, share.devices, rounding_mode="floor")  # of the share, up to that page
    here = page % share.devices == share.device
    last = torch.where(here, positions % PAGE_KEYS, PAGE_KEYS - 1)
    return torch.where((pages > 0) & (positions >= 0), (pages - 1) * PAGE_KEYS + last, -1)


def to_positions(local: Tensor, share: PageShare) -> None:
    """Make local positions those of the session, in place; -1 stays."""
    page = local // PAGE_KEYS * share.devices + share.device
    local.copy_(torch.where(local >= 0, page * PAGE_KEYS + local % PAGE_KEYS, -1))


def merge_candidates(positions: Tensor, scores: Tensor, other_positions: Tensor, other_scores: Tensor, out: Tensor) -> None:
    """See the package page: put both lists in order of position, then choose as `kernels/select`."""
    rows, picks = positions.shape
    if rows == 0 or picks == 0:
        return
    mine = torch.where(positions >= 0, positions, _NOWHERE).contiguous()
    its = torch.where(other_positions >= 0, other_positions, _NOWHERE).contiguous()
    number = torch.arange(picks, device=positions.device)
    my_place, its_place = number + torch.searchsorted(its, mine), number + torch.searchsorted(mine, its)
    ordered = torch.full((rows, 2 * picks), -1, dtype=torch.int32, device=positions.device)
    ranked = torch.zeros((rows, 2 * picks), device=positions.device)
    # Two unused candidates may share a place behind all used ones: whichever is written there, nobody reads it.
    for place, of_position, of_score in ((my_place, positions, scores), (its_place, other_positions, other_scores)):
        ordered.scatter_(1, place, of_position)
        ranked.scatter_(1, place, of_score)
    count = (positions >= 0).sum(1) + (other_positions >= 0).sum(1)
    select(ranked, torch.zeros_like(count), count, picks, out)
    out.copy_(torch.where(out >= 0, ordered.gather(1, out.clamp_min(0).long()), -1))
