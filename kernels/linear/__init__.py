"""Linear maps of rows: one weight for all (`linear`), or one a head (`heads_linear`). No bias.

Row-invariant: see `kernels`. Refused: one product over all rows; a batch of tiles in one call (no faster, and its shape would follow
the number of rows).
"""

from torch import Tensor

from kernels.linear import reference

__all__ = ["linear", "heads_linear"]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map rows by one weight.

    x        [rows, width]     float  rows >= 0, any strides
    weight   [outputs, width]  same dtype
    returns  [rows, outputs]   same dtype, contiguous
    """
    assert x.device.type == "cpu", f"linear has no kernel for {x.device.type}"
    assert x.shape[1] == weight.shape[1], f"rows are {x.shape[1]} wide, the weight {weight.shape[1]}"
    return reference.linear(x, weight)


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map each head of each row by that head's weight.

    x        [rows, heads, width]     float  rows >= 0, any strides
    weight   [heads, outputs, width]  same dtype, any strides that stay the same from call to call
    returns  [rows, heads, outputs]   same dtype, contiguous
    """
    assert x.device.type == "cpu", f"heads_linear has no kernel for {x.device.type}"
    assert x.shape[1:] == (weight.shape[0], weight.shape[2]), f"rows {tuple(x.shape)} do not fit weight {tuple(weight.shape)}"
    return reference.heads_linear(x, weight)
