"""What a device's selection of a step writes on its way, and which form it takes. Knows no kernel."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["COUNTED_ALONE_MAX", "COUNTED_COLUMNS_MAX", "Scratch", "SelectionForm"]

SelectionForm = Literal["auto", "chunks", "counted"]

COUNTED_COLUMNS_MAX = 65_536  # measured: of 131,072 keys counting costs four rows more than its launches save, a million one row too
COUNTED_ALONE_MAX = 131_072  # of one row alone
_ROW_COUNTS = 512 + 32  # int32 a row, see `kernels/select/digits.py`


@dataclass(frozen=True, slots=True)
class Scratch:
    """Room for the scores of some rows, and for what is made of them. Long-lived; every selection overwrites it.

    scores      [rows, columns]     float32  device  columns at least every position + 1; they bound the launches
    counts      [rows, ROW_COUNTS]  int32    device  zero when the scoring begins; None: the form needs none
    candidates  [2, rows, columns]  int32    device  ranks and positions that the counts leave undecided, in any order; None likewise
    chunk                           positions a program looks at
    """

    scores: Tensor
    counts: Tensor | None
    candidates: Tensor | None
    chunk: int

    @classmethod
    def of(cls, rows: int, columns: int, device: torch.device, form: SelectionForm = "auto") -> "Scratch":
        """Room for rows of `columns` scores. All forms choose the same positions, and a form follows from the columns unless it is given.

        Args: form: "counted": digits are counted with the scores, then two launches; "chunks": seven launches over chunks of 2,048
            positions.
        """
        scores = torch.zeros((rows, columns), device=device)
        if form == "auto":
            form = "counted" if columns <= (COUNTED_ALONE_MAX if rows == 1 else COUNTED_COLUMNS_MAX) else "chunks"
        if form != "counted":
            return cls(scores, None, None, 2048)
        counts = torch.zeros((rows, _ROW_COUNTS), dtype=torch.int32, device=device)
        return cls(scores, counts, torch.zeros((2, rows, columns), dtype=torch.int32, device=device), 512)
