"""Selections over index keys that lie on two devices, page by page: each chooses the best of its own, and the best of both are chosen.

Exact: the k best of all keys are among the k best of each device, ties to the lower position included, because the keys of a device are in
order there too and a key's score does not depend on where its page lies (`kernels/index_score`). Holds nothing. `reference.py` is ordinary
work of the library and runs on a device as it is, without a launch that waits for the host; the choices are `kernels/select`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.candidates import reference
from kernels.layout import KeyLayout, PageShare
from kernels.selection import Scratch, select_places

__all__ = ["Candidates", "local_positions", "merge_candidates", "own_candidates", "share_first"]

local_positions = reference.local_positions


@dataclass(frozen=True, slots=True)
class Candidates:
    """A device's own choice for some rows.

    positions  [T, k]  int32    of the session, ascending, -1 tail
    scores     [T, k]  float32  what each was chosen by; anything where there is no position
    """

    positions: Tensor
    scores: Tensor

    @staticmethod
    def empty(rows: int, picks: int, device: torch.device) -> "Candidates":
        """Room for `rows` rows."""
        return Candidates(torch.full((rows, picks), -1, dtype=torch.int32, device=device), torch.zeros((rows, picks), device=device))

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Both tensors."""
        return self.positions, self.scores


def share_first(first: int, share: PageShare) -> int:
    """The first key of a share that may be chosen, when position `first` of the session, inside page 0, is the first."""
    return first if share.device == 0 else 0


def own_candidates(
    table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, layout: KeyLayout,
    first: int, share: PageShare, out: Candidates, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """`kernels.selection.select_places` among the keys of one device, whose page tables hold its share side by side.

    first    the first position of the session that may be chosen, below 1,024
    out      written in full
    scratch  as there: its columns hold the device's own keys. All else as there
    """
    local = reference.local_positions(positions, share)
    live = torch.where(local >= 0, place_of, -1)
    begins = share_first(first, share)
    select_places(table, group, live, local, query, head_weights, layout, begins, out.positions, scratch, scores=out.scores)
    reference.to_positions(out.positions, share)


def merge_candidates(one: Candidates, other: Candidates, out: Tensor) -> None:
    """The k best of two devices' candidates for the same rows.

    one, other  of different positions
    out         [T, k]  int32  written in full; ascending, -1 tail
    """
    assert one.positions.shape == other.positions.shape == out.shape, (
        f"{tuple(one.positions.shape)} candidates for {tuple(out.shape)} picks"
    )
    reference.merge_candidates(one.positions, one.scores, other.positions, other.scores, out)
