"""Interpreted selections of a step: rows of several sessions in any order, free places, padding, and poisoned buffers."""

import company  # noqa: F401
import interpreted
import torch

from kernels.index_score import kernel as scoring
from kernels.layout import PAGE_KEYS, KeyLayout, TableField, TableLayout
from kernels.select import kernel as choice
from kernels.selection import kernel, reference

LAYOUT = KeyLayout("bf16", 16)
TABLE_LAYOUT = TableLayout(2)
LENGTHS = (1, 65, 1030)  # keys of each session


class World:
    """Three sessions and a free place behind a real step table; memory without a key is NaN."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.zeros((len(LENGTHS) + 1, TABLE_LAYOUT.fields), dtype=torch.int64)
        self.table[-1] = 2**40  # a free place's addresses are nothing
        self.table[-1, TableField.ROWS] = 0
        self.kept = []
        for place, length in enumerate(LENGTHS):
            memory = torch.full((2, 2, PAGE_KEYS, 16), float("nan"), dtype=torch.bfloat16)
            memory.view(2, -1, 16)[:, :length] = torch.randint(-2, 3, (2, length, 16), generator=generator).bfloat16()
            pages = torch.tensor([[memory[group, page].data_ptr() for page in range(2)] + [0] for group in range(2)])
            self.kept += [memory, pages]
            self.table[place, TableField.ROWS] = 4
            self.table[place, TableField.PAGES] = pages.data_ptr()
            self.table[place, TableField.PAGES_MAX] = 3


def compare(place_of: list[int], positions: list[int], first: int, k: int) -> None:
    """Small whole numbers, so that scores are exact and tie often: the selections are equal."""
    world, rows = World(), len(place_of)
    generator = torch.Generator().manual_seed(rows)
    query = torch.randint(-2, 3, (rows, 4, 16), generator=generator).bfloat16()
    weights = torch.randint(-2, 3, (rows, 4), generator=generator).float()
    asked = torch.tensor(place_of, dtype=torch.int32), torch.tensor(positions)
    told = [torch.full((rows, k), 99, dtype=torch.int32) for _ in range(2)]
    scores = torch.full((rows + 1, 2 * PAGE_KEYS), float("inf"))
    for group in {rows % 2, 1}:
        kernel.select_places(world.table, group, *asked, query, weights, LAYOUT, first, told[0], scores)
        reference.select_places(world.table, group, *asked, query, weights, LAYOUT, first, told[1])
        interpreted.same(f"group {group} of {place_of}", told[0], told[1])
        assert bool(scores[rows:].isinf().all()), "scores were written past the rows"


def main() -> None:
    choice.CHUNK, scoring.PROGRAMS = 1024, 6
    compare([2], [1029], 0, 32)
    compare([0, 1, 2, 3], [0, 64, 1024, 7], 0, 64)
    compare([2, 1, 2, -1, 2, 2, 0, 2], [1026, 60, 1025, 5, 1029, 1027, 0, 1023], 1, 65)
    with interpreted.programs_backwards():
        compare([1, 1], [63, 64], 1, 70)


if __name__ == "__main__":
    main()
