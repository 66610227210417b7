"""The step table: where a step finds every address and bound it needs, one place a session.

Holds one device tensor. Knows field numbers through TableLayout; knows nothing of what the addresses point to.

Invariants:
1. The tensor never moves: captured graphs keep its address.
2. It changes only inside the work that `rewrite` returns, on the stream that runs it, as one copy; a step submitted earlier on
   that stream sees the old table, a later one the new.
3. A free place is all zeros, so ROWS is 0. Session state (counts, token, round) lives behind STATE and no rewrite touches it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.layout import TableField, TableLayout
from memory.staging import behind_fills, pinned

__all__ = ["StepTable"]


class StepTable:
    """int64 [places, fields] on the device, all places free at first."""

    def __init__(self, places: int, layout: TableLayout, device: torch.device | str = "cpu") -> None:
        assert places > 0, f"a step table has places, not {places}"
        self.layout = layout
        self.tensor: Tensor = torch.zeros((places, layout.fields), dtype=torch.int64, device=device)

    @property
    def places(self) -> int:
        return self.tensor.shape[0]

    def rewrite(self, rows: Sequence[Sequence[int] | None]) -> Callable[[], None]:
        """Work that makes `rows` the table's content; run it on the stream of the steps, and never inside a captured graph.

        Args: rows: one list of `layout.fields` ints a place, in order; None or a missing tail: free.
        Returns: a closure with values copied now: later changes to `rows` do not reach it. The buffers that they name are filled before
            anything behind it on its stream runs.
        """
        assert len(rows) <= self.places, f"{len(rows)} rows for {self.places} places"
        staged = torch.zeros(self.tensor.shape, dtype=torch.int64)
        for place, row in enumerate(rows):
            if row is None:
                continue
            assert len(row) == self.layout.fields, f"place {place} has {len(row)} fields, not {self.layout.fields}"
            assert row[TableField.ROWS] > 0, f"place {place} has {row[TableField.ROWS]} query rows; a free place is None"
            staged[place] = torch.tensor(row, dtype=torch.int64)
        values = pinned(staged, self.tensor.device)

        def write() -> None:
            behind_fills(self.tensor.device)
            self.tensor.copy_(values, non_blocking=True)

        return write
