"""The buffers of one round's plan. Knows nothing of how they are filled."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RoundPlan"]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Where each pick of a step's query rows is read from, and where it is kept. Long-lived: a step overwrites it in place.

    selection    [T, k]    int32  positions; -1 unused. Written by the selection, read by the plan
    slot         [T, k]    int32  hot slot of a hit, else -1
    fill         [T, k]    int32  hot slot that this pick fills, else -1: leaders that got a victim
    miss         [T, k]    int32  place in the list of distinct misses, shared by duplicates; -1 for hits, ring reads, unused picks
    source       [T, k]    int64  address of the row in layer 0 of its block or ring; 0 for a hit and an unused pick
    misses       [1]       int64  distinct misses
    miss_source  [T * k]   int64  their sources, in row-major order of their leaders; 0 past `misses`
    scratch      [2 + 2 * T + 2 * T * k]  int32  the device kernels' own, kept from plan to plan (kernel.py says what lies where)
    """

    selection: Tensor
    slot: Tensor
    fill: Tensor
    miss: Tensor
    source: Tensor
    misses: Tensor
    miss_source: Tensor
    scratch: Tensor

    @classmethod
    def empty(cls, rows: int, picks: int, device: torch.device | str = "cpu") -> "RoundPlan":
        """Buffers for `rows` query rows of `picks` picks, with every pick unused."""

        def unused() -> Tensor:
            return torch.full((rows, picks), -1, dtype=torch.int32, device=device)

        return cls(
            selection=unused(),
            slot=unused(),
            fill=unused(),
            miss=unused(),
            source=torch.zeros((rows, picks), dtype=torch.int64, device=device),
            misses=torch.zeros(1, dtype=torch.int64, device=device),
            miss_source=torch.zeros(rows * picks, dtype=torch.int64, device=device),
            scratch=torch.zeros(2 + 2 * rows + 2 * rows * picks, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> int:
        return self.selection.shape[0]

    @property
    def picks(self) -> int:
        return self.selection.shape[1]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every tensor that a plan writes or a gather reads, for an operation's `reads` and `writes`; not the scratch."""
        return (self.selection, self.slot, self.fill, self.miss, self.source, self.misses, self.miss_source)

    def forget(self) -> None:
        """Everything but the selection back to unused."""
        for unused in (self.slot, self.fill, self.miss):
            unused.fill_(-1)
        for zero in (self.source, self.misses, self.miss_source):
            zero.zero_()
