"""Products of few rows with weights, at the speed at which the weights can be read.

A program multiplies 16 rows by a tile of the weight. Both `linear` (one head) and `heads_linear` are this one kernel.

Invariants:
1. Tilings (`tiling.py`) follow from the weight's shape alone; a row takes one of 16 places in a tile that is always whole.
2. A step of the width is read in parts; each part's products are summed over the steps in ascending order, then the parts in one sum of a
   fixed shape. Splits, where a tiling has some, are added in ascending order by a second launch. No atomics.
3. Products are exact: bf16 x bf16 in the matrix units; a float32 row is three bf16 terms (high, middle, low) against bf16 and FP8 weights,
   a float32 weight is three under bf16 rows; float32 by float32 is multiplied as such. Sums are float32. FP8 scales are applied a block of
   128 of the width, outside the product.

Floor: the weight's bytes once. 132 multiprocessors need some 6 MiB under way to fill the memory: a step is 8 to 32 KiB of weights, several
steps are under way in a program. A chain of products waits for itself, and a tile of 16 outputs is one chain: hence parts, one a warp,
which let few outputs keep a multiprocessor busy without splits, whose second launch costs more than a small weight.
Rows beyond 16 read the weight again, from L2: the tile of rows is the fastest grid index.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.tiling import Tiling, mixed_tiling, tiling_of

__all__ = [
    "TILE_ROWS", "accumulate", "dot_exact", "heads_linear", "is_wide", "launch_options", "linear", "linear_parts", "split_width_of",
]  # fmt: skip

TILE_ROWS = 16  # the least that matrix units take
_HIP_STAGES = 2
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
def dot_exact(x, weight, acc, TERMS: tl.constexpr = 3):
    """`acc + x · weight` for x [M, K] bf16 or f32, weight [K, N] bf16, f32 or e4m3, acc [M, N] f32; every product exact.

    A float32 x under a narrower weight is TERMS bf16 terms, 8 bits each: two lose what lies 17 bits below a value.
    """
    if (weight.dtype == tl.float32) & (x.dtype == tl.bfloat16):  # the weight in three bf16 terms
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot_bf16(x, high, _dot_bf16(x, middle, _dot_bf16(x, low, acc)))
    elif weight.dtype == tl.float32:
        return tl.dot(x.to(tl.float32), weight, acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        narrow = weight.to(tl.float32).to(tl.bfloat16) if weight.dtype != tl.bfloat16 else weight
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        if TERMS > 2:
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = _dot_bf16(low, narrow, acc)
        return _dot_bf16(high, narrow, _dot_bf16(middle, narrow, acc))
    else:
        narrow = weight.to(tl.float32).to(tl.bfloat16) if weight.dtype != tl.bfloat16 else weight
        return _dot_bf16(x, narrow, acc)


@triton.jit
def _step(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, first, acc, WIDTH: tl.constexpr, TILE_K: tl.constexpr,
          FP8: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """One step in one part: `acc` [M, N] and the products of values `first .. first + TILE_K`."""
    value = first + tl.arange(0, TILE_K)
    x_known, w_known = x_mask[:, None], w_mask[:, None]
    if not EVEN:
        x_known, w_known = x_known & (value < WIDTH)[None, :], w_known & (value < WIDTH)[None, :]
    x = tl.load(from_x[:, None] + value[None, :] * x_value, mask=x_known, other=0.0)
    weight = tl.load(from_weight[:, None] + value[None, :] * w_value, mask=w_known, other=0.0)
    if FP8:
        scale = tl.load(from_scales + first // 128, mask=w_mask, other=0.0)
        return acc + dot_exact(x, tl.trans(weight), tl.zeros([TILE_M, TILE_N], tl.float32)) * scale[None, :]
    else:
        return dot_exact(x, tl.trans(weight), acc)


@triton.jit
def _step_parts(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, first, acc, WIDTH: tl.constexpr, TILE_K: tl.constexpr,
                PARTS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """One step in several parts: part p of `acc` [parts, M, N] takes values `first + p * TILE_K` and on."""
    at = first + tl.arange(0, PARTS) * TILE_K
    value = at[:, None] + tl.arange(0, TILE_K)[None, :]
    x_known, w_known = x_mask[None, :, None], w_mask[None, :, None]
    if not EVEN:
        x_known, w_known = x_known & (value < WIDTH)[:, None, :], w_known & (value < WIDTH)[:, None, :]
    x = tl.load(from_x[None, :, None] + (value * x_value)[:, None, :], mask=x_known, other=0.0)
    weight = tl.load(from_weight[None, :, None] + (value * w_value)[:, None, :], mask=w_known, other=0.0)
    if FP8:
        known = w_mask[None, :] & (at < WIDTH)[:, None]
        scale = tl.load(from_scales[None, :] + (at // 128)[:, None], mask=known, other=0.0)
        return acc + dot_exact(x, tl.trans(weight, 0, 2, 1), tl.zeros([PARTS, TILE_M, TILE_N], tl.float32)) * scale[:, None, :]
    else:
        return dot_exact(x, tl.trans(weight, 0, 2, 1), acc)


@triton.jit
def accumulate(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, first, WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr,
               TILE_K: tl.constexpr, PARTS: tl.constexpr, FP8: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """Sum over `first .. first + SPLIT_WIDTH` of rows at `from_x` [M] by outputs at `from_weight` [N] (scales at [N]): [M, N] f32."""
    EVEN: tl.constexpr = WIDTH % (TILE_K * PARTS) == 0
    if PARTS == 1:
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, SPLIT_WIDTH, TILE_K):
            acc = _step(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, first + start, acc, WIDTH, TILE_K, FP8, EVEN,
                        TILE_M, TILE_N)  # fmt: skip
        return acc
    else:
        parts = tl.zeros([PARTS, TILE_M, TILE_N], tl.float32)
        for start in range(0, SPLIT_WIDTH, TILE_K * PARTS):
            parts = _step_parts(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, first + start, parts, WIDTH, TILE_K,
                                PARTS, FP8, EVEN, TILE_M, TILE_N)  # fmt: skip
        return tl.sum(parts, 0)


@triton.jit
def _product(x, weight, scales, out, rows, x_row, x_head, x_value, w_head, w_output, w_value, HEADS: tl.constexpr, OUTPUTS: tl.constexpr,
             WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr, FP8: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
             TILE_K: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    tiles: tl.constexpr = (OUTPUTS + TILE_N - 1) // TILE_N
    head = (tl.program_id(1) // tiles).to(tl.int64)
    output = tl.program_id(1) % tiles * TILE_N + tl.arange(0, TILE_N)
    split = tl.program_id(2)
    x_mask, w_mask = row < rows, output < OUTPUTS
    from_x = x + head * x_head + row.to(tl.int64) * x_row
    from_weight = weight + head * w_head + output.to(tl.int64) * w_output
    scale_columns: tl.constexpr = (WIDTH + 127) // 128
    from_scales = scales + head * ((OUTPUTS + 127) // 128 * scale_columns) + output // 128 * scale_columns
    acc = accumulate(from_x, x_value, x_mask, from_weight, w_value, w_mask, from_scales, split * SPLIT_WIDTH, WIDTH, SPLIT_WIDTH, TILE_K,
                     PARTS, FP8, TILE_M, TILE_N)  # fmt: skip
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


def is_wide(x: torch.dtype, weight: torch.dtype) -> bool:
    """Whether a product needs the float32 tilings."""
    return torch.float32 in (x, weight)


def _chosen(heads: int, outputs: int, width: int, x: torch.dtype, weight: torch.dtype) -> Tiling:
    if x == torch.bfloat16 and weight == torch.float32:
        return mixed_tiling(outputs, width)
    return tiling_of(heads, outputs, width, wide=is_wide(x, weight))


def launch_options(tiling: Tiling) -> dict[str, int]:
    """Warps, and stages within the shared memory that the vendor's cards have; neither changes a bit of a tiling's result."""
    return {"num_warps": tiling.warps, "num_stages": _HIP_STAGES if torch.version.hip else tiling.stages}


def split_width_of(tiling: Tiling, width: int) -> int:
    """Values of the width that one split sums: whole steps."""
    steps = -(-width // tiling.step)
    assert steps % tiling.splits == 0, f"{steps} steps do not fall into {tiling.splits} splits"
    return steps // tiling.splits * tiling.step


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, width] by weight [outputs, width], both as in `linear`: its splits [splits, rows, outputs] f32, to be added in order."""
    rows, width = x.shape
    outputs = weight.shape[0]
    how = _chosen(1, outputs, width, x.dtype, weight.dtype)
    parts = torch.empty((how.splits, rows, outputs), dtype=torch.float32, device=x.device)
    _multiply(x[:, None], weight[None], None, parts, how)
    return parts


