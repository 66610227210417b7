"""Counter-based noise: the same (seed, position, token id) gives the same number everywhere.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in integer arithmetic, so a device kernel reproduces
its words bit for bit; Triton's own `philox` is this generator. Only the two logarithms at the end are the platform's.

1. Counter: (token id, position low, position high, 0). Key: (seed low, seed high). The first of the four words is used.
2. A word w becomes u = (2w + 1) / 2^33, rounded to float32 and kept below 1: open at both ends and finest near 0, where the winners of
   unlikely tokens come from (a grid of 2^-24 would never let a token of probability 1e-8 win at its rate).
"""

import torch
from torch import Tensor

__all__ = ["gumbel", "philox", "uniform"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], keys: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox-4x32.

    counters  4 x [n]  int64  32-bit words
    keys      2                32-bit words
    returns   4 x [n]  int64  32-bit words
    """
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(_ROUNDS):
        # int64 products wrap, which keeps all 64 bits; the shift is arithmetic, so the high word is masked.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _WORD, product0 & _WORD
        high1, low1 = (product1 >> 32) & _WORD, product1 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """One number in (0, 1) a token id.

    token_ids  [n]  int64
    returns    [n]  f32    between 2^-33 and 1 - 2^-24
    """
    zero = torch.zeros_like(token_ids)
    counters = (token_ids & _WORD, zero + (position & _WORD), zero + ((position >> 32) & _WORD), zero)
    words = philox(counters, (seed & _WORD, (seed >> 32) & _WORD))[0]
    return ((2 * words + 1).float() * 2.0**-33).clamp_max(_BELOW_ONE)


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, finite (about -2.8 to 22.9).

    token_ids  [n]  int64
    returns    [n]  f32
    """
    exponential = -torch.log1p(-uniform(seed, position, token_ids))
    return -torch.log(exponential)
