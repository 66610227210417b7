"""The hidden states that a decode step reads and keeps, through the step table, and its logits. Its rows are `kernels/verify`'s.

`reference.py` is the definition, `kernel.py` the same on a device. No host value passes through here, so a captured step replays unchanged.
"""

from torch import Tensor

from kernels.place import on_cpu
from kernels.step import reference

__all__ = ["follow_rows", "keep_logits", "load_hidden", "store_hidden"]


def load_hidden(table: Tensor, place_of: Tensor, positions: Tensor, out: Tensor) -> None:
    """Read the hidden state of the row before each row; zeros for position 0 and free places.

    positions  [T]          int64  device  any stride, as place_of
    out        [T, hidden]  float  device  contiguous; written in full, rounded to its dtype
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
    hidden     [T, hidden]  float  device  kept in float32
    """
    if on_cpu("store_hidden", hidden):
        reference.store_hidden(table, place_of, positions, hidden)
    else:
        from kernels.step import kernel

        kernel.store_hidden(table, place_of, positions, hidden)


def keep_logits(logits: Tensor, out: Tensor, bad_layer: Tensor, layer: int) -> None:
    """Keep logits in float32, and note rows whose logits are not finite.

    logits     [T, V]  float  device
    out        [T, V]  f32    device  contiguous; written in full
    bad_layer  [T]     int64  device  becomes `layer` where it was negative and the row is not finite
    """
    assert out.shape == logits.shape, f"{tuple(out.shape)} for logits of {tuple(logits.shape)}"
    assert out.is_contiguous(), "out is not contiguous"
    assert bad_layer.shape == logits.shape[:1], f"{tuple(bad_layer.shape)} flags for {logits.shape[0]} rows"
    if on_cpu("keep_logits", out):
        reference.keep_logits(logits, out, bad_layer, layer)
    else:
        from kernels.step import kernel

        kernel.keep_logits(logits, out, bad_layer, layer)


def follow_rows(table: Tensor, positions: Tensor, mirrored: Tensor) -> None:
    """Begin a step at a peer, whose query rows are known: LOGICAL becomes the position of each place's first, and MIRRORED is read.

    positions  [places * R]  int64  device
    mirrored   [places]      int64  device  written in full: rounded down to whole blocks, as `kernels/verify` does; 0 for a free place
    """
    assert positions.shape[0] % table.shape[0] == 0, f"{positions.shape[0]} rows of {table.shape[0]} places"
    assert mirrored.shape[0] == table.shape[0], f"{tuple(mirrored.shape)} counts for {table.shape[0]} places"
    if on_cpu("follow_rows", table):
        reference.follow_rows(table, positions, mirrored)
    else:
        from kernels.step import kernel

        kernel.follow_rows(table, positions, mirrored)
