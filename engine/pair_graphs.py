"""Replays on two devices: a graph each, and the flags between them.

The recorder is `streams/graphs.py`, the flags are `kernels/flag`; this brings them together, because neither knows the other.
"""

import torch
from torch import Tensor

from engine.errors import PARTED
from kernels.flag import advance_epoch, await_flag, mark_lost, raise_flag
from streams.crossing import Crossing, FlagWork
from streams.graphs import PairRecorder

__all__ = ["mark_parted", "pair_recorder"]

_PEER = ".peer."  # in the names of the peer's streams, see `StageStreams.of`


def pair_recorder(owner: torch.device, peer: torch.device) -> PairRecorder:
    """What records steps of a pair. Waits for both devices: their kernels of flags are compiled, which no recording may do."""
    crossing = Crossing({"": owner, _PEER: peer}, FlagWork(advance_epoch, raise_flag, await_flag))
    crossing.restart()
    for epoch in crossing.epoch_of.values():
        with torch.cuda.device(epoch.device):
            flag, rows = crossing.next_flag(), torch.zeros(1, dtype=torch.int64, device=epoch.device)
            raise_flag(flag, epoch)
            await_flag(flag, epoch, crossing.lost)
            mark_lost(rows, crossing.lost, epoch, PARTED)
            advance_epoch(epoch)
            epoch.zero_()
            torch.cuda.synchronize(epoch.device)
    return PairRecorder(crossing)


def mark_parted(crossing: Crossing, bad_layer: Tensor) -> None:
    """Work, the last of a replay on the owner: `PARTED` in place of every row's first bad layer, if a wait of this replay was given up.

    bad_layer  [T]  int64  the owner's
    """
    mark_lost(bad_layer, crossing.lost, crossing.epoch_of[""], PARTED)
