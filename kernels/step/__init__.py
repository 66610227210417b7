"""What a decode step reads from and writes to its sessions' device state, through the step table.

`reference.py` is the definition, `kernel.py` the same on a device. No host value passes through here: positions, tokens and counts come
from the state, so a captured step replays unchanged.
"""

from torch import Tensor

from kernels.place import on_cpu
from kernels.step import reference

__all__ = ["advance", "load_hidden", "snapshot", "store_hidden"]


def snapshot(table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor) -> None:
    """Read where each row stands, at the start of a step of one row a place.

    table      [places, fields]  int64  device
    place_of   [T]               int32  device  step-table place of each row
    positions  [T]               int64  device  written in full; 0 for free places
    tokens     [T]               int64  device  written in full; 0 for free places
    mirrored   [places]          int64  device  written in full, whole blocks; 0 for free places
    """
    if on_cpu("snapshot", table):
        reference.snapshot(table, place_of, positions, tokens, mirrored)
    else:
        from kernels.step import kernel

        kernel.snapshot(table, place_of, positions, tokens, mirrored)


def load_hidden(table: Tensor, place_of: Tensor, positions: Tensor, out: Tensor) -> None:
    """Read the hidden state of the row before each row; zeros for position 0 and free places.

    positions  [T]          int64  device
    out        [T, hidden]  f32    device  contiguous; written in full
    """
    assert out.is_contiguous(), "out is not contiguous"
    if on_cpu("load_hidden", out):
        reference.load_hidden(table, place_of, positions, out)
    else:
        from kernels.step import kernel

        kernel.load_hidden(table, place_of, positions, out)


def store_hidden(table: Tensor, place_of: Tensor, positions: Tensor, hidden: Tensor) -> None:
    """Keep each row's state after the final norm; rows of free places are not kept.

    positions  [T]          int64  device  positions of one place lie within HIDDEN_ROWS of one another
    hidden     [T, hidden]  f32    device
    """
    if on_cpu("store_hidden", hidden):
        reference.store_hidden(table, place_of, positions, hidden)
    else:
        from kernels.step import kernel

        kernel.store_hidden(table, place_of, positions, hidden)


def advance(table: Tensor, place_of: Tensor, tokens: Tensor, bad_layer: Tensor) -> None:
    """Feed the sampled tokens back: TOKEN becomes the new token, LOGICAL grows by one, BAD_LAYER keeps its first layer.

    tokens     [T]  int64  device  one row a place
    bad_layer  [T]  int64  device  first global layer whose output was not finite, else -1
    """
    if on_cpu("advance", table):
        reference.advance(table, place_of, tokens, bad_layer)
    else:
        from kernels.step import kernel

        kernel.advance(table, place_of, tokens, bad_layer)
