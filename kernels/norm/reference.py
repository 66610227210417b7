"""Norms over the last dimension, in float32. Hold no weights.

Invariant: each row is reduced over contiguous memory, in a shape given by its width alone.
"""

import torch
from torch import Tensor

__all__ = ["join_norms", "layer_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * cast(x32 / sqrt(mean(x32^2) + eps))`; see the package page."""
    wide = x.float().contiguous()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Mean removed, variance divided out, then weight and bias, all in float32; see the package page."""
    wide = x.float().contiguous()
    return torch.nn.functional.layer_norm(wide, (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)


def join_norms(first: Tensor, first_weight: Tensor, second: Tensor, second_weight: Tensor, eps: float) -> Tensor:
    """Two norms side by side; see the package page."""
    return torch.cat((rms_norm(first, first_weight, eps), rms_norm(second.to(first.dtype), second_weight, eps)), dim=-1)
