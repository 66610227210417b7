"""Places with drafts behind a step table, for the tests of `kernels/verify` in both forms."""

import torch

from kernels.layout import DRAFTS_MAX, STATE_FIELDS, StateField, TableField, TableLayout

__all__ = ["VerifyWorld"]

FIELDS = TableLayout(1).fields


class VerifyWorld:
    """`rows_of[place]` query rows and `drafts_of[place]` drafts in the state; 0 rows: a free place whose addresses are poison."""

    def __init__(self, rows_of: list[int], drafts_of: list[int], *, vocabulary: int = 50, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        places = len(rows_of)
        self.states = torch.randint(0, vocabulary, (places, STATE_FIELDS), generator=generator)
        self.states[:, StateField.LOGICAL] = torch.randint(0, 2**40, (places,), generator=generator)
        self.states[:, StateField.MIRRORED] = torch.randint(0, 1000, (places,), generator=generator)
        self.states[:, StateField.BAD_LAYER] = -1
        self.states[:, StateField.DRAFT_COUNT] = torch.tensor(drafts_of)
        self.counts = torch.zeros((places, vocabulary), dtype=torch.int32)
        self.table = torch.full((places, FIELDS), -(2**40))
        for place, rows in enumerate(rows_of):
            self.table[place, TableField.ROWS] = rows
            if rows:
                self.table[place, TableField.STATE] = self.states[place].data_ptr()

    def drafts(self, place: int) -> list[int]:
        """The drafts that the state of a place holds."""
        count = int(self.states[place, StateField.DRAFT_COUNT])
        assert 0 <= count <= DRAFTS_MAX
        return self.states[place, StateField.DRAFTS : StateField.DRAFTS + count].tolist()

    def addresses(self) -> torch.Tensor:
        """Of the counts, int64 [places]; every third place does not count."""
        counted = [row.data_ptr() if place % 3 else 0 for place, row in enumerate(self.counts)]
        return torch.tensor(counted)
