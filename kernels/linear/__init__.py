"""Linear maps of rows: one weight for all (`linear`), or one a head (`heads_linear`). No bias.

A weight is a tensor or `BlockFp8`, which stays FP8 in memory. On a device a weight may be narrower than the rows (bf16 or FP8 under
float32 rows): products are exact and sums float32 there.

Row-invariant: see `kernels`; on a device up to BULK_ROWS rows. More are an append's and take the library's product (`bulk.py`). Refused:
one product over a step's rows; a batch of tiles in one call (no faster, and its shape would follow the number of rows).
"""

from torch import Tensor

from kernels.linear import reference
from kernels.linear.block_fp8 import BlockFp8
from kernels.place import BULK_ROWS, on_cpu

__all__ = ["BlockFp8", "linear", "heads_linear"]


def linear(x: Tensor, weight: Tensor | BlockFp8) -> Tensor:
    """Map rows by one weight.

    x        [rows, width]     float  rows >= 0, any strides
    weight   [outputs, width]  same dtype; BlockFp8; on a device also bf16 under float32 rows
    returns  [rows, outputs]   x's dtype, contiguous
    """
    assert x.shape[1] == weight.shape[1], f"rows are {x.shape[1]} wide, the weight {weight.shape[1]}"
    if on_cpu("linear", x):
        return reference.linear(x, weight.dequantised(x.dtype) if isinstance(weight, BlockFp8) else weight)
    if x.shape[0] > BULK_ROWS:
        from kernels.linear import bulk

        return bulk.linear(x, weight)
    from kernels.linear import kernel

    return kernel.linear(x, weight)


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map each head of each row by that head's weight.

    x        [rows, heads, width]     float  rows >= 0, any strides
    weight   [heads, outputs, width]  same dtype, any strides that stay the same from call to call
    returns  [rows, heads, outputs]   same dtype, contiguous
    """
    assert x.shape[1:] == (weight.shape[0], weight.shape[2]), f"rows {tuple(x.shape)} do not fit weight {tuple(weight.shape)}"
    if on_cpu("heads_linear", x):
        return reference.heads_linear(x, weight)
    if x.shape[0] > BULK_ROWS:
        from kernels.linear import bulk

        return bulk.heads_linear(x, weight)
    from kernels.linear import kernel

    return kernel.heads_linear(x, weight)
