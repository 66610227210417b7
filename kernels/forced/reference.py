"""Forced picks in torch: integer arithmetic of the position. Knows no rows and no placement."""

import torch
from torch import Tensor

__all__ = ["POWERS", "force_picks"]

POWERS = 40  # contexts are below 2^40


def force_picks(positions: Tensor, fresh: int, selection: Tensor) -> None:
    """Stable picks 0, 1, ...; fresh picks a stride apart behind them, moved on by one a position; see the package page."""
    picks = selection.shape[1]
    stable = picks - fresh
    powers = torch.ones(POWERS, dtype=torch.int64) << torch.arange(POWERS)
    room = positions + 1 - stable
    largest = torch.where(powers <= room[:, None], powers, 1).amax(1)
    stride = largest // fresh
    usable = (positions + 1 > picks) & (stride >= 1)
    turn = positions % stride.clamp_min(1)
    kept = torch.arange(stable).expand(positions.shape[0], stable)
    moving = stable + torch.arange(fresh) * stride[:, None] + turn[:, None]
    forced = torch.cat([kept, moving], 1).to(torch.int32)
    selection.copy_(torch.where(usable[:, None], forced, selection))
