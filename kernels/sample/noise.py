"""Counter-based noise: the same (seed, position, token id) gives the same number everywhere.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in integer arithmetic, so a device kernel reproduces
its words bit for bit; Triton's own `philox` is this generator. Only the two logarithms at the end are the platform's.

1. Counter: (token id, position low, position high, 0). Key: (seed low, seed high). The first of the four words is used.
2. A word w becomes u = (2w + 1) / 2^33, rounded to float32 and kept below 1: open at both ends and finest near 0, where the winners of
   unlikely tokens come from (a grid of 2^-24 would never let a token of probability 1e-8 win at its rate).
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["gumbel", "philox", "uniform"]

Words: TypeAlias = npt.NDArray[np.uint64]  # 32-bit words in 64 bits, so that a product keeps all of its bits

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def philox(counters: tuple[Words, Words, Words, Words], keys: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox-4x32. In numpy: torch has no unsigned products and takes three times as long over short rows.

    counters  4 x [n]  uint64  32-bit words
    keys      2                32-bit words
    returns   4 x [n]  uint64  32-bit words
    """
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ np.uint64(k0), product1 & _WORD
        c2, c3 = (product0 >> _HALF) ^ c3 ^ np.uint64(k1), product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """One number in (0, 1) a token id.

    token_ids  [n]  int64  at least 0
    returns    [n]  f32    between 2^-33 and 1 - 2^-24
    """
    counter = token_ids.numpy().astype(np.uint64) & _WORD
    low, high = (np.full_like(counter, word & 0xFFFFFFFF) for word in (position, position >> 32))
    words = philox((counter, low, high, np.zeros_like(counter)), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[0]
    numbers = (np.uint64(2) * words + np.uint64(1)).astype(np.float32) * np.float32(2.0**-33)
    return torch.from_numpy(numbers).clamp_max(_BELOW_ONE)


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, finite (about -2.8 to 22.9).

    token_ids  [n]  int64
    returns    [n]  f32
    """
    exponential = -torch.log1p(-uniform(seed, position, token_ids))
    return -torch.log(exponential)
