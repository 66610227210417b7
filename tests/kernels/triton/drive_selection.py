"""Interpreted selections of a step: rows of several sessions in any order, free places, padding, and poisoned buffers."""

import itertools
from dataclasses import replace

import company  # noqa: F401
import interpreted
import torch

from kernels.index_score import kernel as scoring
from kernels.layout import PAGE_KEYS, KeyLayout, TableField, TableLayout
from kernels.select import kernel as choice
from kernels.select.digits import ROW_COUNTS
from kernels.select.reference import select
from kernels.selection import counted, kernel, reference
from kernels.selection.scratch import Scratch, SelectionForm
from tests.kernels.score_digits import digit_counts

LAYOUT = KeyLayout("bf16", 16)
TABLE_LAYOUT = TableLayout(2)
LENGTHS = (1, 65, 1030)  # keys of each session
FORMS: tuple[SelectionForm, ...] = ("counted", "chunks")


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
    for group, form in itertools.product({rows % 2, 1} if rows < 8 else {1}, FORMS):
        scratch = poisoned(Scratch.of(rows + 1, 2 * PAGE_KEYS, torch.device("cpu"), form))
        told[0].fill_(99)
        kernel.select_places(world.table, group, *asked, query, weights, LAYOUT, first, told[0], scratch)
        reference.select_places(world.table, group, *asked, query, weights, LAYOUT, first, told[1])
        interpreted.same(f"{form}, group {group} of {place_of}", told[0], told[1])
        assert bool(scratch.scores[rows:].isinf().all()), "scores were written past the rows"


def poisoned(scratch: Scratch) -> Scratch:
    """What a selection may find in its scratch: anything, counts included, which nobody has cleared."""
    scratch.scores.fill_(float("inf"))
    for rest in (scratch.counts, scratch.candidates):
        if rest is not None:
            rest.fill_(77)
    return scratch


def choose_of(name: str, scores: torch.Tensor, lengths: list[int], first: int, k: int, chunk: int) -> None:
    """Given scores, counted here, are chosen from as the reference does; what lies past a row's end is poison."""
    rows, columns = scores.shape
    assert len(lengths) == rows, f"{len(lengths)} lengths for {rows} rows"
    last = torch.tensor(lengths)
    scratch = poisoned(replace(Scratch.of(rows, columns, torch.device("cpu"), "counted"), chunk=chunk))
    assert scratch.counts is not None
    scratch.counts.zero_()
    for row, end in enumerate(lengths):
        scratch.scores[row, first:end] = scores[row, first:end]
        scratch.counts[row, :512] = digit_counts(scores[row, first:end])
    table = torch.zeros((2, TABLE_LAYOUT.fields), dtype=torch.int64)
    table[0, TableField.ROWS] = rows
    places = torch.zeros(rows, dtype=torch.int32)
    got, wanted = torch.full((rows, k), 99, dtype=torch.int32), torch.full((rows, k), 98, dtype=torch.int32)
    counted.choose(table, places, last - 1, first, got, scratch)
    select(scores, torch.full_like(last, first), last, k, wanted)
    interpreted.same(f"{name}, first {first}, k {k}", got, wanted)


def counted_choices_equal_the_reference() -> None:
    """Ties at the cut, NaN, infinities, denormals, scores of one digit and of either end's, at every length that is an edge."""
    k, chunk, columns = 16, 32, 64
    lengths = [0, 1, k - 1, k, k + 1, chunk - 1, chunk, chunk + 1, columns - 1, columns]
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn((4, columns), generator=generator)
    any_bits = torch.randint(-(2**31), 2**31 - 1, normal.shape, generator=generator).int().view(torch.float32)
    ties = torch.randint(-2, 3, normal.shape, generator=generator).float()
    near = 1 + torch.randint(-1, 2, normal.shape, generator=generator) * 2.0**-23
    worlds = {
        "normal": normal, "any bits": any_bits, "ties": ties, "negative": -normal.abs() - 1e-3, "huge": normal * 1e30,
        "one digit": 1.0 + normal.abs() * 1e-3, "alike": torch.full_like(normal, 1.5), "zeros": torch.where(ties > 0, 0.0, -0.0),
        "tiny": normal * 1e-40, "NaN": torch.full_like(normal, torch.nan), "mostly NaN": torch.where(ties > 1, normal, torch.nan),
        "infinite": torch.where(ties > 0, torch.inf, -torch.inf),
        "edges": torch.tensor([2.0**-16, 2.0**16, 1.0, 0.0])[torch.randint(0, 4, normal.shape, generator=generator)] * near,
    }  # fmt: skip
    for number, (name, scores) in interpreted.some(enumerate(worlds.items()), 4):
        counted.LISTED = 16 if number % 3 == 0 else 128  # lists of several pieces, and of one
        choose_of(name, scores[:2], [lengths[number * 3 % len(lengths)], columns - number], 0, k, chunk)
    for number in interpreted.some(range(0, len(lengths), 4), 2):
        some = lengths[number : number + 4]
        choose_of("ties", ties[: len(some)], some, 0, k, chunk)
    for first, picks in interpreted.some(((31, 40), (33, 1), (34, columns)), 3):
        choose_of("normal", normal[:2], [columns, first + number], first, picks, chunk)
    with interpreted.programs_backwards():
        choose_of("ties backwards", ties, [columns, 63, 33, 17], 1, k, chunk)
    counted.LISTED = 512


def scores_are_counted_as_they_are_made() -> None:
    """Counts of several blocks a program, of rows that share keys and of a first position, are those of the scores left there."""
    world = World()
    place_of, positions, first = torch.tensor([2, 2, 1, -1, 2, 3], dtype=torch.int32), torch.tensor([1029, 700, 64, 3, 0, 5]), 1
    query, weights = torch.randn(6, 4, 16).bfloat16(), torch.randn(6, 4)
    scores, counts = torch.full((6, 2 * PAGE_KEYS), 5.0), torch.zeros((6, ROW_COUNTS), dtype=torch.int32)
    scoring.PROGRAMS = 8  # two a place
    scoring.score_places(world.table, 1, place_of, positions, query, weights, LAYOUT, scores, counts, first)
    for row, end in enumerate([1030, 701, 65, 0, 1, 0]):
        wanted = digit_counts(scores[row, first : max(first, end)])
        interpreted.same(f"counts of row {row}", counts[row, :512], wanted)
    assert not bool(counts[:, 512:].any()), "more than digits was counted"


def main() -> None:
    counted_choices_equal_the_reference()
    scores_are_counted_as_they_are_made()
    choice.CHUNK, scoring.PROGRAMS = 1024, 6
    compare([0, 1, 2, 3], [0, 64, 1024, 7], 0, 64)
    if interpreted.WHOLE:
        compare([2], [1029], 0, 32)
        compare([2, 1, 2, -1, 2, 2, 0, 2], [1026, 60, 1025, 5, 1029, 1027, 0, 1023], 1, 65)
    with interpreted.programs_backwards():
        compare([1, 1], [63, 64], 1, 70)


if __name__ == "__main__":
    main()