def _multiply(x: Tensor, weight: Tensor, scales: Tensor | None, parts: Tensor, how: Tiling) -> None:
    """One launch: x [rows, heads, width] by weight [heads, outputs, width] to `parts`, [splits, rows, heads, outputs] in memory."""
    rows, heads, width = x.shape
    outputs = weight.shape[1]
    _product[(triton.cdiv(rows, TILE_ROWS), heads * triton.cdiv(outputs, how.outputs), how.splits)](
        x, weight, scales if scales is not None else weight, parts, rows, *x.stride(), *weight.stride(), HEADS=heads, OUTPUTS=outputs,
        WIDTH=width, SPLIT_WIDTH=split_width_of(how, width), FP8=scales is not None, TILE_M=TILE_ROWS, TILE_N=how.outputs,
        TILE_K=how.width, PARTS=how.parts, **launch_options(how),
    )  # fmt: skip


def _heads_product(x: Tensor, weight: Tensor, scales: Tensor | None, dtype: torch.dtype, tiling: Tiling | None) -> Tensor:
    """x [rows, heads, width] by weight [heads, outputs, width], any strides: [rows, heads, outputs] in `dtype`."""
    rows, heads, width = x.shape
    outputs = weight.shape[1]
    out = torch.empty((rows, heads, outputs), dtype=dtype, device=x.device)
    how = tiling or _chosen(heads, outputs, width, x.dtype, weight.dtype)
    for start in range(0, rows, _BAND_ROWS):
        band, to = x[start : start + _BAND_ROWS], out[start : start + _BAND_ROWS]
        parts = to if how.splits == 1 else torch.empty((how.splits, *to.shape), dtype=torch.float32, device=x.device)
        _multiply(band, weight, scales, parts, how)
        if how.splits > 1:
            values = to.numel()
            _add_splits[(triton.cdiv(values, _SUM_BLOCK),)](parts, to, values, SPLITS=how.splits, BLOCK=_SUM_BLOCK, num_warps=4)
    return out


