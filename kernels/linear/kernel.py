"""Products of few rows with weights, at the speed at which the weights can be read.

A program multiplies 16 rows by a tile of the weight over a part (a split) of the width; a second launch adds the splits. Both `linear`
(one head) and `heads_linear` are this one kernel.

Invariants:
1. Tile shapes, splits and instructions follow from the weight's shape alone; a row takes one of 16 places in a tile that is always whole.
2. A row's result is the sum of its splits in ascending order; within a split, of tiles of 128 in ascending order. No atomics.
3. Products are exact: bf16 x bf16 in the matrix units; a float32 row is three bf16 terms (high, middle, low) against bf16 and FP8 weights;
   float32 weights use float32 multiplication. Sums are float32. FP8 scales are applied a block of 128 of the width, outside the product.

Floor: the weight's bytes once. A tile of 64 x 128 bf16 is 16 KiB, loaded 16 bytes a thread, two or three in flight a program, so that
132 multiprocessors with two programs each have 8 MiB under way. PROGRAMS is a target for heads * tiles * splits. Rows beyond 16 read
the weight again, from L2: the tile of rows is the fastest grid index.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8

__all__ = ["TILE_ROWS", "accumulate", "dot_exact", "heads_linear", "linear", "splits_of", "tile_of"]

TILE_ROWS = 16  # the least that matrix units take
TILE_WIDTH = 128  # one scale block
PROGRAMS = 528  # four a multiprocessor of the largest card in mind
STAGES = 3
_BAND_ROWS = 256  # rows a launch, so that the partial sums of an append stay small
_SUM_BLOCK = 1024
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # the interpreter multiplies bf16 as integers


@triton.jit
def _dot_bf16(x, weight, acc):
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(x, weight, acc)


@triton.jit
def dot_exact(x, weight, acc):
    """`acc + x · weight` for x [M, K] bf16 or f32, weight [K, N] bf16, f32 or e4m3, acc [M, N] f32; every product exact."""
    if weight.dtype == tl.float32:
        return tl.dot(x.to(tl.float32), weight, acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        narrow = weight.to(tl.float32).to(tl.bfloat16) if weight.dtype != tl.bfloat16 else weight
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot_bf16(high, narrow, _dot_bf16(middle, narrow, _dot_bf16(low, narrow, acc)))
    else:
        narrow = weight.to(tl.float32).to(tl.bfloat16) if weight.dtype != tl.bfloat16 else weight
        return _dot_bf16(x, narrow, acc)


@triton.jit
def accumulate(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, first, WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr,
               TILE_WIDTH: tl.constexpr, FP8: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """Sum over `first .. first + SPLIT_WIDTH` of rows at `from_x` [M, 1] by outputs at `from_weight` [N, 1] (scales at [N])."""
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, SPLIT_WIDTH, TILE_WIDTH):
        value = first + start + tl.arange(0, TILE_WIDTH)
        known = value[None, :] < WIDTH
        x = tl.load(from_x + value[None, :] * x_value, mask=x_mask[:, None] & known, other=0.0)
        weight = tl.load(from_weight + value[None, :] * w_value, mask=w_mask[:, None] & known, other=0.0)
        if FP8:
            scale = tl.load(from_scales + (first + start) // 128, mask=w_mask, other=0.0)
            acc += dot_exact(x, tl.trans(weight), tl.zeros([TILE_M, TILE_N], tl.float32)) * scale[None, :]
        else:
            acc = dot_exact(x, tl.trans(weight), acc)
    return acc


@triton.jit
def _product(x, weight, scales, out, rows, x_row, x_head, x_value, w_head, w_output, w_value, HEADS: tl.constexpr, OUTPUTS: tl.constexpr,
             WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr, FP8: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
             TILE_K: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    tiles: tl.constexpr = (OUTPUTS + TILE_N - 1) // TILE_N
    head = (tl.program_id(1) // tiles).to(tl.int64)
    output = tl.program_id(1) % tiles * TILE_N + tl.arange(0, TILE_N)
    split = tl.program_id(2)
    x_mask, w_mask = row < rows, output < OUTPUTS
    from_x = x + head * x_head + (row.to(tl.int64) * x_row)[:, None]
    from_weight = weight + head * w_head + (output.to(tl.int64) * w_output)[:, None]
    scale_columns: tl.constexpr = (WIDTH + 127) // 128
    from_scales = scales + head * ((OUTPUTS + 127) // 128 * scale_columns) + output // 128 * scale_columns
    acc = accumulate(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, split * SPLIT_WIDTH, WIDTH, SPLIT_WIDTH, TILE_K,
                     FP8, TILE_M, TILE_N)  # fmt: skip
    to_out = out + ((split.to(tl.int64) * rows + row[:, None]) * HEADS + head) * OUTPUTS + output[None, :]
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=x_mask[:, None] & w_mask[None, :])


@triton.jit
def _add_splits(parts, out, values, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = value < values
    total = tl.load(parts + value, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * values + value, mask=inside, other=0.0)
    tl.store(out + value, total.to(out.dtype.element_ty), mask=inside)


def tile_of(x: torch.dtype, weight: torch.dtype) -> tuple[int, int]:
    """Outputs and width of a tile: smaller where float32 takes more registers and shared memory."""
    return (32, TILE_WIDTH // 2) if torch.float32 in (x, weight) else (64, TILE_WIDTH)


def splits_of(tiles: int, width: int, tile_width: int) -> int:
    """Parts of the width that different programs sum: the largest divisor of its tiles that keeps two tiles a part and PROGRAMS in all."""
    steps = triton.cdiv(width, tile_width)
    most = min(max(1, PROGRAMS // tiles), max(1, steps // 2))
    return max(splits for splits in range(1, most + 1) if steps % splits == 0)


def _heads_product(x: Tensor, weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [rows, heads, width] by weight [heads, outputs, width], any strides: [rows, heads, outputs] in `dtype`."""
    rows, heads, width = x.shape
    outputs = weight.shape[1]
    out = torch.empty((rows, heads, outputs), dtype=dtype, device=x.device)
    tile_outputs, tile_width = tile_of(x.dtype, weight.dtype)
    tiles = heads * triton.cdiv(outputs, tile_outputs)
    splits = splits_of(tiles, width, tile_width)
    steps = triton.cdiv(width, tile_width)
    for start in range(0, rows, _BAND_ROWS):
        band, to = x[start : start + _BAND_ROWS], out[start : start + _BAND_ROWS]
        count = band.shape[0]
        parts = to if splits == 1 else torch.empty((splits, *to.shape), dtype=torch.float32, device=x.device)
        _product[(triton.cdiv(count, TILE_ROWS), tiles, splits)](
            band, weight, scales if scales is not None else weight, parts, count, *band.stride(), *weight.stride(),
            HEADS=heads, OUTPUTS=outputs, WIDTH=width, SPLIT_WIDTH=steps // splits * tile_width, FP8=scales is not None,
            TILE_M=TILE_ROWS, TILE_N=tile_outputs, TILE_K=tile_width, num_warps=4, num_stages=STAGES,
        )  # fmt: skip
        if splits > 1:
            values = to.numel()
            _add_splits[(triton.cdiv(values, _SUM_BLOCK),)](parts, to, values, SPLITS=splits, BLOCK=_SUM_BLOCK, num_warps=4)
    return out


