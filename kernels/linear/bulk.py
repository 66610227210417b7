"""Products of many rows: the library's own (cuBLAS, rocBLAS), which read a weight once for all rows. For appends.

Invariants:
1. Sums are float32 and in a fixed order: a call and its repetition give the same bits. A row's bits may follow the number of rows.
2. Narrower operands are widened, never the wider ones cut: block-FP8 and mixed weights pass through scratch of SCRATCH_BYTES at most.

The library's shortcuts, TF32 and bf16 partial sums, are switches of the process: who opens a device sets them off, a product asserts it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8

__all__ = ["heads_linear", "linear"]

SCRATCH_BYTES = 64 << 20  # of widened weights at a time; a multiple of 128 outputs of any width in mind
_BLOCK = tl.constexpr(FP8_BLOCK)


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


def _widened(weight: Tensor | BlockFp8, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Outputs `first` (a multiple of 128) to `end` - 1 of a weight, in `dtype`."""
    if isinstance(weight, Tensor):
        return weight[first:end].to(dtype)
    values, scales = weight.values[first:end], weight.scales[first // FP8_BLOCK :]
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    grid = (triton.cdiv(end - first, FP8_BLOCK), triton.cdiv(values.shape[1], FP8_BLOCK))
    _dequantise[grid](values, scales, out, OUTPUTS=end - first, WIDTH=values.shape[1], num_warps=8)
    return out


def linear(x: Tensor, weight: Tensor | BlockFp8, dtype: torch.dtype | None = None) -> Tensor:
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
]
