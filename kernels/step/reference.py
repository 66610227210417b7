"""Hidden states and logits of rows, defined in torch over real addresses (CPU).

Invariant: a padding row (place -1, or free) reads zeros and writes nothing.
Source: design, sections 7 and 10.
"""

import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, STATE_FIELDS, StateField, TableField

__all__ = ["follow_rows", "keep_logits", "load_hidden", "store_hidden"]


def load_hidden(table: Tensor, place_of: Tensor, positions: Tensor, out: Tensor) -> None:
    """Read the hidden state of the row before each row; zeros for position 0 and free places.

    out  [T, hidden]  float  device  written in full
    """
    out.zero_()
    for row, (place, position) in enumerate(zip(place_of.tolist(), positions.tolist(), strict=True)):
        if position > 0 and place >= 0 and int(table[place, TableField.ROWS]) > 0:
            kept = tensor_at(int(table[place, TableField.HIDDEN]), (HIDDEN_ROWS, out.shape[1]), torch.float32)
            out[row] = kept[(position - 1) % HIDDEN_ROWS]


def store_hidden(table: Tensor, place_of: Tensor, positions: Tensor, hidden: Tensor) -> None:
    """Keep each row's state after the final norm.

    hidden  [T, hidden]  float  device
    """
    for row, (place, position) in enumerate(zip(place_of.tolist(), positions.tolist(), strict=True)):
        if place >= 0 and int(table[place, TableField.ROWS]) > 0:
            kept = tensor_at(int(table[place, TableField.HIDDEN]), (HIDDEN_ROWS, hidden.shape[1]), torch.float32)
            kept[position % HIDDEN_ROWS] = hidden[row]


def keep_logits(logits: Tensor, out: Tensor, bad_layer: Tensor, layer: int) -> None:
    """Copy, check, flag; see the package page."""
    out.copy_(logits)
    bad = ~torch.isfinite(out).all(-1)
    bad_layer.copy_(torch.where(bad & (bad_layer < 0), layer, bad_layer))


def follow_rows(table: Tensor, positions: Tensor, mirrored: Tensor) -> None:
    """See the package page."""
    each = positions.shape[0] // table.shape[0]
    for place in range(table.shape[0]):
        mirrored[place] = 0
        if int(table[place, TableField.ROWS]) > 0:
            state = tensor_at(int(table[place, TableField.STATE]), (STATE_FIELDS,), torch.int64)
            state[StateField.LOGICAL] = positions[place * each]
            mirrored[place] = state[StateField.MIRRORED] // BLOCK_ROWS * BLOCK_ROWS
