"""Linear maps of rows: one weight for all (`linear`), or one a head (`heads_linear`). No bias.

A weight is a tensor, `BlockFp8` or `GroupInt`, which stay as narrow in memory as they are. On a device a tensor may be narrower than the
rows (bf16 under float32 rows): products are exact and sums float32 there. Scales are applied to a block's or group's sum, in float32.

Row-invariant: see `kernels`; on a device up to BULK_ROWS rows. More are an append's and take the library's product (`bulk.py`). Refused:
one product over a step's rows; a batch of tiles in one call (no faster, and its shape would follow the number of rows).
"""

from torch import Tensor

from kernels.linear import reference
from kernels.linear.block_fp8 import BlockFp8
from kernels.linear.group_int import GroupInt
from kernels.place import BULK_ROWS, on_cpu

__all__ = ["BlockFp8", "GroupInt", "linear", "heads_linear"]


def linear(x: Tensor, weight: Tensor | BlockFp8 | GroupInt) -> Tensor:
    """Map rows by one weight.

    x        [rows, width]     float  rows >= 0, any strides
    weight   [outputs, width]  same dtype; BlockFp8; GroupInt; on a device also bf16 under float32 rows
    returns  [rows, outputs]   x's dtype, contiguous
    """
    assert x.shape[1] == weight.shape[1], f"rows are {x.shape[1]} wide, the weight {weight.shape[1]}"
    if on_cpu("linear", x):
        return reference.linear(x, weight if isinstance(weight, Tensor) else weight.dequantised(x.dtype))
    if x.shape[0] > BULK_ROWS:
        from kernels.linear import bulk

        return bulk.linear(x, weight)
    if isinstance(weight, GroupInt):
        from kernels.linear import integers

        return integers.linear(x, weight)
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
