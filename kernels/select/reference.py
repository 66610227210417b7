"""The k best positions of each row. Integer work after one order-preserving mapping, hence exact whatever the shape.

Holds no state; knows nothing of keys or pages.

Invariants:
1. A row yields min(k, last - first) distinct positions of its range: more score first, then the lower position.
2. NaN ranks below every number, -inf included; -0.0 ties with 0.0.
3. Work is done in bands of rows, so that scratch stays a few MiB at any length.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["select"]

_BAND_VALUES = 1 << 18  # scores a band holds: 1 MiB, one core's cache
_OUTSIDE = -(2**31)  # rank of positions out of range
_NAN = _OUTSIDE + 1
_INFINITY = 0x7F800000  # rank of +inf; -inf has -_INFINITY - 1


def select(scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor) -> None:
    """Positions of the k largest scores of each row, ascending; see the package page."""
    out.fill_(-1)
    if scores.shape[0] == 0:
        return
    low, high = max(0, int(first.min())), int(last.max())
    if high <= low:
        return
    band_rows = max(1, _BAND_VALUES // (high - low))
    first, last = (first - low).to(torch.int32), (last - low).to(torch.int32)
    for start in range(0, scores.shape[0], band_rows):
        band = slice(start, start + band_rows)
        _select_band(_ranks(scores[band, low:high], first[band], last[band]), low, k, out[band])


def _ranks(scores: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Scores as int32 in the same order, [rows, width]; _NAN for NaN, _OUTSIDE out of the row's range."""
    ranks = (scores + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    ranks ^= (ranks >> 31) & 0x7FFFFFFF
    if int(ranks.max()) > _INFINITY or int(ranks.min()) < -_INFINITY - 1:
        ranks.masked_fill_((ranks > _INFINITY) | (ranks < -_INFINITY - 1), _NAN)
    position = torch.arange(scores.shape[1], dtype=torch.int32)
    if bool((last < scores.shape[1]).any()):
        ranks.masked_fill_(position >= last[:, None], _OUTSIDE)
    if bool((first > 0).any()):
        ranks.masked_fill_(position < first[:, None], _OUTSIDE)
    return ranks


def _select_band(ranks: Tensor, low: int, k: int, out: Tensor) -> None:
    """Write the chosen positions of one band; column c of `ranks` is position low + c."""
    rows, width = ranks.shape
    chosen = _chosen(ranks, k)
    counts = chosen.sum(1)
    flat = torch.from_numpy(np.flatnonzero(chosen.numpy()))  # row by row, ascending in each
    row = torch.repeat_interleave(torch.arange(rows), counts)
    place = torch.arange(flat.shape[0]) - (counts.cumsum(0) - counts)[row]
    out[row, place] = (flat - row * width + low).to(out.dtype)


def _chosen(ranks: Tensor, k: int) -> Tensor:
    """Which columns each row takes, bool [rows, width], at most k a row."""
    rows, width = ranks.shape
    if width <= k:
        return ranks > _OUTSIDE
    if k == 0:
        return torch.zeros((rows, width), dtype=torch.bool)
    cut = torch.from_numpy(np.partition(ranks.numpy(), width - k, axis=1)[:, width - k].copy()).clamp_min_(_NAN)[:, None]
    chosen = ranks >= cut
    tied = (chosen.sum(1) > k).nonzero()[:, 0]  # rows with more ties at the cut than places
    if tied.shape[0]:
        ranks, cut = ranks[tied], cut[tied]
        above, equal = ranks > cut, ranks == cut
        wanted = k - above.sum(1, keepdim=True)
        chosen[tied] = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= wanted))
    return chosen
