"""Gated MLPs on a device, dense and routed, for one to some tens of rows.

A (row, slot) pair is what an expert computes. Pairs of one expert stand together in tiles of 16, so that its weights are read once for
them; an expert nobody chose is not read. A program takes the same outputs of gate and up as one tile and activates what it has; down
follows, and where a row has several slots a last launch adds them. A dense MLP is the same with one expert and every row.

Invariants:
1. As in `kernels/linear/kernel.py`: tilings follow from the weight's shape; a pair has one of 16 places in a tile that is always whole, so
   who shares its tile changes no bit.
2. Between the products values are rounded once, to the rows' dtype, after the activation.
3. The grid over tiles is the most that so many pairs can need (`pairs.py`); tiles past the last end at once.

Floor: the bytes of the distinct experts' weights once (75 MiB each for 3 x 2,048 x 6,144 bf16), and of the shared or dense weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.group_int import GroupInt
from kernels.linear.kernel import TILE_ROWS, accumulate, is_wide, launch_options, split_width_of
from kernels.linear.tiling import Tiling, gated_tiling, tiling_of
from kernels.moe import integers
from kernels.moe.integers import distance
from kernels.moe.pairs import Grouping, combined, grouped, tile_pairs

__all__ = ["experts", "gated_mlp"]

Weight = Tensor | BlockFp8 | GroupInt
Scaled = tuple[Tensor, Tensor | None]
Tilings = tuple[Tiling | None, Tiling | None]


@triton.jit
def _gate_up(x, gate, scales, tile_expert, tile_pair, activated, pairs, x_row, w_expert, w_output, s_expert, up_from_gate, up_scales,
             ROW_PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr, FP8: tl.constexpr,
             GROUPED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """activated [pairs, OUTPUTS]: silu of the gate's product times the up's, which lies `up_from_gate` values further in memory."""
    expert, pair, x_mask = tile_pairs(tile_expert, tile_pair, pairs, GROUPED, TILE_M)
    if expert >= 0:
        both = tl.arange(0, 2 * TILE_N)
        output = tl.program_id(1) * TILE_N + both % TILE_N
        half = (both // TILE_N).to(tl.int64)
        w_mask = output < OUTPUTS
        from_weight = gate + expert.to(tl.int64) * w_expert + (output.to(tl.int64) * w_output + half * up_from_gate)
        from_scales = scales + expert.to(tl.int64) * s_expert + (output // 128 * ((WIDTH + 127) // 128) + half * up_scales)
        from_x = x + (pair // ROW_PAIRS).to(tl.int64) * x_row
        acc = accumulate(from_x, 1, x_mask, from_weight, 1, w_mask, from_scales, 0, WIDTH, SPLIT_WIDTH, TILE_K, PARTS, FP8, TILE_M,
                         2 * TILE_N)  # fmt: skip
        gated, raised = tl.split(tl.permute(tl.reshape(acc, [TILE_M, 2, TILE_N]), [0, 2, 1]))
        value = gated / (1.0 + tl.exp(-gated)) * raised
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        to = activated + pair.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(to, value.to(activated.dtype.element_ty), mask=x_mask[:, None] & (column < OUTPUTS)[None, :])


@triton.jit
def _down(x, weight, scales, tile_expert, tile_pair, out, pairs, w_expert, w_output, s_expert, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
          SPLITS: tl.constexpr, SPLIT_WIDTH: tl.constexpr, FP8: tl.constexpr, GROUPED: tl.constexpr, TILE_M: tl.constexpr,
          TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """out [SPLITS, pairs, OUTPUTS]: a split of each pair's product with its expert's weight."""
    expert, pair, x_mask = tile_pairs(tile_expert, tile_pair, pairs, GROUPED, TILE_M)
    if expert >= 0:
        output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        split = tl.program_id(2)
        w_mask = output < OUTPUTS
        from_weight = weight + expert.to(tl.int64) * w_expert + output.to(tl.int64) * w_output
        from_scales = scales + expert.to(tl.int64) * s_expert + output // 128 * ((WIDTH + 127) // 128)
        from_x = x + pair.to(tl.int64) * WIDTH
        acc = accumulate(from_x, 1, x_mask, from_weight, 1, w_mask, from_scales, split * SPLIT_WIDTH, WIDTH, SPLIT_WIDTH, TILE_K, PARTS,
                         FP8, TILE_M, TILE_N)  # fmt: skip
        to = out + (split.to(tl.int64) * pairs + pair)[:, None] * OUTPUTS + output[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=x_mask[:, None] & w_mask[None, :])


def _tensors(weight: Tensor | BlockFp8) -> tuple[Tensor, Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, BlockFp8) else (weight, None)


def _tiles(tiling: Tiling, width: int) -> dict[str, int]:
    """Launch constants of a tiling."""
    return {
        "SPLIT_WIDTH": split_width_of(tiling, width), "TILE_M": TILE_ROWS, "TILE_N": tiling.outputs, "TILE_K": tiling.width,
        "PARTS": tiling.parts, **launch_options(tiling),
    }  # fmt: skip


def _activated(x: Tensor, gate: Scaled, up: Scaled, grouping: Grouping | None, slots: int, tiling: Tiling | None) -> Tensor:
    """What each pair's down product reads: [pairs, width] in x's dtype. Weights are [experts, width, hidden], of the same strides."""
    (values, scales), (up_values, up_scales) = gate, up
    outputs, width = values.shape[1:]
    assert values.stride() == up_values.stride(), f"gate has strides {values.stride()}, up {up_values.stride()}"
    pairs = x.shape[0] * slots
    how = tiling or gated_tiling(outputs, width, wide=is_wide(x.dtype, values.dtype))
    activated = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    tile_expert, tile_pair = (grouping.expert, grouping.pair) if grouping else (activated, activated)
    tiles = grouping.tiles if grouping else triton.cdiv(pairs, TILE_ROWS)
    _gate_up[(tiles, triton.cdiv(outputs, how.outputs))](
        x, values, values if scales is None else scales, tile_expert, tile_pair, activated, pairs, x.stride(0), values.stride(0),
        values.stride(1), 0 if scales is None else scales.stride(0), distance(values, up_values),
        0 if scales is None or up_scales is None else distance(scales, up_scales), ROW_PAIRS=slots, OUTPUTS=outputs, WIDTH=width,
        FP8=scales is not None, GROUPED=grouping.mode if grouping else 0, **_tiles(how, width),
    )  # fmt: skip
    return activated


def _lowered(x: Tensor, down: Scaled, grouping: Grouping | None, weight_of: Tensor | None, tiling: Tiling | None) -> Tensor:
    """Each row's slots through `down` [experts, hidden, width], weighted and added: [rows, hidden] in x's dtype, of x [pairs, width]."""
    values, scales = down
    pairs, width = x.shape
    outputs = values.shape[1]
    slots = 1 if weight_of is None else weight_of.shape[1]
    how = tiling or tiling_of(slots, outputs, width, wide=is_wide(x.dtype, values.dtype))
    out = torch.empty((pairs // slots, outputs), dtype=x.dtype, device=x.device)
    direct = how.splits == 1 and weight_of is None
    parts = out if direct else torch.empty((how.splits, pairs, outputs), dtype=torch.float32, device=x.device)
    tile_expert, tile_pair = (grouping.expert, grouping.pair) if grouping else (parts, parts)
    tiles = grouping.tiles if grouping else triton.cdiv(pairs, TILE_ROWS)
    _down[(tiles, triton.cdiv(outputs, how.outputs), how.splits)](
        x, values, values if scales is None else scales, tile_expert, tile_pair, parts, pairs, values.stride(0), values.stride(1),
        0 if scales is None else scales.stride(0), OUTPUTS=outputs, WIDTH=width, SPLITS=how.splits, FP8=scales is not None,
        GROUPED=grouping.mode if grouping else 0, **_tiles(how, width),
    )  # fmt: skip
    if not direct:
        combined(parts, weight_of, out)
    return out


def gated_mlp(y: Tensor, gate: Weight, up: Weight, down: Weight, tilings: Tilings = (None, None)) -> Tensor:
    """See the package page and `experts`."""
    if y.shape[0] == 0:
        return torch.empty_like(y)
    y = y.contiguous()
    if isinstance(gate, GroupInt):
        assert isinstance(up, GroupInt), "gate is of integers, up is not"
        activated = integers.activated(y, gate, up, None, 1, tilings[0])
    else:
        assert not isinstance(up, GroupInt), "up is of integers, gate is not"
        gates, ups = ((values[None], scales if scales is None else scales[None]) for values, scales in map(_tensors, (gate, up)))
        activated = _activated(y, gates, ups, None, 1, tilings[0])
    if isinstance(down, GroupInt):
        return integers.lowered(activated, down, None, None, tilings[1])
    values, scales = _tensors(down)
    return _lowered(activated, (values[None], scales if scales is None else scales[None]), None, None, tilings[1])


def experts(y: Tensor, expert_of: Tensor, weight_of: Tensor, gate_up: Weight, down: Weight, tilings: Tilings = (None, None)) -> Tensor:
    """See the package page. Given `tilings` (gate and up; down) are for measuring: they may change bits."""
    rows, slots = expert_of.shape
    if rows == 0:
        return torch.empty_like(y)
    y, weight_of = y.contiguous(), weight_of.contiguous()
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    both_integers = isinstance(gate_up, GroupInt) and isinstance(down, GroupInt)
    grouping = grouped(expert_of, count, integers.INTEGER_ROWS if both_integers else TILE_ROWS)
    if isinstance(gate_up, GroupInt):
        activated = integers.activated(y, gate_up, None, grouping, slots, tilings[0])
    else:
        both, both_scales = _tensors(gate_up)
        half = width // FP8_BLOCK
        assert both_scales is None or width % FP8_BLOCK == 0, f"a scale block would straddle gate and up at width {width}"
        gates = both[:, :width], None if both_scales is None else both_scales[:, :half]
        ups = both[:, width:], None if both_scales is None else both_scales[:, half:]
        activated = _activated(y, gates, ups, grouping, slots, tilings[0])
    if isinstance(down, GroupInt):
        return integers.lowered(activated, down, grouping, weight_of, tilings[1])
    return _lowered(activated, _tensors(down), grouping, weight_of, tilings[1])


def _case(outputs: int, width: int, slots: int, weight: str, gated: bool) -> dict[str, object]:
    how = gated_tiling(outputs, width, wide=False) if gated else tiling_of(slots, outputs, width, wide=False)
    tiles = {name: value for name, value in _tiles(how, width).items() if name != "num_stages"}
    return tiles | {
        "x": "*bf16", "scales": "*fp32", "tile_expert": "*i32", "tile_pair": "*i32", "pairs": "i32", "w_expert": 2 * outputs * width,
        "w_output": width, "s_expert": 1536, "OUTPUTS": outputs, "WIDTH": width, "FP8": weight == "*fp8e4nv", "GROUPED": int(slots > 1),
        "num_stages": {"cuda": how.stages, "hip": 2},
    }  # fmt: skip


def _gated_case(outputs: int, width: int, slots: int, weight: str) -> dict[str, object]:
    return _case(outputs, width, slots, weight, gated=True) | {
        "gate": weight, "activated": "*bf16", "x_row": width, "up_from_gate": outputs * width, "up_scales": 768, "ROW_PAIRS": slots,
    }  # fmt: skip


def _down_case(outputs: int, width: int, slots: int, weight: str) -> dict[str, object]:
    return _case(outputs, width, slots, weight, gated=False) | {
        "weight": weight, "out": "*fp32" if slots > 1 else "*bf16", "SPLITS": 1,
    }  # fmt: skip


COMPILE = [
    (_gate_up, _gated_case(2048, 6144, 8, "*bf16")),
    (_gate_up, _gated_case(2048, 6144, 8, "*fp8e4nv")),
    (_gate_up, _gated_case(12288, 6144, 1, "*bf16")),
    (_gate_up, _gated_case(2048, 6144, 1, "*bf16")),
    (_down, _down_case(6144, 2048, 8, "*bf16")),
    (_down, _down_case(6144, 2048, 8, "*fp8e4nv")),
    (_down, _down_case(6144, 12288, 1, "*bf16")),
]  # fmt: skip
