"""Weights rounded to the nearest of few values. Knows no files.

Scales are rounded to how they are stored before values are divided by them. A group of zeros has scale 1.
"""

import torch
from torch import Tensor

from engine.model.packed import pack_words
from kernels.linear.block_fp8 import FP8_BLOCK

__all__ = ["packed_integers", "scaled_fp8"]

_E4M3_MAX = 448.0


def packed_integers(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """What compressed-tensors stores of a weight [outputs, width] in symmetric integers, by the last part of each name.

    Args: group: values that share a scale; divides the width.
    The scale is the largest size over half the codes less a half, 7.5 for 4 bits, as compressed-tensors itself chooses it.
    """
    outputs, width = weight.shape
    grouped = weight.to(torch.float32).view(outputs, width // group, group)
    middle = 1 << (bits - 1)
    scale = (grouped.abs().amax(-1) / (middle - 0.5)).to(torch.bfloat16)
    scale = torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)
    codes = (grouped / scale[..., None].to(torch.float32)).round_().clamp_(-middle, middle - 1).add_(middle)
    return {
        "weight_packed": pack_words(codes.to(torch.uint8).view(outputs, width), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, width]),
    }


def scaled_fp8(weight: Tensor) -> dict[str, Tensor]:
    """What the official block-FP8 form stores of a weight [outputs, width], by what follows its name."""
    outputs, width = weight.shape
    rows, columns = -(-outputs // FP8_BLOCK), -(-width // FP8_BLOCK)
    wide = torch.nn.functional.pad(weight.to(torch.float32), (0, columns * FP8_BLOCK - width, 0, rows * FP8_BLOCK - outputs))
    blocks = wide.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / _E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    values = (blocks / scale[:, None, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX).view(rows * FP8_BLOCK, -1)[:outputs, :width]
    return {"weight": values.to(torch.float8_e4m3fn).contiguous(), "weight_scale_inv": scale}
