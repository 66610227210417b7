"""Step inputs and outputs, defined in torch over real addresses (CPU).

Invariants:
1. A place with ROWS 0 is inert: its rows read position 0, token 0, mirrored 0 and write nothing.
2. `mirrored` is read once a step, rounded down to whole blocks: rows of a partly flushed block stay ring rows, because a later copy of
   that block writes their bytes in RAM again. All layers use that snapshot.
Source: design, sections 7 and 10.
"""

import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, STATE_FIELDS, StateField, TableField

__all__ = ["advance", "load_hidden", "snapshot", "store_hidden"]


def _live(table: Tensor) -> list[tuple[int, Tensor]]:
    """Places that hold a session, with their state."""
    states = table[:, TableField.STATE].tolist()
    rows = table[:, TableField.ROWS].tolist()
    return [(place, tensor_at(states[place], (STATE_FIELDS,), torch.int64)) for place in range(len(rows)) if rows[place] > 0]


def snapshot(table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor) -> None:
    """Read where each row stands, at the start of a step of one row a place.

    table      [places, fields]  int64  device
    place_of   [T]               int32  device  step-table place of each row
    positions  [T]               int64  device  written in full; 0 for free places
    tokens     [T]               int64  device  written in full; 0 for free places
    mirrored   [places]          int64  device  written in full; 0 for free places
    """
    logical_of = torch.zeros(table.shape[0], dtype=torch.int64)
    token_of = torch.zeros(table.shape[0], dtype=torch.int64)
    mirrored.zero_()
    for place, state in _live(table):
        logical_of[place] = state[StateField.LOGICAL]
        token_of[place] = state[StateField.TOKEN]
        mirrored[place] = state[StateField.MIRRORED] // BLOCK_ROWS * BLOCK_ROWS
    positions.copy_(logical_of[place_of.long()])
    tokens.copy_(token_of[place_of.long()])


def load_hidden(table: Tensor, place_of: Tensor, positions: Tensor, out: Tensor) -> None:
    """Read the hidden state of the row before each row; zeros for position 0 and free places.

    out  [T, hidden]  f32  device  written in full
    """
    out.zero_()
    for row, (place, position) in enumerate(zip(place_of.tolist(), positions.tolist(), strict=True)):
        if position > 0 and place >= 0 and int(table[place, TableField.ROWS]) > 0:
            kept = tensor_at(int(table[place, TableField.HIDDEN]), (HIDDEN_ROWS, out.shape[1]), torch.float32)
            out[row] = kept[(position - 1) % HIDDEN_ROWS]


def store_hidden(table: Tensor, place_of: Tensor, positions: Tensor, hidden: Tensor) -> None:
    """Keep each row's state after the final norm.

    hidden  [T, hidden]  f32  device
    """
    for row, (place, position) in enumerate(zip(place_of.tolist(), positions.tolist(), strict=True)):
        if place >= 0 and int(table[place, TableField.ROWS]) > 0:
            kept = tensor_at(int(table[place, TableField.HIDDEN]), (HIDDEN_ROWS, hidden.shape[1]), torch.float32)
            kept[position % HIDDEN_ROWS] = hidden[row]


def advance(table: Tensor, place_of: Tensor, tokens: Tensor, bad_layer: Tensor) -> None:
    """Feed the sampled tokens back: TOKEN becomes the new token, LOGICAL grows by one, BAD_LAYER keeps its first layer.

    tokens     [T]  int64  device  one row a place
    bad_layer  [T]  int64  device  first global layer whose output was not finite, else -1
    """
    rows_of = dict(zip(place_of.tolist(), range(place_of.shape[0]), strict=True))
    for place, state in _live(table):
        row = rows_of[place]
        state[StateField.TOKEN] = tokens[row]
        state[StateField.LOGICAL] += 1
        if int(state[StateField.BAD_LAYER]) < 0:
            state[StateField.BAD_LAYER] = bad_layer[row]
