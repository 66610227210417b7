"""Gated MLPs with `GroupInt` weights, for one to some tens of rows: as `kernel.py`, with the sums of `kernels/linear/integers.py`.

Invariants are theirs. A tile has INTEGER_ROWS pairs, or what the grouping has where only one of the two products is of integers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.group_int import GroupInt
from kernels.linear.integers import INTEGER_ROWS, accumulate_integers, compiled, integer_constants
from kernels.linear.tiling import Tiling, integer_tiling
from kernels.moe.pairs import Grouping, combined, tile_pairs

__all__ = ["INTEGER_ROWS", "activated", "distance", "lowered"]


@triton.jit
def _integer_gate_up(x, gate, scales, zeros, tile_expert, tile_pair, to, pairs, x_row, up_from_gate, up_scales, up_zeros,
                     ROW_PAIRS: tl.constexpr, EXPERT_OUTPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
                     SPLIT_WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
                     PACKED: tl.constexpr, GROUPED: tl.constexpr, TILE_M: tl.constexpr,
                     TILE_N: tl.constexpr):  # fmt: skip
    """to [pairs, OUTPUTS]: silu of the gate's product times the up's, which lies `up_from_gate` units further in memory."""
    CHUNK: tl.constexpr = (32 if GROUP == 32 else 64) * (16 // BITS)
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    GROUPS: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    expert, pair, x_mask = tile_pairs(tile_expert, tile_pair, pairs, GROUPED, TILE_M)
    if expert >= 0:
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        output = expert.to(tl.int64) * EXPERT_OUTPUTS + column
        from_units = gate + output * (PADDED * BITS // 16)
        from_scales, from_zeros = scales + output * GROUPS, zeros + output * GROUPS
        gated, raised = accumulate_integers(x + (pair // ROW_PAIRS).to(tl.int64) * x_row, 1, x_mask, from_units, column < OUTPUTS,
                                            from_scales, from_zeros, from_units + up_from_gate, column < OUTPUTS, from_scales + up_scales,
                                            from_zeros + up_zeros, 0, True, WIDTH, SPLIT_WIDTH, PARTS, BITS, GROUP, ZEROS, PACKED,
                                            TILE_M, TILE_N)  # fmt: skip
        value = gated / (1.0 + tl.exp(-gated)) * raised
        into = to + pair.to(tl.int64)[None, :] * OUTPUTS + column[:, None]
        tl.store(into, value.to(to.dtype.element_ty), mask=x_mask[None, :] & (column < OUTPUTS)[:, None])


@triton.jit
def _integer_down(x, units, scales, zeros, tile_expert, tile_pair, out, pairs, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
                  SPLIT_WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
                  TWIN: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr, TILE_M: tl.constexpr,
                  TILE_N: tl.constexpr):  # fmt: skip
    """out [splits, pairs, OUTPUTS]: a split of each pair's product with its expert's weight. TWIN: two tiles of outputs a program."""
    CHUNK: tl.constexpr = (32 if GROUP == 32 else 64) * (16 // BITS)
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    GROUPS: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    expert, pair, x_mask = tile_pairs(tile_expert, tile_pair, pairs, GROUPED, TILE_M)
    if expert >= 0:
        column = tl.program_id(1) * (2 * TILE_N if TWIN else TILE_N) + tl.arange(0, TILE_N)
        split = tl.program_id(2)
        further: tl.constexpr = TILE_N if TWIN else 0
        more_mask = column + further < OUTPUTS
        output = expert.to(tl.int64) * OUTPUTS + column
        from_units = units + output * (PADDED * BITS // 16)
        from_scales, from_zeros = scales + output * GROUPS, zeros + output * GROUPS
        acc, other = accumulate_integers(x + pair.to(tl.int64) * WIDTH, 1, x_mask, from_units, column < OUTPUTS, from_scales, from_zeros,
                                         from_units + further * (PADDED * BITS // 16), more_mask, from_scales + further * GROUPS,
                                         from_zeros + further * GROUPS, split * SPLIT_WIDTH, TWIN, WIDTH, SPLIT_WIDTH, PARTS, BITS, GROUP,
                                         ZEROS, PACKED, TILE_M, TILE_N)  # fmt: skip
        into = out + (split.to(tl.int64) * pairs + pair)[None, :] * OUTPUTS + column[:, None]
        tl.store(into, acc.to(out.dtype.element_ty), mask=x_mask[None, :] & (column < OUTPUTS)[:, None])
        if TWIN:
            tl.store(into + TILE_N, other.to(out.dtype.element_ty), mask=x_mask[None, :] & more_mask[:, None])


def distance(one: Tensor, other: Tensor) -> int:
    """Values from the first of `one` to the first of `other`."""
    return (other.data_ptr() - one.data_ptr()) // one.element_size()


def _how(x: Tensor, weight: GroupInt, outputs: int, tiling: Tiling | None, *, gated: bool) -> Tiling:
    wide, routed = x.dtype == torch.float32, weight.units.dim() == 3
    return tiling or integer_tiling(outputs, weight.width, weight.bits, weight.group, wide=wide, gated=gated, routed=routed)


def _constants(x: Tensor, weight: GroupInt, how: Tiling, grouping: Grouping | None) -> dict[str, int | bool]:
    constants = integer_constants(weight, how) | {"GROUPED": grouping.mode if grouping else 0}
    return constants | ({"TILE_M": grouping.tile_rows} if grouping else {})


def activated(x: Tensor, gate: GroupInt, up: GroupInt | None, grouping: Grouping | None, slots: int, tiling: Tiling | None) -> Tensor:
    """What each pair's down product reads: [pairs, width] in x's dtype, of x [rows, hidden].

    Args: gate: [width, hidden]; or with `grouping` and without `up` [experts, 2 * width, hidden], gate rows first.
    """
    outputs = gate.shape[-2] if up is not None else gate.shape[-2] // 2
    if up is None:
        further = outputs * gate.units.shape[-1], outputs * gate.scales.shape[-1], outputs * gate.scales.shape[-1]
    else:
        assert gate.alike(up), "gate and up are of other forms"
        zeros = 0 if gate.zeros is None or up.zeros is None else distance(gate.zeros, up.zeros)
        further = distance(gate.units, up.units), distance(gate.scales, up.scales), zeros
    how, pairs = _how(x, gate, outputs, tiling, gated=True), x.shape[0] * slots
    to = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    tile_expert, tile_pair = (grouping.expert, grouping.pair) if grouping else (to, to)
    tiles = grouping.tiles if grouping else triton.cdiv(pairs, INTEGER_ROWS)
    _integer_gate_up[(tiles, triton.cdiv(outputs, how.outputs))](
        x, gate.units, gate.scales, gate.scales if gate.zeros is None else gate.zeros, tile_expert, tile_pair, to, pairs, x.stride(0),
        *further, ROW_PAIRS=slots, EXPERT_OUTPUTS=gate.shape[-2], OUTPUTS=outputs, WIDTH=gate.width, **_constants(x, gate, how, grouping),
    )  # fmt: skip
    return to


def lowered(x: Tensor, down: GroupInt, grouping: Grouping | None, weight_of: Tensor | None, tiling: Tiling | None) -> Tensor:
    """Each row's slots through `down` [(experts,) hidden, width], weighted and added: [rows, hidden] in x's dtype, of x [pairs, width]."""
    pairs = x.shape[0]
    outputs = down.shape[-2]
    slots = 1 if weight_of is None else weight_of.shape[1]
    how = _how(x, down, outputs, tiling, gated=False)
    out = torch.empty((pairs // slots, outputs), dtype=x.dtype, device=x.device)
    direct = how.splits == 1 and weight_of is None
    parts = out if direct else torch.empty((how.splits, pairs, outputs), dtype=torch.float32, device=x.device)
    tile_expert, tile_pair = (grouping.expert, grouping.pair) if grouping else (parts, parts)
    tiles = grouping.tiles if grouping else triton.cdiv(pairs, INTEGER_ROWS)
    _integer_down[(tiles, triton.cdiv(outputs, how.tile_outputs), how.splits)](
        x, down.units, down.scales, down.scales if down.zeros is None else down.zeros, tile_expert, tile_pair, parts, pairs,
        OUTPUTS=outputs, WIDTH=down.width, TWIN=how.twin, **_constants(x, down, how, grouping),
    )  # fmt: skip
    if not direct:
        combined(parts, weight_of, out)
    return out


def _case(weight: tuple[int, int, int, int, bool], how: Tiling, mode: int) -> dict[str, object]:
    pairs = "*i64" if mode == 2 else "*i32"
    return compiled(weight, how, "*bf16") | {"x": "*bf16", "tile_expert": pairs, "tile_pair": pairs, "pairs": "i32", "GROUPED": mode}


def _gated_case(outputs: int, width: int, bits: int, group: int, zeros: bool, mode: int) -> dict[str, object]:
    how = integer_tiling(outputs, width, bits, group, wide=False, gated=True, routed=mode > 0)
    return _case((outputs, width, bits, group, zeros), how, mode) | {
        "gate": "*i16", "to": "*bf16", "x_row": width, "up_from_gate": outputs * width * bits // 16,
        "up_scales": outputs * width // group, "up_zeros": outputs * width // group,
        "ROW_PAIRS": 8 if mode else 1, "EXPERT_OUTPUTS": (2 if mode else 1) * outputs,
    }  # fmt: skip


def _down_case(outputs: int, width: int, bits: int, group: int, zeros: bool, mode: int) -> dict[str, object]:
    how = integer_tiling(outputs, width, bits, group, wide=False, routed=mode > 0)
    return _case((outputs, width, bits, group, zeros), how, mode) | {
        "units": "*i16", "out": "*fp32" if mode or how.splits > 1 else "*bf16", "TWIN": how.twin,
    }  # fmt: skip


COMPILE = [
    (_integer_gate_up, _gated_case(2048, 6144, 4, 64, False, 1)),
    (_integer_gate_up, _gated_case(2048, 6144, 4, 64, False, 2)),
    (_integer_gate_up, _gated_case(2048, 6144, 8, 64, True, 0)),
    (_integer_down, _down_case(6144, 2048, 4, 64, False, 1)),
    (_integer_down, _down_case(6144, 2048, 4, 128, True, 2)),
    (_integer_down, _down_case(6144, 12288, 8, 64, False, 0)),
]
