"""Selections that miss at a chosen rate, for measuring where a model's own weights do not give a usual one.

Chosen when a stage opens; the step scores and selects as always and then overwrites its picks. Knows no placement: the picks depend on
the position alone (`kernels/forced`), so both placements read the same rows. What the model then says means nothing.

Invariants:
1. Picks are ascending, distinct, and below the row's own position + 1; rows whose context is no longer than the selection stay as they are.
2. From one position to the next all but `fresh` picks stay; a fresh pick comes back only after all others of its range.
"""

from torch import Tensor

from kernels.forced import force_picks

__all__ = ["ForcedSelection"]


class ForcedSelection:
    """Overwrites the picks of decode steps."""

    def __init__(self, miss_rate: float, picks: int) -> None:
        """Args: miss_rate: share of the picks that is new at each position, above 0. picks: a row's (top-k)."""
        assert 0 < miss_rate <= 1, f"a miss rate of {miss_rate}"
        self._picks = picks
        self.fresh = max(1, round(miss_rate * picks))

    def overwrite(self, positions: Tensor, selection: Tensor) -> None:
        """Replace the picks of rows whose context is long enough.

        positions  [rows]         int64  of the query rows
        selection  [rows, picks]  int32  overwritten
        """
        assert selection.shape == (positions.shape[0], self._picks), f"{tuple(selection.shape)} picks for {self._picks}"
        force_picks(positions, self.fresh, selection)