def linear(x: Tensor, weight: Tensor | BlockFp8, dtype: torch.dtype | None = None) -> Tensor:
    """See the package page; the result is `dtype`, or x's."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, BlockFp8) else (weight, None)
    return _heads_product(x[:, None], values[None], scales, dtype or x.dtype)[:, 0]


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the package page."""
    return _heads_product(x, weight, None, x.dtype)


assert TILE_WIDTH == FP8_BLOCK, "a step over the width is one scale block"


def _case(heads: int, outputs: int, width: int, x: str = "*bf16", weight: str = "*bf16") -> dict[str, object]:
    types = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*fp8e4nv": torch.float8_e4m3fn}
    tile_outputs, tile_width = tile_of(types[x], types[weight])
    splits = splits_of(heads * triton.cdiv(outputs, tile_outputs), width, tile_width)
    return {
        "x": x, "weight": weight, "scales": "*fp32", "out": x if splits == 1 else "*fp32", "rows": "i32", "x_row": heads * width,
        "x_head": width, "x_value": 1, "w_head": outputs * width, "w_output": width, "w_value": 1, "HEADS": heads, "OUTPUTS": outputs,
        "WIDTH": width, "SPLIT_WIDTH": triton.cdiv(width, tile_width) // splits * tile_width, "FP8": weight == "*fp8e4nv",
        "TILE_M": TILE_ROWS, "TILE_N": tile_outputs, "TILE_K": tile_width, "num_warps": 4, "num_stages": STAGES,
    }  # fmt: skip


COMPILE = [
    (_product, _case(1, 6144, 16384)),
    (_product, _case(64, 512, 192)),
    (_product, _case(1, 2048, 6144, x="*fp32")),
    (_product, _case(1, 6144, 16384, weight="*fp8e4nv")),
    (_product, _case(1, 256, 6144, x="*fp32", weight="*fp32")),
    (_add_splits, {"parts": "*fp32", "out": "*bf16", "values": "i32", "SPLITS": 4, "BLOCK": _SUM_BLOCK, "num_warps": 4}),
]
