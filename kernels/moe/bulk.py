"""Gated MLPs of many rows, dense and routed. For appends.

Dense ones are the library's products (`kernels/linear/bulk.py`) around one activation. Routed ones sort the (row, slot) pairs by expert,
cut each expert's pairs into tiles and multiply tile by tile: gate and up together with the activation, then down, then each row's slots
are added. The host learns nothing on the way: the tile map is made on the device and the grid is the most that so many pairs can need.

Invariants:
1. Tiles follow from dtypes alone and a pair has one place in a tile that is always whole, so a routed row has the same bits in any
   company of many; a row of NaN stays alone. (Of `gated_mlp` that is not promised: its products are the library's.)
2. A row's slots are added from 0 up in float32, each product rounded; no atomics. Expert outputs are rounded to the rows' dtype before.
3. Scratch is bounded: BAND_ROWS rows at a time.

Floor at 2,048 rows and 8 of 256 experts: every expert is hit, 18 GiB of bf16 weights, 4.5 ms at 4.3 TB/s, against 1.2 TFLOP or 2.5 ms of
products at 500 TFLOP/s; an expert has 64 pairs at the mean. So a tile is 64 pairs, neighbouring tiles of one expert run side by side (tiles
are the fastest grid index) and share its weights in L2, and 24 KiB a step are in flight twice over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.bulk import linear
from kernels.linear.group_int import GroupInt
from kernels.linear.kernel import dot_exact
from kernels.linear.widen import PACKED, widened, zero_of

__all__ = ["experts", "gated_mlp"]

Weight = Tensor | BlockFp8 | GroupInt
BAND_ROWS = 4096  # 400 MiB of expert outputs at 8 slots of 6,144 bf16
_MAP_TILES = 32
_VALUES_BLOCK = 1024


@triton.jit
def _first_at_least(ascending, wanted, count, STEPS: tl.constexpr):
    """For each of `wanted`: how many of the `count` ascending values are smaller. STEPS: halvings that exhaust the count."""
    low = tl.zeros_like(wanted)
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        smaller = (low < high) & (tl.load(ascending + middle, mask=low < high, other=0) < wanted)
        high = tl.where(smaller | (low >= high), high, middle)
        low = tl.where(smaller, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _map_tiles(sorted_experts, tile_map, pairs, tiles, BLOCK: tl.constexpr, STEPS: tl.constexpr, TILE_M: tl.constexpr,
               TILES_BLOCK: tl.constexpr):  # fmt: skip
    """tile_map [tiles, 3] int32: each tile's expert (-1: no such tile), its first place in the sorted order, its pairs."""
    expert = tl.arange(0, BLOCK)
    begin = _first_at_least(sorted_experts, expert, pairs, STEPS)
    end = _first_at_least(sorted_experts, expert + 1, pairs, STEPS)
    needed = (end - begin + TILE_M - 1) // TILE_M
    last = tl.cumsum(needed)
    tile = tl.program_id(0) * TILES_BLOCK + tl.arange(0, TILES_BLOCK)
    mine = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    same = mine[:, None] == expert[None, :]
    place = tl.sum(tl.where(same, (begin - (last - needed) * TILE_M)[None, :], 0), 1) + tile * TILE_M
    left = tl.sum(tl.where(same, end[None, :], 0), 1) - place
    inside = tile < tiles
    tl.store(tile_map + tile * 3, tl.where(mine < BLOCK, mine, -1), mask=inside)
    tl.store(tile_map + tile * 3 + 1, place, mask=inside)
    tl.store(tile_map + tile * 3 + 2, tl.minimum(left, TILE_M), mask=inside)


