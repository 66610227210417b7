"""Which (row, slot) pairs stand together in a tile, and the sum over a row's slots. Knows no weight.

1. Tiles are of one expert each, experts ascending, an expert's pairs in their order; tiles past the last are marked -1 on the device.
2. One row's slots have distinct experts, so a tile each, and nothing has to be sorted: a launch less.
3. A row's slots are added from 0 up in float32, each product rounded; no atomics.
4. A pair of expert -1 is in no tile, and nothing is read of what it would have given: its weight is 0.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Grouping", "combined", "grouped", "tile_pairs"]

_PAIRS_BLOCK = 64
_VALUES_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Grouping:
    """Tiles of pairs.

    `mode` 1: `expert` [tiles, 2] int32 (expert and pairs), `pair` [tiles, tile rows] int32; 2: both the experts [tiles] int64 of one row.
    """

    expert: Tensor
    pair: Tensor
    mode: int
    tile_rows: int

    @property
    def tiles(self) -> int:
        """The most that so many pairs can need."""
        return self.expert.shape[0]


@triton.jit(do_not_specialize=["tiles"])
def _group(expert_of, tile_expert, tile_pair, pairs, tiles, EXPERTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr):
    """Give every pair its place: tiles of one expert each, experts ascending, an expert's pairs in their order."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(expert_of + pair, mask=pair < pairs, other=-1).to(tl.int32)
    expert = tl.arange(0, EXPERTS_BLOCK)
    counts = tl.zeros([EXPERTS_BLOCK], tl.int32)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(expert_of + other, mask=other < pairs, other=-1).to(tl.int32)
        counts += tl.sum((theirs[:, None] == expert[None, :]).to(tl.int32), 0)
        rank += tl.sum(((theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    needed = (counts + TILE_M - 1) // TILE_M
    first_of = tl.cumsum(needed) - needed
    same = mine[:, None] == expert[None, :]
    first = tl.sum(tl.where(same, first_of[None, :], 0), 1)
    count = tl.sum(tl.where(same, counts[None, :], 0), 1)
    tile = first + rank // TILE_M
    known = (pair < pairs) & (mine >= 0)
    tl.store(tile_pair + tile * TILE_M + rank % TILE_M, pair, mask=known)
    tl.store(tile_expert + tile * 2, mine, mask=known & (rank % TILE_M == 0))
    tl.store(tile_expert + tile * 2 + 1, tl.minimum(count - rank, TILE_M), mask=known & (rank % TILE_M == 0))
    if tl.program_id(0) == 0:
        used = tl.sum(needed)
        for start in range(0, tiles, BLOCK):
            spare = start + tl.arange(0, BLOCK)
            tl.store(tile_expert + spare * 2, tl.full([BLOCK], -1, tl.int32), mask=(spare >= used) & (spare < tiles))


@triton.jit
def tile_pairs(tile_expert, tile_pair, pairs, GROUPED: tl.constexpr, TILE_M: tl.constexpr):
    """A tile's expert (below 0: no tile), its pairs, and which of its places have one.

    GROUPED: as `Grouping.mode`.
    """
    tile = tl.program_id(0)
    place = tl.arange(0, TILE_M)
    expert, pair = tile * 0, tile * TILE_M + place
    known = pair < pairs
    if GROUPED == 2:
        expert = tl.load(tile_expert + tile).to(tl.int32)
        pair = tile + place * 0
        known = place == 0
    elif GROUPED == 1:
        expert = tl.load(tile_expert + tile * 2)
        known = (place < tl.load(tile_expert + tile * 2 + 1)) & (expert >= 0)
        pair = tl.load(tile_pair + tile * TILE_M + place, mask=known, other=0)
    return expert, pair, known


@triton.jit
def _combine(parts, weight_of, out, pairs, WIDTH: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, WEIGHTED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """A row's slots times their weights, added in order."""
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = value < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = row * SLOTS + slot
        part = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            part += tl.load(parts + (split * pairs + pair) * WIDTH + value, mask=inside, other=0.0)
        if WEIGHTED:
            weight = tl.load(weight_of + pair)
            total += tl.where(weight == 0.0, 0.0, part * weight)  # nobody wrote the part of an expert that is not here
        else:
            total += part
    tl.store(out + row * WIDTH + value, total.to(out.dtype.element_ty), mask=inside)


def grouped(expert_of: Tensor, count: int, tile_rows: int) -> Grouping:
    """Tiles of the pairs of `expert_of` [rows, slots] int64 among `count` experts; rows >= 1."""
    rows, slots = expert_of.shape
    if rows == 1:
        experts = expert_of.flatten()
        return Grouping(experts, experts, 2, tile_rows)
    pairs = rows * slots
    tiles = min(pairs, count + pairs // tile_rows)
    tile_expert = torch.empty((tiles, 2), dtype=torch.int32, device=expert_of.device)
    tile_pair = torch.empty((tiles, tile_rows), dtype=torch.int32, device=expert_of.device)
    _group[(triton.cdiv(pairs, _PAIRS_BLOCK),)](
        expert_of.contiguous(), tile_expert, tile_pair, pairs, tiles, EXPERTS_BLOCK=triton.next_power_of_2(count), BLOCK=_PAIRS_BLOCK,
        TILE_M=tile_rows, num_warps=8,
    )  # fmt: skip
    return Grouping(tile_expert, tile_pair, 1, tile_rows)


def combined(parts: Tensor, weight_of: Tensor | None, out: Tensor) -> None:
    """Add splits and slots: parts [splits, pairs, width] f32, weight_of [rows, slots] f32 (None: one slot of 1), out [rows, width]."""
    splits, pairs, width = parts.shape
    slots = 1 if weight_of is None else weight_of.shape[1]
    _combine[(triton.cdiv(width, _VALUES_BLOCK), pairs // slots)](  # contraction into fused multiply-adds would not round a slot's product
        parts, parts if weight_of is None else weight_of, out, pairs, WIDTH=width, SLOTS=slots, SPLITS=splits,
        WEIGHTED=weight_of is not None, BLOCK=_VALUES_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


COMPILE = [
    (_group, {"expert_of": "*i64", "tile_expert": "*i32", "tile_pair": "*i32", "pairs": "i32", "tiles": "i32", "EXPERTS_BLOCK": 256,
              "BLOCK": _PAIRS_BLOCK, "TILE_M": 16, "num_warps": 8}),
    (_combine, {"parts": "*fp32", "weight_of": "*fp32", "out": "*bf16", "pairs": "i32", "WIDTH": 6144, "SLOTS": 8, "SPLITS": 1,
                "WEIGHTED": True, "BLOCK": _VALUES_BLOCK, "num_warps": 4}),
]  # fmt: skip
