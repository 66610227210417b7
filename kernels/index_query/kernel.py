"""Index queries on a device: a program multiplies as `kernels/linear` does, then turns the pairs it holds and stores them.

Invariants:
1. The product's bits are `kernels/linear`'s: same tiling, same sum, rounded to the rows' type before the rotation. No multiplication is
   fused with an addition, which would lose a rounding of the rotation (bf16's too: its product is exact in float32, so a compiler may
   take the rounded one for a bf16 product and fuse that). FP8 scales and float32 products need fusing for `kernels/linear`'s bits: both
   are not made here.
2. `cleared` is zero when the launch ends, and nothing in it reads that.

Bytes: the weight, 17 MB, as in `kernels/linear`; the table's two rows and a store more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import BlockFp8
from kernels.linear.kernel import TILE_ROWS, accumulate, launch_options, split_width_of
from kernels.linear.tiling import tiling_of
from kernels.rope.kernel import turned

__all__ = ["fits", "index_query"]


@triton.jit
def _index_query(x, weight, cos, sin, out, cleared, rows, x_row, x_value, w_output, w_value, t_row, OUTPUTS: tl.constexpr,
                 WIDTH: tl.constexpr, SPLIT_WIDTH: tl.constexpr, HEAD_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
                 CLEARED: tl.constexpr, CLEAR: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                 PARTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    tile = tl.program_id(1)
    output = tile * TILE_N + tl.arange(0, TILE_N)
    x_mask, w_mask = row < rows, output < OUTPUTS
    wide = row.to(tl.int64)
    if CLEARED > 0:
        at = tile * CLEAR + tl.arange(0, CLEAR)
        tl.store(cleared + at, tl.zeros([CLEAR], tl.int32), mask=(at < CLEARED) & (tl.program_id(0) == 0))
    pair = (tile * (TILE_N // 2) + tl.arange(0, TILE_N // 2)) % HEAD_PAIRS  # within its head
    turning = x_mask[:, None] & (pair < PAIRS)[None, :]
    from_table = wide[:, None] * t_row + pair[None, :]
    c = tl.load(cos + from_table, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + from_table, mask=turning, other=0.0).to(tl.float32)
    acc = accumulate(x + wide * x_row, x_value, x_mask, weight + output.to(tl.int64) * w_output, w_value, w_mask,
                     weight, 0, WIDTH, SPLIT_WIDTH, TILE_K, PARTS, False, TILE_M, TILE_N)  # fmt: skip
    values = acc.to(out.dtype.element_ty)
    even, odd = tl.split(tl.reshape(values, [TILE_M, TILE_N // 2, 2]))
    first, second = turned(even, odd, c, s)
    even = tl.where(turning, first, even)
    odd = tl.where(turning, second, odd)
    to_out = out + wide[:, None] * OUTPUTS + output[None, :]
    tl.store(to_out, tl.reshape(tl.join(even, odd), [TILE_M, TILE_N]), mask=x_mask[:, None] & w_mask[None, :])


def fits(latent: Tensor, weight: Tensor | BlockFp8, width: int) -> bool:
    """See `one_launch`."""
    if isinstance(weight, BlockFp8) or torch.float32 in (latent.dtype, weight.dtype):
        return False
    return width % 2 == 0 and tiling_of(1, *weight.shape, wide=False).splits == 1


def index_query(latent: Tensor, weight: Tensor, width: int, cos: Tensor, sin: Tensor, cleared: Tensor | None) -> Tensor:
    """See the package page. One launch; capturable."""
    rows, (outputs, inputs) = latent.shape[0], weight.shape
    out = torch.empty((rows, outputs // width, width), dtype=latent.dtype, device=latent.device)
    if rows == 0:
        if cleared is not None:
            cleared.zero_()
        return out
    cos, sin = cos.contiguous(), sin.contiguous()
    how = tiling_of(1, outputs, inputs, wide=False)
    tiles = triton.cdiv(outputs, how.outputs)
    count = 0 if cleared is None else cleared.numel()
    _index_query[(triton.cdiv(rows, TILE_ROWS), tiles)](
        latent, weight, cos, sin, out, out if cleared is None else cleared, rows, *latent.stride(), *weight.stride(), cos.stride(0),
        OUTPUTS=outputs, WIDTH=inputs, SPLIT_WIDTH=split_width_of(how, inputs), HEAD_PAIRS=width // 2, PAIRS=cos.shape[1],
        CLEARED=count, CLEAR=triton.next_power_of_2(triton.cdiv(max(count, 1), tiles)), TILE_M=TILE_ROWS, TILE_N=how.outputs,
        TILE_K=how.width, PARTS=how.parts, enable_fp_fusion=False, **launch_options(how),
    )  # fmt: skip
    return out


def _case(cleared: int) -> dict[str, object]:
    how = tiling_of(1, 4096, 2048, wide=False)
    return {
        "x": "*bf16", "weight": "*bf16", "cos": "*bf16", "sin": "*bf16",
        "out": "*bf16", "cleared": "*i32", "rows": "i32", "x_row": 2048, "x_value": 1, "w_output": 2048, "w_value": 1, "t_row": 32,
        "OUTPUTS": 4096, "WIDTH": 2048, "SPLIT_WIDTH": split_width_of(how, 2048), "HEAD_PAIRS": 64,
        "PAIRS": 32, "CLEARED": cleared, "CLEAR": 32, "TILE_M": TILE_ROWS, "TILE_N": how.outputs, "TILE_K": how.width, "PARTS": how.parts,
        "num_warps": how.warps, "num_stages": {"cuda": how.stages, "hip": 2},
    }  # fmt: skip


COMPILE = [(_index_query, _case(cleared)) for cleared in (4224, 0)]
