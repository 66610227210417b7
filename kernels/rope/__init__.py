"""Rotary position encoding on interleaved pairs, written in place order (queries and cached keys share this order).

The order of operations in float32 is part of the definition: at a million tokens another order changes cosines by 1e-3 and more.
Row-invariant: everything is a function of one value, its pair and its row's position.
"""

import torch
from torch import Tensor

from kernels.place import on_cpu
from kernels.rope import reference

__all__ = ["rope_frequencies", "rope_table", "rotate", "rotate_first"]


def rope_frequencies(theta: float, width: int) -> Tensor:
    """Frequencies of a rotary width, once for a model.

    Args: theta: the base. width: values that are rotated, even.
    Returns: float32 CPU [width / 2].
    """
    assert width % 2 == 0, f"rotary width {width} is odd"
    return reference.rope_frequencies(theta, width)


def rope_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, of float32 angles in float32, then rounded to dtype: once a step.

    positions    [rows]             int64
    frequencies  [width / 2]        float32  same device
    returns      [rows, width / 2]  dtype    cosines, then sines
    """
    if on_cpu("rope_table", positions):
        return reference.rope_table(positions, frequencies, dtype)
    from kernels.rope import kernel

    return kernel.rope_table(positions, frequencies, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate all of the last dimension; callers slice first. Arithmetic is in x's dtype.

    x         [rows, ..., width]  float  any strides
    cos, sin  [rows, width / 2]   x's dtype
    returns   [rows, ..., width]  x's dtype, contiguous, a copy
    """
    assert x.shape[-1] == 2 * cos.shape[-1], f"table of {cos.shape[-1]} pairs does not fit rows of {x.shape[-1]}"
    assert x.shape[0] == cos.shape[0], f"table of {cos.shape[0]} rows does not fit {x.shape[0]} rows"
    if on_cpu("rotate", x):
        return reference.rotate(x, cos, sin)
    from kernels.rope import kernel

    return kernel.rotate(x, cos, sin)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first values of the last dimension, as many as the table covers; the others stay. x is given up.

    x         [rows, ..., width]  float  contiguous; a device turns it in place
    cos, sin  [rows, pairs]       x's dtype; 2 * pairs is at most width
    returns   [rows, ..., width]  x's dtype, contiguous
    """
    assert x.shape[-1] >= 2 * cos.shape[-1], f"table of {cos.shape[-1]} pairs does not fit rows of {x.shape[-1]}"
    assert x.shape[0] == cos.shape[0], f"table of {cos.shape[0]} rows does not fit {x.shape[0]} rows"
    if on_cpu("rotate_first", x):
        return reference.rotate_first(x, cos, sin)
    from kernels.rope import kernel

    return kernel.rotate_first(x, cos, sin)
