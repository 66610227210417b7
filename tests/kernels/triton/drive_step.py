"""Interpreted hidden states against the reference, over sessions at every kind of position, free places and padding."""

import time

import interpreted
import torch
from torch import Tensor

from kernels.layout import HIDDEN_ROWS, STATE_FIELDS, TableField, TableLayout
from kernels.step import kernel, reference

FIELDS = TableLayout(1).fields


class World:
    """Places with hidden states behind a table; the third is free. The last row is padding."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(width)
        self.hidden = torch.randn((5, HIDDEN_ROWS, width), generator=generator)
        self.hidden[1, 5] = float("nan")
        self.table = torch.zeros((5, FIELDS), dtype=torch.int64)
        for place in (0, 1, 3, 4):
            self.table[place, TableField.ROWS] = 2
            self.table[place, TableField.HIDDEN] = self.hidden[place].data_ptr()
        self.place_of = torch.tensor([4, 4, 1, 0, 2, 3, -1], dtype=torch.int32)
        self.positions = torch.tensor([1_048_576, 1_048_577, 6, 0, 5, 16, 7])

    def step(self, form: object, width: int) -> dict[str, Tensor]:
        """One step through `form` (reference or kernel), and all it wrote."""
        rows = self.positions.shape[0]
        before = torch.full((rows, width), float("nan"))
        wide = torch.stack([self.positions, self.positions + 1], 1)  # positions lie apart
        form.load_hidden(self.table, self.place_of, wide[:, 0], before)  # type: ignore[attr-defined]
        after = torch.arange(float(rows))[:, None] + torch.arange(width) / width
        after[[4, 6]] = float("nan")  # rows of the free place and padding reach nothing
        form.store_hidden(self.table, self.place_of, self.positions, after)  # type: ignore[attr-defined]
        self.positions += 2
        return {"before": before.view(torch.int32), "hidden": self.hidden.view(torch.int32)}


def states_are_kept_in_float32() -> None:
    """States of bfloat16 are kept and found again without a change."""
    world, drawn = World(40), torch.randn(7, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    kernel.store_hidden(world.table, world.place_of, world.positions, drawn)
    found = torch.full((7, 40), 3.0).bfloat16()
    kernel.load_hidden(world.table, world.place_of, world.positions + 1, found)
    drawn[[4, 6]] = 0
    interpreted.same("states", found, drawn)


def broken_logits_are_flagged() -> None:
    """Rows of several tiles: copied as they are, flagged once where any value is not finite, also in the last, ragged tile."""
    logits = torch.randn(7, 45, generator=torch.Generator().manual_seed(4))[:, 1:]
    logits[1, 0], logits[2, 43], logits[3, 17], logits[4, [3, 20]] = float("nan"), float("inf"), float("-inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        kept, flags = [torch.full((7, 44), 9.0) for _ in range(2)], [torch.tensor([-1, -1, -1, -1, 2, -1, 5]) for _ in range(2)]
        reference.keep_logits(logits.to(dtype), kept[0], flags[0], 4)
        with interpreted.programs_backwards():
            kernel.keep_logits(logits.to(dtype), kept[1], flags[1], 4)
        interpreted.same("logits", kept[1].view(torch.int32), kept[0].view(torch.int32))
        interpreted.same("flags", flags[1], flags[0])
        assert flags[1].tolist() == [-1, 4, 4, 4, 2, -1, 5]


def peers_follow() -> None:
    """Places with a session and a free one, more than a program takes: states and counts are the reference's."""
    table = torch.zeros((9, FIELDS), dtype=torch.int64)
    table[:, TableField.ROWS] = torch.tensor([1, 2, 0, 2, 2, 1, 0, 2, 1])
    positions = torch.arange(18) * 37
    got = []
    for form in (reference, kernel):
        states, mirrored = torch.arange(9 * STATE_FIELDS).view(9, STATE_FIELDS) * 5, torch.full((9,), 7)
        table[:, TableField.STATE] = torch.tensor([state.data_ptr() for state in states])
        form.follow_rows(table, positions, mirrored)
        got.append((states, mirrored))
    interpreted.same("states", got[1][0], got[0][0])
    interpreted.same("mirrored", got[1][1], got[0][1])


def main() -> None:
    begun = time.monotonic()
    kernel.HIDDEN_TILE, kernel.LOGITS_TILE, kernel.PLACES_BLOCK = 16, 16, 4
    peers_follow()
    states_are_kept_in_float32()
    broken_logits_are_flagged()
    for width, tile in ((8, 1024), (33, 16)):
        kernel.HIDDEN_TILE = tile
        worlds = World(width), World(width)
        for index in range(3):
            wanted, got = worlds[0].step(reference, width), worlds[1].step(kernel, width)
            for name in wanted:
                interpreted.same(f"width {width}, step {index}: {name}", got[name], wanted[name])
    print(f"steps: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
