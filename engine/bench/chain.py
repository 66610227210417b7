"""The chain in front of a full layer's attention, whole and in pieces: index query, scores, choice, and where the chosen rows lie.

Runs at a short, a middle and a long history, in each form that a device's selection has. The forms choose the same positions: the
reference's, among scores that were made apart.

Invariant: scratch, table and output are one for all calls, as in a step; keys and weights rotate, so both come from memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.bench.cases import Case, Made, Shapes, drawn, rotated
from kernels.index_query import index_query, one_launch
from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, BlockLayout, KeyLayout, RowLayout, TableField, TableLayout
from kernels.linear import linear
from kernels.locate import locate_resident
from kernels.rope import rope_frequencies, rope_table, rotate_first
from kernels.round import RoundPlan
from kernels.select import reference as select_reference
from kernels.selection import Scratch, SelectionForm, score_rows, select_places

__all__ = ["chain_cases"]

_TABLE = TableLayout(1)
_FORMS: tuple[SelectionForm, ...] = ("counted", "chunks")


@dataclass(frozen=True, slots=True)
class _World:
    """One session's step of `rows` rows over `keys` keys, behind a real table."""

    place_of: Tensor
    positions: Tensor
    rope: tuple[Tensor, Tensor]
    latent: Tensor
    head_weights: Tensor
    weights: list[Tensor]
    scratch: Scratch
    plan: RoundPlan
    layout: BlockLayout
    kept: list[Tensor]  # what the table points to
    tables: list[Tensor]  # one a store of keys
    pages: Tensor  # of the first

    def query(self, call: int, cleared: Tensor | None) -> Tensor:
        """What a step asks with."""
        weight, width = self.weights[call % len(self.weights)], self.layout.key.width
        if self.scratch.counts is not None and one_launch(self.latent, weight, width):
            return index_query(self.latent, weight, width, *self.rope, cleared)
        if cleared is not None:
            cleared.zero_()
        return rotate_first(linear(self.latent, weight).view(self.latent.shape[0], -1, width), *self.rope)

    def select(self, call: int, query: Tensor, cleared: bool) -> None:
        """Score and choose."""
        table = self.tables[call % len(self.tables)]
        select_places(
            table,
            0,
            self.place_of,
            self.positions,
            query,
            self.head_weights,
            self.layout.key,
            0,
            self.plan.selection,
            self.scratch,
            cleared,
        )

    def score(self, call: int, query: Tensor) -> None:
        """Score alone; what is counted adds up."""
        if query.device.type != "cpu":
            table, asked = self.tables[call % len(self.tables)], (query, self.head_weights)
            score_rows(table, 0, self.place_of, self.positions, *asked, self.layout.key, 0, self.scratch, True)

    def chain(self, call: int) -> None:
        """All of it."""
        query = self.query(call, self.scratch.counts)
        self.select(call, query, self.scratch.counts is not None)
        locate_resident(self.tables[call % len(self.tables)], _TABLE, self.layout, self.place_of, self.plan.selection, self.plan)

    def wrong(self) -> float:
        """Picks of one more chain that are not the reference's."""
        self.plan.selection.fill_(77)
        self.chain(0)
        pages, last = self.pages, self.positions.cpu() + 1
        scores = torch.empty((last.shape[0], pages.shape[0] * PAGE_KEYS), device=pages.device)
        index_scores(self.query(0, None), self.head_weights, pages, int(last.max()), self.layout.key, scores)
        wanted = torch.empty(self.plan.selection.shape, dtype=torch.int32)
        select_reference.select(scores.cpu(), torch.zeros_like(last), last, wanted.shape[1], wanted)
        return float((self.plan.selection.cpu() != wanted).sum())


def _world(shapes: Shapes, keys: int, columns: int, rows: int, form: SelectionForm, device: torch.device) -> _World:
    layout = BlockLayout(RowLayout("q8g64", shapes.latent, shapes.rope), KeyLayout("bf16", shapes.index_width), ((0,),))
    pages_max, outputs = -(-keys // PAGE_KEYS), shapes.index_heads * shapes.index_width
    blocks = torch.arange(1, -(-keys // BLOCK_ROWS) + 1, device=device) * layout.block_bytes  # addresses that nobody reads from
    kept, tables = [blocks], []
    for seed in rotated(shapes, keys * layout.key.key_bytes):
        stored = drawn(device, pages_max * PAGE_KEYS, shapes.index_width, seed=seed, dtype=torch.bfloat16)
        pages = stored.data_ptr() + torch.arange(pages_max, device=device) * layout.key.page_bytes
        table = torch.zeros((1, _TABLE.fields), dtype=torch.int64)
        table[0, TableField.ROWS], table[0, TableField.PAGES_MAX] = rows, pages_max
        table[0, TableField.PAGES], table[0, TableField.BLOCKS] = pages.data_ptr(), blocks.data_ptr()
        kept += [stored, pages]
        tables.append(table.to(device))
    positions = torch.arange(keys - rows, keys, device=device)
    frequencies = rope_frequencies(8e6, shapes.rope).to(device)
    weights = [
        drawn(device, outputs, shapes.query_latent, seed=seed, scale=shapes.query_latent**-0.5, dtype=shapes.dtype)
        for seed in rotated(shapes, outputs * shapes.query_latent * shapes.dtype.itemsize)
    ]
    return _World(
        torch.zeros(rows, dtype=torch.int32, device=device), positions, rope_table(positions, frequencies, shapes.dtype),
        drawn(device, rows, shapes.query_latent, seed=3, dtype=shapes.dtype), drawn(device, rows, shapes.index_heads, seed=4), weights,
        Scratch.of(rows, columns, device, form), RoundPlan.empty(rows, shapes.picks, device), layout, kept, tables, kept[2],
    )  # fmt: skip


def _calls(shapes: Shapes, world: _World, piece: str) -> list[Callable[[], object]]:
    if piece == "whole":
        return [partial(world.chain, call) for call in range(shapes.calls)]
    if piece == "asking":
        return [partial(world.query, call, world.scratch.counts) for call in range(shapes.calls)]
    query = world.query(0, None)
    if piece == "scores":
        return [partial(world.score, call, query) for call in range(shapes.calls)]
    return [partial(world.select, call, query, False) for call in range(shapes.calls)]


def _case(shapes: Shapes, keys: int, rows: int, form: SelectionForm, piece: str) -> Case:
    columns = 1 << (keys - 1).bit_length()  # as a step's bucket has them

    def make(device: torch.device) -> Made:
        world = _world(shapes, keys, columns, rows, form, device)
        return Made(tuple(_calls(shapes, world, piece)), world.wrong)

    moved = {"asking": 0, "scores": keys * 2 * shapes.index_width, "scoring": 0, "whole": 0}
    moved["asking"] = shapes.index_heads * shapes.index_width * shapes.query_latent * shapes.dtype.itemsize
    moved["scoring"] = keys * 2 * shapes.index_width
    moved["whole"] = moved["asking"] + moved["scoring"]
    return Case("chain", f"{form}, {piece}, {keys:,} keys, {rows} rows", moved[piece], 0.0, make)


def chain_cases(shapes: Shapes) -> list[Case]:
    """Each form whole at three lengths, for one row and for four; pieces at the short one."""
    lengths = sorted({min(shapes.keys, length) for length in (50_000, 131_072, shapes.keys)})
    cases = [_case(shapes, keys, rows, form, "whole") for rows in (1, 4) for keys in lengths for form in _FORMS]
    return cases + [_case(shapes, lengths[0], 1, form, piece) for piece in ("asking", "scores", "scoring") for form in _FORMS]
