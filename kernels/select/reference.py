"""The k best positions of each row. Comparisons and integer work only, hence exact whatever the shape.

Holds no state; knows nothing of keys or pages.

Invariants:
1. A row yields min(k, last - first) distinct positions of its range: more score first, then the lower position.
2. NaN ranks below every number, -inf included; -0.0 ties with 0.0.
3. Work is done in bands of rows, so that scratch stays a few MiB at any length.
4. Narrowing a long row first only drops scores below k others of the row; it never changes a selection.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["select"]

_BAND_VALUES = 1 << 18  # scores a band holds: 1 MiB, one core's cache
_OUTSIDE = -(2**31)  # rank of positions out of range
_NAN = _OUTSIDE + 1
_NARROW_VALUES = 1 << 15  # a band with fewer scores is done sooner as it is: narrowing takes some 20 calls
_LEAST = float(np.finfo(np.float32).min)
_INFINITY = 0x7F800000  # rank of +inf; -inf has -_INFINITY - 1


def select(scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor) -> None:
    """Positions of the k largest scores of each row, ascending; see the package page."""
    out.fill_(-1)
    if scores.shape[0] == 0 or k == 0:
        return
    low, high = max(0, int(first.min())), int(last.max())
    if high <= low:
        return
    band_rows = max(1, _BAND_VALUES // (high - low))
    first, last = (first - low).to(torch.int32), (last - low).to(torch.int32)
    for start in range(0, scores.shape[0], band_rows):
        band = slice(start, start + band_rows)
        window = scores[band, low:high].clone()
        outside = _mask_range(window, first[band], last[band])
        narrowed = _narrowed(window, last[band] - first[band], k)
        if narrowed is None:
            ranks = _ranks(window)
            for columns, mask in outside:
                ranks[:, columns].masked_fill_(mask, _OUTSIDE)
            _write(_chosen(ranks, k), None, low, out[band])
        else:
            ranks, columns_of = narrowed
            _write(_chosen(ranks, k), columns_of, low, out[band])


def _mask_range(window: Tensor, first: Tensor, last: Tensor) -> list[tuple[slice, Tensor]]:
    """Put -inf outside each row's range. Returns the column slices that held such places and their masks."""
    width = window.shape[1]
    from_last, to_first = min(max(int(last.min()), 0), width), min(max(int(first.max()), 0), width)
    position = torch.arange(width, dtype=torch.int32)
    outside = []
    if from_last < width:
        outside.append((slice(from_last, width), position[from_last:] >= last[:, None]))
    if to_first > 0:
        outside.append((slice(0, to_first), position[:to_first] < first[:, None]))
    for columns, mask in outside:
        window[:, columns].masked_fill_(mask, float("-inf"))
    return outside


def _narrowed(window: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Ranks and columns of the scores that can be chosen, [rows, most candidates], ascending columns; None if nothing is gained.

    The k-th largest of the maxima of disjoint sets is at most the k-th largest of all, so scores below it are out. Where -inf or NaN
    must be chosen from, nothing is narrowed: -inf also stands outside a row's range.
    """
    rows, width = window.shape
    if width < 8 * k or rows * width < _NARROW_VALUES:
        return None
    maxima = window
    while maxima.shape[1] >= 4 * k:
        half = maxima.shape[1] // 2
        maxima = torch.maximum(maxima[:, :half], maxima[:, half : 2 * half])
    maxima = maxima.masked_fill(maxima.isnan(), float("-inf"))  # a set with NaN in it is left out
    cut = maxima.shape[1] - k
    bound = torch.from_numpy(np.partition(maxima.numpy(), cut, axis=1)[:, cut].copy()).clamp_min_(_LEAST)
    possible = window >= bound[:, None]
    counts = possible.sum(1)
    if bool((counts < lengths.clamp(0, k)).any()):
        return None
    flat = torch.from_numpy(np.flatnonzero(possible.numpy()))
    row, place = _spread(counts)
    ranks = torch.full((rows, int(counts.max())), _OUTSIDE, dtype=torch.int32)
    ranks[row, place] = _ranks(window.view(-1)[flat])
    columns_of = torch.zeros(ranks.shape, dtype=torch.int64)
    columns_of[row, place] = flat - row * width
    return ranks, columns_of


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Row, and place in its row, of each of `counts[row]` items listed row by row."""
    row = torch.repeat_interleave(counts)
    return row, torch.arange(row.shape[0]) - (counts.cumsum(0) - counts)[row]


def _ranks(scores: Tensor) -> Tensor:
    """Scores as int32 in the same order; _NAN for NaN of either sign."""
    ranks = (scores + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    ranks ^= (ranks >> 31) & 0x7FFFFFFF
    return ranks.masked_fill_((ranks > _INFINITY) | (ranks < -_INFINITY - 1), _NAN)


def _write(chosen: Tensor, columns_of: Tensor | None, low: int, out: Tensor) -> None:
    """Write one band's choice; a column stands for position low + column, or low + what `columns_of` says."""
    flat = torch.from_numpy(np.flatnonzero(chosen.numpy()))  # row by row, ascending in each
    row, place = _spread(chosen.sum(1))
    columns = flat - row * chosen.shape[1] if columns_of is None else columns_of.view(-1)[flat]
    out[row, place] = (columns + low).to(out.dtype)


def _chosen(ranks: Tensor, k: int) -> Tensor:
    """Which columns each row takes, bool [rows, width], at most k a row, none that is _OUTSIDE."""
    width = ranks.shape[1]
    if width <= k:
        return ranks > _OUTSIDE
    cut = torch.from_numpy(np.partition(ranks.numpy(), width - k, axis=1)[:, width - k].copy()).clamp_min_(_NAN)[:, None]
    chosen = ranks >= cut
    tied = (chosen.sum(1) > k).nonzero()[:, 0]  # rows with more ties at the cut than places
    if tied.shape[0]:
        ranks, cut = ranks[tied], cut[tied]
        above, equal = ranks > cut, ranks == cut
        wanted = k - above.sum(1, keepdim=True)
        chosen[tied] = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= wanted))
    return chosen
