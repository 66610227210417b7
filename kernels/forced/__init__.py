"""Picks of the position alone, for measuring at a chosen share of misses: most stay from step to step, some are new at each.

`reference.py` is the definition, `kernel.py` one launch on a device: what is measured is barely disturbed by it.

Choice kept: fresh picks walk through a range that grows by doubling; one that grew with the context would shift every one of them at every
step.
"""

from torch import Tensor

from kernels.forced import reference
from kernels.place import on_cpu

__all__ = ["force_picks"]


def force_picks(positions: Tensor, fresh: int, selection: Tensor) -> None:
    """Replace the picks of rows whose context is longer than the selection, and long enough to give `fresh` picks room.

    positions  [rows]         int64  of the query rows
    selection  [rows, picks]  int32  values of a row side by side; replaced by ascending, distinct positions up to the row's own
    Args: fresh: picks that are new from one position to the next, 1 to picks; the others are 0, 1, 2, ...
    """
    assert selection.shape[0] == positions.shape[0], f"{tuple(selection.shape)} picks for {positions.shape[0]} positions"
    assert 1 <= fresh <= selection.shape[1], f"{fresh} fresh picks of {selection.shape[1]}"
    if on_cpu("force_picks", selection):
        reference.force_picks(positions, fresh, selection)
        return
    from kernels.forced import kernel

    assert selection.stride(1) == 1, "picks of a row do not lie side by side"
    kernel.force_picks(positions, fresh, selection)
