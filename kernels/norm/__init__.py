"""RMSNorm and LayerNorm over the last dimension, reduced in float32. Row-invariant: see `kernels`."""

from torch import Tensor

from kernels.norm import reference
from kernels.place import on_cpu

__all__ = ["join_norms", "layer_norm", "rms_norm"]


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


def join_norms(first: Tensor, first_weight: Tensor, second: Tensor, second_weight: Tensor, eps: float) -> Tensor:
    """RMS-norm two rows, each by its own weight, and put them side by side. One launch on a device, where the four operations were four.

    first    [rows, width]      float  any strides
    second   [rows, width]      float  rounded to first's dtype before its norm
    weights  [width]            first's dtype
    returns  [rows, 2 * width]  first's dtype, contiguous
    """
    assert first.shape == second.shape, f"rows of {tuple(first.shape)} and {tuple(second.shape)}"
    assert first_weight.dtype == second_weight.dtype == first.dtype, f"weights of another type than {first.dtype}"
    if on_cpu("join_norms", first):
        return reference.join_norms(first, first_weight, second, second_weight, eps)
    from kernels.norm import kernel

    return kernel.join_norms(first, first_weight, second, second_weight, eps)
