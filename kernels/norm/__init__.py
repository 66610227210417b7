"""RMSNorm and LayerNorm over the last dimension, reduced in float32. Row-invariant: see `kernels`."""

from torch import Tensor

from kernels.norm import reference
from kernels.place import on_cpu

__all__ = ["rms_norm", "layer_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, cast back to the input's dtype, then multiply by the weight (no bias, no "+1").

    x        [..., width]  float  any strides
    weight   [width]       float
    returns  [..., width]  the dtype of x times weight, contiguous
    """
    if on_cpu("rms_norm", x):
        return reference.rms_norm(x, weight, eps)
    from kernels.norm import kernel

    return kernel.rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm proper: the mean is removed and the bias added.

    x             [..., width]  float  any strides
    weight, bias  [width]       float
    returns       [..., width]  x's dtype, contiguous
    """
    if on_cpu("layer_norm", x):
        return reference.layer_norm(x, weight, bias, eps)
    from kernels.norm import kernel

    return kernel.layer_norm(x, weight, bias, eps)
