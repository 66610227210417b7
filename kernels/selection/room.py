"""What a step's selections need on a device beside their inputs. Knows nothing of how it is filled."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels.select.room import SelectRoom

__all__ = ["ScoreRoom"]


@dataclass(frozen=True, slots=True)
class ScoreRoom:
    """Scratch for selections of up to so many rows over so many positions, one at a time; kept from one to the next.

    scores  [rows, positions]  float32  its columns bound the launches: the host knows no length
    """

    scores: Tensor
    select: SelectRoom

    @classmethod
    def empty(cls, rows: int, positions: int, device: torch.device | str) -> Self:
        """Room in which nothing is counted."""
        return cls(torch.zeros((rows, positions), device=device), SelectRoom.empty(rows, positions, device))
