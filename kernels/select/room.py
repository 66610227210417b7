"""The buffers of a selection on a device. Knows nothing of how they are filled."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["CANDIDATES_MAX", "COUNTS", "DIGITS", "DIGIT_AT", "LISTED_AT", "SECOND_AT", "WANTED_AT", "SelectRoom"]

DIGITS = 4096  # values of the first digit, and of the second
SECOND_AT = DIGITS  # where in a row's counts those of the second digit begin
LISTED_AT = 2 * DIGITS  # scores with the cut's first digit
DIGIT_AT = LISTED_AT + 1  # the cut's first digit
WANTED_AT = LISTED_AT + 2  # how many of the scores with that digit are chosen
COUNTS = LISTED_AT + 16
CANDIDATES_MAX = 1 << 15  # listed a row; a row with more of them reads its scores again
_TALLIED = 64  # positions that share a tally, at the least


@dataclass(frozen=True, slots=True)
class SelectRoom:
    """Scratch for selections of up to so many rows over so many columns, one at a time; kept from one to the next.

    counts      [rows, COUNTS]         int32  scores by first digit, by second digit, then scalars (*_AT). Those by first digit are zero
                                              between selections; whoever counts them zeroes the others
    tallies     [rows, columns / 64]   int32  scores above the cut's first digit in each chunk
    candidates  [rows, 2, candidates]  int32  scores with the cut's first digit in any order, as ordered integers, and their positions
    """

    counts: Tensor
    tallies: Tensor
    candidates: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device | str) -> Self:
        """Room whose counts are zero."""

        def made(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        counts = torch.zeros((rows, COUNTS), dtype=torch.int32, device=device)
        return cls(counts, made(rows, -(-columns // _TALLIED)), made(rows, 2, min(CANDIDATES_MAX, columns)))
