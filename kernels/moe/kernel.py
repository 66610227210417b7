"""Gated MLPs on a device, dense and routed, for one to some tens of rows.

A (row, slot) pair is what an expert computes. Pairs of one expert stand together in tiles of 16, so that its weights are read once for
them; an expert nobody chose is not read. Gate and up are one launch over two weights, a second adds splits and activates; down likewise,
and the last launch adds a row's slots. A dense MLP is the same with one expert and every row.

Invariants:
1. As in `kernels/linear/kernel.py`: tiles and splits follow from the weight's shape and the slots a row has; a pair has one of 16 places in
   a tile that is always whole, so who shares its tile changes no bit.
2. A row's slots are added from 0 up in float32, each product rounded; no atomics.
3. Between the products values are rounded once, to the rows' dtype, after the activation.
4. The grid over tiles is the most that so many pairs can need; tiles past the last are marked -1 on the device and end at once.

Floor: the bytes of the distinct experts' weights once (75 MiB each for 3 x 2,048 x 6,144 bf16), and of the shared or dense weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.kernel import STAGES, TILE_ROWS, accumulate, splits_of, tile_of

__all__ = ["experts", "gated_mlp"]

Weight = Tensor | BlockFp8
_PAIRS_BLOCK = 64
_VALUES_BLOCK = 1024


@triton.jit
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
    known = pair < pairs
    tl.store(tile_pair + tile * TILE_M + rank % TILE_M, pair, mask=known)
    tl.store(tile_expert + tile * 2, mine, mask=known & (rank % TILE_M == 0))
    tl.store(tile_expert + tile * 2 + 1, tl.minimum(count - rank, TILE_M), mask=known & (rank % TILE_M == 0))
    if tl.program_id(0) == 0:
        used = tl.sum(needed)
        for start in range(0, tiles, BLOCK):
            spare = start + tl.arange(0, BLOCK)
            tl.store(tile_expert + spare * 2, tl.full([BLOCK], -1, tl.int32), mask=(spare >= used) & (spare < tiles))


@triton.jit
def _products(x, weight, other, scales, other_scales, tile_expert, tile_pair, parts, pairs, x_row, w_expert, w_output, s_expert,
              ROW_PAIRS: tl.constexpr, HALVES: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr,
              FP8: tl.constexpr, GROUPED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """parts [splits, pairs, HALVES, OUTPUTS]: a split of each pair's product with its expert's `weight` (half 0) and `other` (half 1)."""
    tile = tl.program_id(0)
    columns: tl.constexpr = (OUTPUTS + TILE_N - 1) // TILE_N
    half = tl.program_id(1) // columns
    output = tl.program_id(1) % columns * TILE_N + tl.arange(0, TILE_N)
    split = tl.program_id(2)
    place = tl.arange(0, TILE_M)
    expert = tile * 0
    if GROUPED:
        expert = tl.load(tile_expert + tile * 2)
    if expert >= 0:
        pair = tile * TILE_M + place
        x_mask = pair < pairs
        if GROUPED:
            x_mask = place < tl.load(tile_expert + tile * 2 + 1)
            pair = tl.load(tile_pair + tile * TILE_M + place, mask=x_mask, other=0)
        from_weight, from_scales = weight, scales
        if half == 1:
            from_weight, from_scales = other, other_scales
        w_mask = output < OUTPUTS
        from_weight += expert.to(tl.int64) * w_expert + (output.to(tl.int64) * w_output)[:, None]
        from_scales += expert.to(tl.int64) * s_expert + output // 128 * ((WIDTH + 127) // 128)
        from_x = x + ((pair // ROW_PAIRS).to(tl.int64) * x_row)[:, None]
        acc = accumulate(from_x, 1, x_mask, from_weight, 1, w_mask, from_scales, split * SPLIT_WIDTH, WIDTH, SPLIT_WIDTH, TILE_K, FP8,
                         TILE_M, TILE_N)  # fmt: skip
        to_parts = parts + ((split.to(tl.int64) * pairs + pair[:, None]) * HALVES + half) * OUTPUTS + output[None, :]
        tl.store(to_parts, acc, mask=x_mask[:, None] & w_mask[None, :])


@triton.jit
def _activate(parts, out, pairs, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """silu of the gate half times the up half, after the sum over splits."""
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(1).to(tl.int64)
    inside = value < WIDTH
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        from_parts = parts + (split * pairs + pair) * 2 * WIDTH + value
        gate += tl.load(from_parts, mask=inside, other=0.0)
        up += tl.load(from_parts + WIDTH, mask=inside, other=0.0)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + pair * WIDTH + value, activated.to(out.dtype.element_ty), mask=inside)


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
        total += part * tl.load(weight_of + pair) if WEIGHTED else part
    tl.store(out + row * WIDTH + value, total.to(out.dtype.element_ty), mask=inside)


def _tensors(weight: Weight) -> tuple[Tensor, Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, BlockFp8) else (weight, None)


def _multiply(
    x: Tensor, weights: list[tuple[Tensor, Tensor | None]], grouping: tuple[Tensor, Tensor] | None, pairs: int, row_pairs: int, slots: int
) -> Tensor:
    """Each pair's products with its expert's one or two weights [experts, outputs, width]: [splits, pairs, len(weights), outputs] f32."""
    (weight, scales), (other, other_scales) = weights[0], weights[-1]
    outputs, width = weight.shape[1:]
    tile_outputs, tile_width = tile_of(x.dtype, weight.dtype)
    columns = len(weights) * triton.cdiv(outputs, tile_outputs)
    splits = splits_of(columns * slots, width, tile_width)
    parts = torch.empty((splits, pairs, len(weights), outputs), dtype=torch.float32, device=x.device)
    tile_expert, tile_pair = grouping or (parts, parts)
    tiles = tile_expert.shape[0] if grouping else triton.cdiv(pairs, TILE_ROWS)
    _products[(tiles, columns, splits)](
        x, weight, other, parts if scales is None else scales, parts if other_scales is None else other_scales, tile_expert, tile_pair,
        parts, pairs, x.stride(0), weight.stride(0), weight.stride(1), 0 if scales is None else scales.stride(0), ROW_PAIRS=row_pairs,
        HALVES=len(weights), OUTPUTS=outputs, WIDTH=width, SPLIT_WIDTH=triton.cdiv(width, tile_width) // splits * tile_width,
        FP8=scales is not None, GROUPED=grouping is not None, TILE_M=TILE_ROWS, TILE_N=tile_outputs, TILE_K=tile_width, num_warps=4,
        num_stages=STAGES,
    )  # fmt: skip
    return parts


def _feed(
    y: Tensor, both: list[tuple[Tensor, Tensor | None]], down: tuple[Tensor, Tensor | None], grouping: tuple[Tensor, Tensor] | None,
    weight_of: Tensor | None, slots: int,
) -> Tensor:  # fmt: skip
    """The MLP of every pair, then the sum over each row's slots."""
    rows, hidden = y.shape
    pairs, width = rows * slots, down[0].shape[2]
    parts = _multiply(y, both, grouping, pairs, slots, slots)
    activated = torch.empty((pairs, width), dtype=y.dtype, device=y.device)
    _activate[(triton.cdiv(width, _VALUES_BLOCK), pairs)](
        parts, activated, pairs, WIDTH=width, SPLITS=parts.shape[0], BLOCK=_VALUES_BLOCK, num_warps=4
    )
    parts = _multiply(activated, [down], grouping, pairs, 1, slots)
    out = torch.empty((rows, hidden), dtype=y.dtype, device=y.device)
    # Contraction into fused multiply-adds would not round a slot's product.
    _combine[(triton.cdiv(hidden, _VALUES_BLOCK), rows)](
        parts, parts if weight_of is None else weight_of, out, pairs, WIDTH=hidden, SLOTS=slots, SPLITS=parts.shape[0],
        WEIGHTED=weight_of is not None, BLOCK=_VALUES_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gated_mlp(y: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """See the package page."""
    if y.shape[0] == 0:
        return torch.empty_like(y)
    gates, ups, downs = ((values[None], scales if scales is None else scales[None]) for values, scales in map(_tensors, (gate, up, down)))
    return _feed(y.contiguous(), [gates, ups], downs, None, None, 1)


def experts(y: Tensor, expert_of: Tensor, weight_of: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """See the package page."""
    rows, slots = expert_of.shape
    if rows == 0:
        return torch.empty_like(y)
    (both, both_scales), downs = _tensors(gate_up), _tensors(down)
    count, width = both.shape[0], both.shape[1] // 2
    pairs = rows * slots
    tiles = min(pairs, count + pairs // TILE_ROWS)
    tile_expert = torch.empty((tiles, 2), dtype=torch.int32, device=y.device)
    tile_pair = torch.empty((tiles, TILE_ROWS), dtype=torch.int32, device=y.device)
    _group[(triton.cdiv(pairs, _PAIRS_BLOCK),)](
        expert_of.contiguous(), tile_expert, tile_pair, pairs, tiles, EXPERTS_BLOCK=triton.next_power_of_2(count), BLOCK=_PAIRS_BLOCK,
        TILE_M=TILE_ROWS, num_warps=8,
    )  # fmt: skip
    half = width // FP8_BLOCK
    assert both_scales is None or width % FP8_BLOCK == 0, f"a scale block would straddle gate and up at width {width}"
    gates = both[:, :width], None if both_scales is None else both_scales[:, :half]
    ups = both[:, width:], None if both_scales is None else both_scales[:, half:]
    return _feed(y.contiguous(), [gates, ups], downs, (tile_expert, tile_pair), weight_of.contiguous(), slots)


def _case(halves: int, outputs: int, width: int, slots: int, weight: str) -> dict[str, object]:
    tile_outputs, tile_width = tile_of(torch.bfloat16, torch.bfloat16)
    splits = splits_of(halves * triton.cdiv(outputs, tile_outputs) * slots, width, tile_width)
    return {
        "x": "*bf16", "weight": weight, "other": weight, "scales": "*fp32", "other_scales": "*fp32", "tile_expert": "*i32",
        "tile_pair": "*i32", "parts": "*fp32", "pairs": "i32", "x_row": width, "w_expert": halves * outputs * width, "w_output": width,
        "s_expert": 1536, "ROW_PAIRS": slots, "HALVES": halves, "OUTPUTS": outputs, "WIDTH": width,
        "SPLIT_WIDTH": triton.cdiv(width, tile_width) // splits * tile_width, "FP8": weight == "*fp8e4nv", "GROUPED": slots > 1,
        "TILE_M": TILE_ROWS, "TILE_N": tile_outputs, "TILE_K": tile_width, "num_warps": 4, "num_stages": STAGES,
    }  # fmt: skip


COMPILE = [
    (_group, {"expert_of": "*i64", "tile_expert": "*i32", "tile_pair": "*i32", "pairs": "i32", "tiles": "i32", "EXPERTS_BLOCK": 256,
              "BLOCK": _PAIRS_BLOCK, "TILE_M": TILE_ROWS, "num_warps": 8}),
    (_products, _case(2, 2048, 6144, 8, "*bf16")),
    (_products, _case(1, 6144, 2048, 8, "*fp8e4nv")),
    (_products, _case(2, 12288, 6144, 1, "*bf16")),
    (_activate, {"parts": "*fp32", "out": "*bf16", "pairs": "i32", "WIDTH": 2048, "SPLITS": 1, "BLOCK": _VALUES_BLOCK, "num_warps": 4}),
    (_combine, {"parts": "*fp32", "weight_of": "*fp32", "out": "*bf16", "pairs": "i32", "WIDTH": 6144, "SLOTS": 8, "SPLITS": 1,
                "WEIGHTED": True, "BLOCK": _VALUES_BLOCK, "num_warps": 4}),
]  # fmt: skip
