"""Rotary positions on interleaved pairs. Holds no table and no theta.

Invariants:
1. Angles are float32 products of float32 positions and float32 frequencies; sine and cosine are taken in float32.
2. Pair j of a row is (x[2j], x[2j+1]) and is written back in its place.
"""

import torch
from torch import Tensor

__all__ = ["rope_frequencies", "rope_table", "rotate", "rotate_first"]


def rope_frequencies(theta: float, width: int) -> Tensor:
    """`1 / theta^(2j/width)` in float32: exponent, power, reciprocal, in this order."""
    exponent = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    return 1.0 / (theta**exponent)


def rope_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `float32(position) * frequency`; see the package page."""
    angle = positions.to(torch.float32)[:, None] * frequencies
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair by its row's angle; see the package page."""
    shape = (x.shape[0], *(1,) * (x.dim() - 2), x.shape[-1] // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(even * cos, odd * sin, out=out[..., 0::2])
    torch.add(odd * cos, even * sin, out=out[..., 1::2])
    return out


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the values that the table covers; the others stay; see the package page."""
    width = 2 * cos.shape[-1]
    return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
