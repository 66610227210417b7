"""Interpreted step inputs and outputs against the reference, over sessions at every kind of position and free places."""

import time

import interpreted
import torch
from torch import Tensor

from kernels.layout import HIDDEN_ROWS, STATE_FIELDS, StateField, TableField, TableLayout
from kernels.step import kernel, reference

FIELDS = TableLayout(1).fields


class World:
    """Places with states and hidden states behind a table; the third is free."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(width)
        self.states = torch.randint(1, 10_000, (5, STATE_FIELDS), generator=generator)
        self.states[:, StateField.LOGICAL] = torch.tensor([0, 1, 5, 16, 1_048_576])
        self.states[:, StateField.MIRRORED] = torch.tensor([0, 63, 64, 65, 1_048_575])
        self.states[:, StateField.BAD_LAYER] = torch.tensor([-1, 3, -1, -1, -1])
        self.hidden = torch.randn((5, HIDDEN_ROWS, width), generator=generator)
        self.hidden[1, 5] = float("nan")
        self.table = torch.zeros((5, FIELDS), dtype=torch.int64)
        for place in (0, 1, 3, 4):
            self.table[place, TableField.ROWS] = 1
            self.table[place, TableField.STATE] = self.states[place].data_ptr()
            self.table[place, TableField.HIDDEN] = self.hidden[place].data_ptr()
        self.place_of = torch.tensor([4, 1, 0, 2, 3], dtype=torch.int32)

    def step(self, form: object, width: int) -> dict[str, Tensor]:
        """One step through `form` (reference or kernel), and all it wrote."""
        positions, tokens, mirrored = (torch.full((5,), -77) for _ in range(3))
        form.snapshot(self.table, self.place_of, positions, tokens, mirrored)  # type: ignore[attr-defined]
        before = torch.full((5, width), float("nan"))
        form.load_hidden(self.table, self.place_of, positions, before)  # type: ignore[attr-defined]
        after = torch.arange(5.0)[:, None] + torch.arange(width) / width
        after[3] = float("nan")  # the free place's row reaches nothing
        form.store_hidden(self.table, self.place_of, positions, after)  # type: ignore[attr-defined]
        bad = torch.tensor([-1, 7, 8, 9, 10])
        form.advance(self.table, self.place_of, torch.arange(100, 105), bad)  # type: ignore[attr-defined]
        found = {"positions": positions, "tokens": tokens, "mirrored": mirrored, "states": self.states}
        return {**found, "before": before.view(torch.int32), "hidden": self.hidden.view(torch.int32)}


def main() -> None:
    begun = time.monotonic()
    for width, tile in ((8, 1024), (33, 16)):
        kernel.HIDDEN_TILE, kernel.ROWS_TILE = tile, 64 if tile > 64 else 2
        worlds = World(width), World(width)
        for index in range(3):
            wanted, got = worlds[0].step(reference, width), worlds[1].step(kernel, width)
            for name in wanted:
                interpreted.same(f"width {width}, step {index}: {name}", got[name], wanted[name])
        assert worlds[1].states[:, StateField.LOGICAL].tolist() == [3, 4, 5, 19, 1_048_579]
        assert worlds[1].states[:, StateField.BAD_LAYER].tolist() == [8, 3, -1, 10, -1]
    print(f"steps: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