def linear(x: Tensor, weight: Tensor | BlockFp8, dtype: torch.dtype | None = None, tiling: Tiling | None = None) -> Tensor:
    """See the package page; the result is `dtype`, or x's. A given `tiling` is for measuring: it may change bits."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, BlockFp8) else (weight, None)
    return _heads_product(x[:, None], values[None], scales, dtype or x.dtype, tiling)[:, 0]


def heads_linear(x: Tensor, weight: Tensor, tiling: Tiling | None = None) -> Tensor:
    """See the package page and `linear`."""
    return _heads_product(x, weight, None, x.dtype, tiling)


def _case(heads: int, outputs: int, width: int, x: str = "*bf16", weight: str = "*bf16", rows: object = "i32") -> dict[str, object]:
    types = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*fp8e4nv": torch.float8_e4m3fn}
    how = _chosen(heads, outputs, width, types[x], types[weight])
    assert how.width <= FP8_BLOCK, "a part of a step lies within one scale block"
    return {
        "x": x, "weight": weight, "scales": "*fp32", "out": x if how.splits == 1 else "*fp32", "rows": rows, "x_row": heads * width,
        "x_head": width, "x_value": 1, "w_head": outputs * width, "w_output": width, "w_value": 1, "HEADS": heads, "OUTPUTS": outputs,
        "WIDTH": width, "SPLIT_WIDTH": split_width_of(how, width), "FP8": weight == "*fp8e4nv",
        "TILE_M": TILE_ROWS, "TILE_N": how.outputs, "TILE_K": how.width, "PARTS": how.parts, "num_warps": how.warps,
        "num_stages": {"cuda": how.stages, "hip": _HIP_STAGES},
    }  # fmt: skip


_SHAPES = (
    (1, 2624, 6144), (1, 2784, 6144), (1, 2048, 6144), (1, 16384, 2048), (64, 512, 192), (64, 256, 512), (1, 6144, 16384), (1, 4096, 2048),
    (1, 6144, 12288), (1, 128, 6144), (1, 154880, 6144),
)  # fmt: skip
COMPILE = [
    *((_product, _case(*shape)) for shape in _SHAPES),
    (_product, _case(1, 2048, 6144, x="*fp32")),
    (_product, _case(1, 6144, 16384, weight="*fp8e4nv")),
    (_product, _case(1, 2048, 6144, weight="*fp8e4nv")),
    (_product, _case(1, 256, 6144, x="*fp32", weight="*fp32")),
    (_product, _case(1, 256, 6144, weight="*fp32")),
    (_product, _case(1, 64, 6144, weight="*fp32")),
    (_add_splits, {"parts": "*fp32", "out": "*bf16", "values": "i32", "SPLITS": 4, "BLOCK": _SUM_BLOCK, "num_warps": 4}),
]
