"""The definition of drafted rows, in torch over real addresses (CPU).

Invariants:
1. A free place is inert: its rows are padding, nothing of it is written, and it accepts 0 rows.
2. A place is judged by its own rows; a refused row reaches neither state nor counts.
3. LOGICAL and TOKEN move together, once a step.
4. MIRRORED is read once a step, rounded down to whole blocks: rows of a partly flushed block stay ring rows, because a later copy of that
   block writes their bytes in RAM again. All layers use that snapshot.
Source: design, sections 3 and 10.
"""

import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.layout import BLOCK_ROWS, DRAFTS_MAX, STATE_FIELDS, StateField, TableField

__all__ = ["accept_rows", "keep_drafts", "read_standing", "spread_rows", "write_standing"]

_STANDING = [StateField.LOGICAL, StateField.TOKEN, StateField.DRAFT_COUNT, *range(StateField.DRAFTS, STATE_FIELDS)]


def _busy(table: Tensor) -> list[tuple[int, int, Tensor]]:
    """Places that hold a session, with their query rows and state."""
    rows, states = table[:, TableField.ROWS].tolist(), table[:, TableField.STATE].tolist()
    return [(place, rows[place], tensor_at(states[place], (STATE_FIELDS,), torch.int64)) for place in range(len(rows)) if rows[place] > 0]


def spread_rows(
    table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor, judged: Tensor, bad_layer: Tensor
) -> None:  # fmt: skip
    each = place_of.shape[0] // table.shape[0]
    place_of.fill_(-1)
    positions.zero_()
    tokens.zero_()
    mirrored.zero_()
    judged.zero_()
    bad_layer.fill_(-1)
    for place, rows, state in _busy(table):
        mirrored[place] = state[StateField.MIRRORED] // BLOCK_ROWS * BLOCK_ROWS
        drafts = min(int(state[StateField.DRAFT_COUNT]), rows - 1, each - 1)
        judged[place] = drafts
        first = place * each
        for j in range(drafts + 1):
            place_of[first + j] = place
            positions[first + j] = state[StateField.LOGICAL] + j
            tokens[first + j] = state[StateField.TOKEN] if j == 0 else state[StateField.DRAFTS + j - 1]


def accept_rows(
    table: Tensor, place_of: Tensor, tokens: Tensor, samples: Tensor, bad_layer: Tensor, output_counts: Tensor, accepted: Tensor,
    next_of: Tensor,
) -> None:  # fmt: skip
    each = place_of.shape[0] // table.shape[0]
    accepted.zero_()
    next_of.fill_(-1)
    for place, rows, state in _busy(table):
        first = place * each
        count = 1
        while count < each and place_of[first + count] >= 0 and tokens[first + count] == samples[first + count - 1]:
            count += 1
        accepted[place] = count
        last = first + count - 1
        next_of[first : last + (rows > 1)] = place
        state[StateField.TOKEN] = samples[last]
        state[StateField.LOGICAL] += count
        state[StateField.DRAFT_COUNT] = 0
        bad = [layer for layer in bad_layer[first : last + 1].tolist() if layer >= 0]
        if bad and int(state[StateField.BAD_LAYER]) < 0:
            state[StateField.BAD_LAYER] = bad[0]
        if int(output_counts[place]):
            for token in samples[first : last + 1].tolist():
                tensor_at(int(output_counts[place]) + token * torch.int32.itemsize, (1,), torch.int32).add_(1)


def keep_drafts(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
    stops = set(ends.tolist())
    for place, rows, state in _busy(table):
        count = 0
        token = int(state[StateField.TOKEN])
        while count < min(drafts.shape[1], rows - 1) and token not in stops:
            token = int(drafts[place, count])
            state[StateField.DRAFTS + count] = token
            count += 1
        state[StateField.DRAFTS + count : StateField.DRAFTS + DRAFTS_MAX] = 0
        state[StateField.DRAFT_COUNT] = count


def read_standing(table: Tensor, standing: Tensor) -> None:
    standing.zero_()
    for place, _, state in _busy(table):
        standing[place] = state


def write_standing(table: Tensor, standing: Tensor) -> None:
    for place, _, state in _busy(table):
        state[_STANDING] = standing[place, _STANDING]