@triton.jit
def _step(x, from_weight, from_scales, at, known, acc, FP8: tl.constexpr, EVEN: tl.constexpr):
    """One tile of the width: acc + x [M, K] · weight [N, K]^T, times its blocks' scales."""
    if EVEN:
        weight = tl.load(from_weight + at[None, :])
    else:
        weight = tl.load(from_weight + at[None, :], mask=known[None, :], other=0.0)
    if FP8:
        scale = tl.load(from_scales + tl.min(at) // 128)
        return acc + dot_exact(x, tl.trans(weight), tl.zeros_like(acc)) * scale[None, :]
    else:
        return dot_exact(x, tl.trans(weight), acc)


@triton.jit
def _grouped(x, weight, other, scales, other_scales, order, tile_map, out, x_row, w_expert, w_output, s_expert, GATED: tl.constexpr,
             SLOTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, FP8: tl.constexpr, TILE_M: tl.constexpr,
             TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """A tile of pairs by its expert's weight. GATED: rows in, activations at their sorted places out; else the way back, to [pairs]."""
    tile = tl.program_id(0)
    expert = tl.load(tile_map + tile * 3)
    if expert >= 0:
        number = tl.arange(0, TILE_M)
        real = number < tl.load(tile_map + tile * 3 + 2)
        place = tl.load(tile_map + tile * 3 + 1) + tl.where(real, number, 0)  # spare places repeat the first: nothing to mask
        pair = tl.load(order + place)
        output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        inside = output < OUTPUTS
        column = tl.where(inside, output, 0)
        from_x = x + ((pair // SLOTS if GATED else place).to(tl.int64) * x_row)[:, None]
        to_weight = expert.to(tl.int64) * w_expert + (column.to(tl.int64) * w_output)[:, None]
        to_scales = expert.to(tl.int64) * s_expert + column // 128 * ((WIDTH + 127) // 128)
        even: tl.constexpr = WIDTH % TILE_K == 0
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        up = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, WIDTH, TILE_K):
            at = start + tl.arange(0, TILE_K)
            known = at < WIDTH
            if even:
                rows = tl.load(from_x + at[None, :])
            else:
                rows = tl.load(from_x + at[None, :], mask=known[None, :], other=0.0)
            acc = _step(rows, weight + to_weight, scales + to_scales, at, known, acc, FP8, even)
            if GATED:
                up = _step(rows, other + to_weight, other_scales + to_scales, at, known, up, FP8, even)
        to_row = place
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        else:
            to_row = pair
        to_out = out + to_row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
        tl.store(to_out, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _piece(x, units, from_scales, from_zeros, group, inside, acc, PIECE: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr,
           PACKED: tl.constexpr):  # fmt: skip
    """acc + x [M, K] · a piece of units [N, K]^T, times the group's scales."""
    if ZEROS:
        code = tl.load(from_zeros + group, mask=inside, other=0).to(tl.float32)
        zero = tl.broadcast_to(zero_of(code, BITS, PACKED)[:, None], units.shape)
    else:
        zero = zero_of(tl.full(units.shape, 1 << (BITS - 1), tl.float32), BITS, PACKED)
    scale = tl.load(from_scales + group, mask=inside, other=0.0).to(tl.float32)
    return acc + dot_exact(x, tl.trans(widened(units, zero, PIECE, BITS, PACKED)), tl.zeros_like(acc)) * scale[None, :]


@triton.jit
def _integer_grouped(x, units, scales, zeros, order, tile_map, out, x_row, GATED: tl.constexpr, SLOTS: tl.constexpr,
                     EXPERT_OUTPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                     ZEROS: tl.constexpr, PACKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """As `_grouped`, by weights of integers [experts, EXPERT_OUTPUTS, WIDTH]; GATED: gate rows first, up rows behind them."""
    UNITS: tl.constexpr = 32 if GROUP == 32 else 64
    PIECES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = UNITS * PIECES
    PADDED: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK * CHUNK
    GROUPS: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    tile = tl.program_id(0)
    expert = tl.load(tile_map + tile * 3)
    if expert >= 0:
        number = tl.arange(0, TILE_M)
        real = number < tl.load(tile_map + tile * 3 + 2)
        place = tl.load(tile_map + tile * 3 + 1) + tl.where(real, number, 0)
        pair = tl.load(order + place)
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        inside = column < OUTPUTS
        output = expert.to(tl.int64) * EXPERT_OUTPUTS + tl.where(inside, column, 0)
        unit = tl.arange(0, UNITS)
        from_x = x + ((pair // SLOTS if GATED else place).to(tl.int64) * x_row)[:, None]
        from_units = units + (output * (PADDED // PIECES))[:, None]
        from_scales, from_zeros = scales + output * GROUPS, zeros + output * GROUPS
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        up = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, PADDED, CHUNK):
            packed = tl.load(from_units + start // PIECES + unit[None, :])
            more = packed
            if GATED:
                more = tl.load(from_units + OUTPUTS * (PADDED // PIECES) + start // PIECES + unit[None, :])
            for piece in tl.static_range(PIECES):
                at = start + piece * UNITS + unit
                if WIDTH == PADDED:
                    rows = tl.load(from_x + at[None, :])
                else:
                    rows = tl.load(from_x + at[None, :], mask=(at < WIDTH)[None, :], other=0.0)
                group = (start + piece * UNITS) // GROUP
                acc = _piece(rows, packed, from_scales, from_zeros, group, inside, acc, piece, BITS, ZEROS, PACKED)
                if GATED:
                    up = _piece(rows, more, from_scales, from_zeros, group + OUTPUTS * GROUPS, inside, up, piece, BITS, ZEROS, PACKED)
        to_row = place
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        else:
            to_row = pair
        to_out = out + to_row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(to_out, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _activate(gate, up, out, values, BLOCK: tl.constexpr):
    """silu(gate) * up in float32, rounded once."""
    value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = value < values
    x = tl.load(gate + value, mask=inside, other=0.0).to(tl.float32)
    activated = x / (1.0 + tl.exp(-x)) * tl.load(up + value, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + value, activated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_slots(parts, weight_of, out, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """A row's slots times their weights, added in order."""
    row = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = value < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        part = tl.load(parts + (row * SLOTS + slot) * WIDTH + value, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_of + row * SLOTS + slot)
        total += tl.where(weight == 0.0, 0.0, part * weight)  # see `pairs.py`
    tl.store(out + row * WIDTH + value, total.to(out.dtype.element_ty), mask=inside)


def gated_mlp(y: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """See the package page."""
    gates, ups = linear(y, gate), linear(y, up)
    values = gates.numel()
    _activate[(triton.cdiv(values, _VALUES_BLOCK),)](gates, ups, gates, values, BLOCK=_VALUES_BLOCK, num_warps=4)
    return linear(gates, down)


def _tile_of(wide: bool, gated: bool) -> dict[str, int]:
    """Pairs, outputs (of each half) and width of a tile: smaller where float32 takes more registers and shared memory."""
    if wide:
        return {"TILE_M": 16, "TILE_N": 32, "TILE_K": 32, "num_warps": 4, "num_stages": 2}
    return {"TILE_M": 64, "TILE_N": 64 if gated else 128, "TILE_K": 64, "num_warps": 4, "num_stages": 3}


def _integer_tile_of(wide: bool) -> dict[str, int]:
    """As `_tile_of`; the width's tile is a chunk."""
    return {"TILE_M": 16 if wide else 64, "TILE_N": 32 if wide else 64, "num_warps": 4, "num_stages": 2}


def _is_wide(x: Tensor, *weights: Weight) -> bool:
    return x.dtype == torch.float32 or any(isinstance(weight, Tensor) and weight.dtype == torch.float32 for weight in weights)


def _multiply(x: Tensor, weight: Weight, order: Tensor, tile_map: Tensor, slots: int, *, gated: bool, wide: bool) -> Tensor:
    """Every pair's product with its expert's weight [experts, outputs, width], or its activation from two of them: [pairs, outputs]."""
    outputs, width = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    out = torch.empty((order.shape[0], outputs), dtype=x.dtype, device=x.device)
    if isinstance(weight, GroupInt):
        tile = _integer_tile_of(wide)
        _integer_grouped[(tile_map.shape[0], triton.cdiv(outputs, tile["TILE_N"]))](
            x, weight.units, weight.scales, weight.scales if weight.zeros is None else weight.zeros, order, tile_map, out, x.stride(0),
            GATED=gated, SLOTS=slots, EXPERT_OUTPUTS=weight.shape[1], OUTPUTS=outputs, WIDTH=width, BITS=weight.bits, GROUP=weight.group,
            ZEROS=weight.zeros is not None, PACKED=PACKED, **tile,
        )  # fmt: skip
        return out
    values, scales = (weight.values, weight.scales) if isinstance(weight, BlockFp8) else (weight, None)
    other, other_scales = values, scales
    if gated:
        values, other = values[:, :outputs], values[:, outputs:]
        if scales is not None:
            half = outputs // FP8_BLOCK
            assert outputs % FP8_BLOCK == 0, f"a scale block would straddle gate and up at width {outputs}"
            scales, other_scales = scales[:, :half], scales[:, half:]
    tile = _tile_of(wide, gated)
    _grouped[(tile_map.shape[0], triton.cdiv(outputs, tile["TILE_N"]))](
        x, values, other, out if scales is None else scales, out if other_scales is None else other_scales, order, tile_map, out,
        x.stride(0), values.stride(0), values.stride(1), 0 if scales is None else scales.stride(0), GATED=gated, SLOTS=slots,
        OUTPUTS=outputs, WIDTH=width, FP8=scales is not None, **tile,
    )  # fmt: skip
    return out


def _band(y: Tensor, expert_of: Tensor, weight_of: Tensor, gate_up: Weight, down: Weight, out: Tensor) -> None:
    rows, slots = expert_of.shape
    pairs, count = rows * slots, gate_up.shape[0]
    wide = _is_wide(y, gate_up, down)  # of all, since one tile map serves gate, up and down
    ascending, order = torch.sort(expert_of.flatten(), stable=True)
    tile_pairs = _tile_of(wide, True)["TILE_M"]
    tiles = min(pairs, count + pairs // tile_pairs)
    tile_map = torch.empty((tiles, 3), dtype=torch.int32, device=y.device)
    _map_tiles[(triton.cdiv(tiles, _MAP_TILES),)](
        ascending, tile_map, pairs, tiles, BLOCK=triton.next_power_of_2(count), STEPS=(BAND_ROWS * slots).bit_length(),
        TILE_M=tile_pairs, TILES_BLOCK=_MAP_TILES, num_warps=4,
    )  # fmt: skip
    activated = _multiply(y, gate_up, order, tile_map, slots, gated=True, wide=wide)
    parts = _multiply(activated, down, order, tile_map, slots, gated=False, wide=wide)
    # Contraction into fused multiply-adds would not round a slot's product.
    _add_slots[(rows, triton.cdiv(y.shape[1], _VALUES_BLOCK))](
        parts, weight_of, out, WIDTH=y.shape[1], SLOTS=slots, BLOCK=_VALUES_BLOCK, num_warps=4, enable_fp_fusion=False
    )


def experts(y: Tensor, expert_of: Tensor, weight_of: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """See the package page."""
    y, weight_of = y.contiguous(), weight_of.contiguous()
    out = torch.empty_like(y)
    for start in range(0, y.shape[0], BAND_ROWS):
        band = slice(start, start + BAND_ROWS)
        _band(y[band], expert_of[band], weight_of[band], gate_up, down, out[band])
    return out


def _case(gated: bool, outputs: int, width: int, weight: str, x: str = "*bf16") -> dict[str, object]:
    types = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*fp8e4nv": torch.float8_e4m3fn}
    return {
        "x": x, "weight": weight, "other": weight, "scales": "*fp32", "other_scales": "*fp32", "order": "*i64", "tile_map": "*i32",
        "out": x, "x_row": width, "w_expert": (1 + gated) * outputs * width, "w_output": width, "s_expert": 1536, "GATED": gated,
        "SLOTS": 8, "OUTPUTS": outputs, "WIDTH": width, "FP8": weight == "*fp8e4nv",
        **_tile_of(torch.float32 in (types[x], types[weight]), gated),
    }  # fmt: skip


def _integer_case(gated: bool, outputs: int, width: int, bits: int, zeros: bool) -> dict[str, object]:
    return {
        "x": "*bf16", "units": "*i16", "scales": "*bf16", "zeros": "*u8" if zeros else "*bf16", "order": "*i64", "tile_map": "*i32",
        "out": "*bf16", "x_row": width, "GATED": gated, "SLOTS": 8, "EXPERT_OUTPUTS": (1 + gated) * outputs, "OUTPUTS": outputs,
        "WIDTH": width, "BITS": bits, "GROUP": 64, "ZEROS": zeros, "PACKED": {"cuda": True, "hip": False}, **_integer_tile_of(False),
    }  # fmt: skip


COMPILE = [
    (_integer_grouped, _integer_case(True, 2048, 6144, 4, False)),
    (_integer_grouped, _integer_case(False, 6144, 2048, 8, True)),
    (_map_tiles, {"sorted_experts": "*i64", "tile_map": "*i32", "pairs": "i32", "tiles": "i32", "BLOCK": 256, "STEPS": 16,
                  "TILE_M": 64, "TILES_BLOCK": _MAP_TILES, "num_warps": 4}),
    (_grouped, _case(True, 2048, 6144, "*bf16")),
    (_grouped, _case(False, 6144, 2048, "*bf16")),
    (_grouped, _case(True, 2048, 6144, "*fp8e4nv")),
    (_grouped, _case(False, 6144, 2048, "*fp8e4nv")),
    (_grouped, _case(True, 2048, 6144, "*bf16", "*fp32")),
    (_activate, {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "values": "i32", "BLOCK": _VALUES_BLOCK, "num_warps": 4}),
    (_add_slots, {"parts": "*bf16", "weight_of": "*fp32", "out": "*bf16", "WIDTH": 6144, "SLOTS": 8, "BLOCK": _VALUES_BLOCK,
                  "num_warps": 4}),
]  # fmt: skip
