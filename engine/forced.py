"""Selections that miss, and drafts that are accepted, at a chosen rate: for measuring where a model's weights do not give a usual one.

Chosen when a stage opens; the step scores and selects as always and then overwrites its picks. Knows no placement: the picks depend on
the position alone (`kernels/forced`), so both placements read the same rows. What the model then says means nothing.

Invariants:
1. Picks are ascending, distinct, and below the row's own position + 1; rows whose context is no longer than the selection stay as they are.
2. From one position to the next all but `fresh` picks stay; a fresh pick comes back only after all others of its range.
"""

import torch
from torch import Tensor

from kernels.forced import force_picks

__all__ = ["ForcedAcceptance", "ForcedSelection"]


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


class ForcedAcceptance:
    """Overwrites what follows a row that has a draft behind it: by the draft at the chosen rate, else by anything but the draft.

    The request's seed and the token's position alone decide, so two placements accept the same drafts.
    """

    def __init__(self, rate: float, vocabulary: int) -> None:
        """Args: rate: share of the drafts behind accepted ones that is accepted, above 0."""
        assert 0 < rate <= 1, f"an acceptance rate of {rate}"
        self._rate = rate
        self._vocabulary = vocabulary

    def overwrite(self, samples: Tensor, tokens: Tensor, place_of: Tensor, positions: Tensor, seeds: Tensor) -> None:
        """Replace the samples of rows that a draft of their own place follows.

        samples    [rows]  int64  overwritten
        tokens     [rows]  int64  what each row feeds
        place_of   [rows]  int32  -1: padding
        positions  [rows]  int64  of the query rows
        seeds      [rows]  int64
        """
        draft, behind = tokens.roll(-1), place_of.roll(-1)
        drafted = (place_of >= 0) & (behind == place_of)
        drafted[-1:] = False
        word = _mixed(_mixed(seeds) ^ (positions + 1))
        lucky = (word >> 11 & (1 << 53) - 1).double() * 2.0**-53 < self._rate
        refused = torch.where(samples == draft, (samples + 1) % self._vocabulary, samples)
        samples.copy_(torch.where(drafted, torch.where(lucky, draft, refused), samples))


def _mixed(word: Tensor) -> Tensor:
    """int64 to int64: SplitMix64's finaliser, whose products wrap."""
    word = word + 0x1E3779B97F4A7C15
    word = (word ^ (word >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    word = (word ^ (word >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return word ^ (word >> 31 & (1 << 33) - 1)
