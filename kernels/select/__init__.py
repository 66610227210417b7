"""The selection: each row's k best positions. Exact, so offload and resident runs, and any batch, choose the same.

Choices kept: ties go to the lower position; the range comes before the choice (choosing first and masking later loses keys); NaN ranks
lowest, so a row of NaN still yields valid positions and the failure shows where the model's output is checked, not as a bad address.
Kept by measurement (20,000 scores a row, k 256, one thread): numpy's `partition` on int32 for the cut, 105 us a row; `torch.topk` 127,
`torch.kthvalue` 188. Positions through `np.flatnonzero`, 8 us; `torch.nonzero` 20. Bands of long rows are narrowed first to scores that
can be among the k best. `torch.fmax` there is not vectorised: 19 us a row of 10,000 against 2.4 for `torch.maximum`.
"""

import torch
from torch import Tensor

from kernels.place import on_cpu
from kernels.select import reference

__all__ = ["select"]


def select(scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor) -> None:
    """Choose the k largest scores among each row's positions first to last - 1.

    scores  [rows, columns]  float32  read within each row's range only; elsewhere anything, NaN included
    first   [rows]           int64    first position that may be chosen
    last    [rows]           int64    one past the last, at most `columns`; last <= first: nothing to choose
    out     [rows, k]        int32    written in full: min(k, last - first) distinct positions, ascending, then -1
    """
    assert scores.dtype == torch.float32, f"scores are {scores.dtype}"
    assert out.shape == (scores.shape[0], k), f"out is {tuple(out.shape)}, not {(scores.shape[0], k)}"
    if on_cpu("select", scores):
        reference.select(scores, first, last, k, out)
        return
    from kernels.select import kernel

    assert scores.stride(1) == 1, "scores of a row do not lie side by side"
    assert out.stride(1) == 1, "picks of a row do not lie side by side"
    kernel.select(scores, first, last, k, out)
