"""Products of many rows: the library's own (cuBLAS, rocBLAS), which read a weight once for all rows. For appends.

Invariants:
1. Sums are float32 and in a fixed order: a call and its repetition give the same bits. A row's bits may follow the number of rows.
2. Narrower operands are widened, never the wider ones cut: block-FP8, integers and mixed weights pass through scratch of SCRATCH_BYTES at
   most. An integer's value is rounded to the dtype of the product: under bf16 rows to what its format defines, where its scales are bf16.

The library's shortcuts, TF32 and bf16 partial sums, are switches of the process: who opens a device sets them off, a product asserts it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.group_int import GroupInt, chunk_units_of, padded_width

__all__ = ["heads_linear", "linear"]

SCRATCH_BYTES = 64 << 20  # of widened weights at a time; a multiple of 128 outputs of any width in mind
_BLOCK = tl.constexpr(FP8_BLOCK)
_WIDENED = 32  # outputs of a program that multiplies integers out


def _check_exact(x: Tensor) -> None:
    matmul = torch.backends.cuda.matmul
    exact = not matmul.allow_tf32 and not matmul.allow_bf16_reduced_precision_reduction
    assert exact or x.device.type == "cpu", "torch.backends.cuda.matmul allows TF32 or bf16 sums in this process"


@triton.jit
def _dequantise(values, scales, out, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr):
    """One scale block of values, multiplied out in float32."""
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    output = block_row * _BLOCK + tl.arange(0, _BLOCK)
    value = block_column * _BLOCK + tl.arange(0, _BLOCK)
    inside = (output < OUTPUTS)[:, None] & (value < WIDTH)[None, :]
    at = output.to(tl.int64)[:, None] * WIDTH + value[None, :]
    scale = tl.load(scales + block_row * ((WIDTH + _BLOCK - 1) // _BLOCK) + block_column)
    wide = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_out(units, scales, zeros, out, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr,
                  GROUP: tl.constexpr, ZEROS: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """One chunk of some outputs, in float32: (code - zero) * scale."""
    UNITS: tl.constexpr = 32 if GROUP == 32 else 64
    PIECES: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = (PADDED + GROUP - 1) // GROUP
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    unit = tl.arange(0, UNITS)
    inside = output < OUTPUTS
    first = tl.program_id(1) * UNITS * PIECES
    row = output.to(tl.int64)
    packed = tl.load(units + (row * (PADDED // PIECES) + first // PIECES)[:, None] + unit[None, :], mask=inside[:, None], other=0)
    for piece in tl.static_range(PIECES):
        group = (first + piece * UNITS) // GROUP
        scale = tl.load(scales + row * GROUPS + group, mask=inside, other=0.0).to(tl.float32)
        zero = tl.full([TILE_N], 1 << (BITS - 1), tl.float32)
        if ZEROS:
            zero = tl.load(zeros + row * GROUPS + group, mask=inside, other=0).to(tl.float32)
        code = ((packed.to(tl.int32) >> (piece * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        value = first + piece * UNITS + unit
        wide = (code - zero[:, None]) * scale[:, None]
        tl.store(
            out + row[:, None] * WIDTH + value[None, :], wide.to(out.dtype.element_ty), mask=inside[:, None] & (value < WIDTH)[None, :]
        )


def _widened(weight: Tensor | BlockFp8 | GroupInt, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Outputs `first` (a multiple of 128) to `end` - 1 of a weight, in `dtype`."""
    if isinstance(weight, Tensor):
        return weight[first:end].to(dtype)
    if isinstance(weight, GroupInt):
        part = weight[first:end]
        wide = torch.empty(part.shape, dtype=dtype, device=part.device)
        padded, chunk = padded_width(part.width, part.bits, part.group), chunk_units_of(part.group) * (16 // part.bits)
        _multiply_out[(triton.cdiv(end - first, _WIDENED), padded // chunk)](
            part.units, part.scales, part.scales if part.zeros is None else part.zeros, wide, OUTPUTS=end - first, WIDTH=part.width,
            PADDED=padded, BITS=part.bits, GROUP=part.group, ZEROS=part.zeros is not None, TILE_N=_WIDENED, num_warps=4,
        )  # fmt: skip
        return wide
    values, scales = weight.values[first:end], weight.scales[first // FP8_BLOCK :]
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    grid = (triton.cdiv(end - first, FP8_BLOCK), triton.cdiv(values.shape[1], FP8_BLOCK))
    _dequantise[grid](values, scales, out, OUTPUTS=end - first, WIDTH=values.shape[1], num_warps=8)
    return out


def linear(x: Tensor, weight: Tensor | BlockFp8 | GroupInt, dtype: torch.dtype | None = None) -> Tensor:
    """See the package page; the result is `dtype`, or x's."""
    _check_exact(x)
    outputs, width = weight.shape
    out = torch.empty((x.shape[0], outputs), dtype=dtype or x.dtype, device=x.device)
    stored = weight.dtype if isinstance(weight, Tensor) else x.dtype
    kind = torch.float32 if torch.float32 in (x.dtype, stored, out.dtype) else x.dtype
    rows = x.to(kind)
    if isinstance(weight, Tensor) and weight.dtype == kind == out.dtype:
        torch.mm(rows, weight.t(), out=out)
        return out
    step = max(1, SCRATCH_BYTES // (width * kind.itemsize * FP8_BLOCK)) * FP8_BLOCK
    for first in range(0, outputs, step):
        end = min(first + step, outputs)
        out[:, first:end] = rows @ _widened(weight, first, end, kind).t()
    return out


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the package page."""
    _check_exact(x)
    rows, heads, _ = x.shape
    out = torch.empty((rows, heads, weight.shape[1]), dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), weight.to(x.dtype).transpose(1, 2), out=out.transpose(0, 1))
    return out


COMPILE = [
    (_dequantise, {"values": "*fp8e4nv", "scales": "*fp32", "out": "*bf16", "OUTPUTS": 5376, "WIDTH": 6144, "num_warps": 8}),
    (_multiply_out, {"units": "*i16", "scales": "*bf16", "zeros": "*u8", "out": "*bf16", "OUTPUTS": 5376, "WIDTH": 6144, "PADDED": 6144,
                     "BITS": 4, "GROUP": 64, "ZEROS": True, "TILE_N": _WIDENED, "num_warps": 4}),
]  # fmt: skip
