"""The definition of a score's digit (`kernels/select/digits.py`), by its value."""

import torch
from torch import Tensor

__all__ = ["digit_counts", "digits"]


def digits(scores: Tensor) -> Tensor:
    """16 steps an octave from 2^-16, all below it and all past 2^16 in one digit each. int64 of float32 scores of any shape."""
    fraction, exponent = torch.frexp(scores.double())
    step = (exponent + 15) * 16 + (fraction * 32 - 16).floor()
    inside = scores >= 2.0**-16
    return torch.where(inside, step, 0.0).clamp(0, 511).nan_to_num(511.0).where(inside, 0.0).long()


def digit_counts(scores: Tensor) -> Tensor:
    """How many of a row's scores [n] have each digit, int32 [512]."""
    return torch.bincount(digits(scores), minlength=512).int()
