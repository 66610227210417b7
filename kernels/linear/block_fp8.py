"""Weights kept as block-FP8: e4m3 values and one float32 scale a block of 128 x 128.

Knows no product. A value is `values * scale of its block`; the last block row and column may be ragged.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FP8_BLOCK", "BlockFp8"]

FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """One weight, or one an expert in front.

    values  [..., outputs, width]                          float8_e4m3fn  contiguous
    scales  [..., ceil(outputs / 128), ceil(width / 128)]  float32        contiguous
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        *leading, outputs, width = self.values.shape
        wanted = (*leading, -(-outputs // FP8_BLOCK), -(-width // FP8_BLOCK))
        assert self.values.dtype == torch.float8_e4m3fn, f"values are {self.values.dtype}"
        assert self.scales.dtype == torch.float32, f"scales are {self.scales.dtype}"
        assert self.scales.shape == wanted, f"scales are {tuple(self.scales.shape)}, not {wanted}"
        assert self.values.is_contiguous(), "values are not contiguous"
        assert self.scales.is_contiguous(), "scales are not contiguous"

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return self.values.shape

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight as `dtype`, multiplied out in float32: what the references compute with."""
        outputs, width = self.values.shape[-2:]
        spread = self.scales.repeat_interleave(FP8_BLOCK, -2)[..., :outputs, :].repeat_interleave(FP8_BLOCK, -1)[..., :width]
        return (self.values.to(torch.float32) * spread).to(dtype)
