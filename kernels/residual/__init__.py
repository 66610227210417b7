"""The residual sum of a layer: add a branch's output, note rows that are no longer finite, and norm for the next branch. Row-invariant.

One launch on a device, where add, norm and check apart were seven: small launches in a row cost more than what they move.
"""

from torch import Tensor

from kernels.place import on_cpu
from kernels.residual import reference

__all__ = ["add_norm"]


def add_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float, bad_layer: Tensor, layer: int) -> Tensor:
    """Add `branch` to the residual state in place and norm the sum.

    x          [rows, hidden]  float  contiguous; becomes x + branch, rounded to its dtype
    branch     [rows, hidden]  x's dtype
    weight     [hidden]        float  of the RMSNorm
    bad_layer  [rows]          int64  becomes `layer` where it was negative and the row of the sum is not finite
    returns    [rows, hidden]  as `kernels.norm.rms_norm` of the sum
    """
    assert x.is_contiguous(), "the residual state is not contiguous"
    assert branch.shape == x.shape, f"a branch of {tuple(branch.shape)} for rows of {tuple(x.shape)}"
    assert bad_layer.shape == x.shape[:1], f"{tuple(bad_layer.shape)} flags for {x.shape[0]} rows"
    if on_cpu("add_norm", x):
        return reference.add_norm(x, branch, weight, eps, bad_layer, layer)
    from kernels.residual import kernel

    return kernel.add_norm(x, branch, weight, eps, bad_layer, layer)
