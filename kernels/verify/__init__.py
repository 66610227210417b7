"""Drafted rows of a step: laying them out, judging them, keeping the next drafts. All on the device, no host value passes through.

Row r of a step is row r % R of place r // R, R query rows a place. Row 0 feeds TOKEN at LOGICAL, row j the j-th draft at LOGICAL + j.
A row without a draft, or past its place's own ROWS, is padding: place -1.

Rule: a draft is accepted while it equals the sample of the row before it. Every row is sampled by the request's own seed at its own
position, so what is accepted is exactly what would have been sampled without drafts, at any temperature.
"""

from torch import Tensor

from kernels.layout import DRAFTS_MAX, STATE_FIELDS
from kernels.place import on_cpu
from kernels.verify import reference

__all__ = ["accept_rows", "keep_drafts", "read_standing", "spread_rows", "write_standing"]


def spread_rows(
    table: Tensor, place_of: Tensor, positions: Tensor, tokens: Tensor, mirrored: Tensor, judged: Tensor, bad_layer: Tensor
) -> None:  # fmt: skip
    """Name every row of a step: its place, where it stands, what it feeds. All outputs are written in full.

    table      [places, fields]  int64  device
    place_of   [places * R]      int32  device  place of each live row, -1 for padding
    positions  [places * R]      int64  device  LOGICAL + j; 0 for padding
    tokens     [places * R]      int64  device  TOKEN or a draft; 0 for padding
    mirrored   [places]          int64  device  the step's snapshot of MIRRORED, whole blocks; 0 for free places
    judged     [places]          int64  device  drafts among its rows
    bad_layer  [places * R]      int64  device  -1: nothing is known to be broken
    """
    assert place_of.shape[0] % table.shape[0] == 0, f"{place_of.shape[0]} rows for {table.shape[0]} places"
    assert place_of.shape[0] <= (DRAFTS_MAX + 1) * table.shape[0], f"at most {DRAFTS_MAX + 1} rows a place"
    if on_cpu("spread_rows", table):
        reference.spread_rows(table, place_of, positions, tokens, mirrored, judged, bad_layer)
    else:
        from kernels.verify import kernel

        kernel.spread_rows(table, place_of, positions, tokens, mirrored, judged, bad_layer)


def accept_rows(
    table: Tensor, place_of: Tensor, tokens: Tensor, samples: Tensor, bad_layer: Tensor, output_counts: Tensor, accepted: Tensor,
    next_of: Tensor,
) -> None:  # fmt: skip
    """Judge the drafts of every place and move its state past what was accepted.

    The state's TOKEN becomes the last accepted row's sample, LOGICAL grows by the accepted rows, BAD_LAYER keeps its first layer among
    them, and the drafts are used up. Samples of accepted rows are counted for penalties; a refused row leaves nothing.

    table          [places, fields]  int64  device
    place_of       [places * R]      int32  device  from `spread_rows`
    tokens         [places * R]      int64  device  what each row fed
    samples        [places * R]      int64  device  what each row's logits say comes next
    bad_layer      [places * R]      int64  device  first global layer whose output was not finite, else -1
    output_counts  [places]          int64  device  address of int32 [V], times each token was generated; 0: none
    accepted       [places]          int64  device  written in full: rows that count, at least 1; 0 for a free place
    next_of        [places * R]      int32  device  written in full: rows whose follower gets an MTP row. The place of accepted rows but the
                                                    last; of the last too where the place may draft (ROWS > 1); else -1
    """
    assert place_of.shape == tokens.shape == samples.shape == bad_layer.shape == next_of.shape, "rows of different steps"
    assert accepted.shape == output_counts.shape == (table.shape[0],), f"{tuple(accepted.shape)} for {table.shape[0]} places"
    if on_cpu("accept_rows", table):
        reference.accept_rows(table, place_of, tokens, samples, bad_layer, output_counts, accepted, next_of)
    else:
        from kernels.verify import kernel

        kernel.accept_rows(table, place_of, tokens, samples, bad_layer, output_counts, accepted, next_of)


def keep_drafts(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
    """Keep the next step's drafts in the state: at most ROWS - 1, none after an end of text (TOKEN included).

    table   [places, fields]  int64  device
    drafts  [places, k]       int64  device  k at most DRAFTS_MAX
    ends    [n]               int64  device  token ids that end a text
    """
    assert drafts.shape[0] == table.shape[0], f"drafts of {drafts.shape[0]} places for {table.shape[0]}"
    assert 1 <= drafts.shape[1] <= DRAFTS_MAX, f"{drafts.shape[1]} drafts"
    if on_cpu("keep_drafts", table):
        reference.keep_drafts(table, drafts, ends)
    else:
        from kernels.verify import kernel

        kernel.keep_drafts(table, drafts, ends)


def read_standing(table: Tensor, standing: Tensor) -> None:
    """Where the sessions of a step stand, for other stages that hold rows of them.

    table     [places, fields]        int64  device
    standing  [places, STATE_FIELDS]  int64  device  written in full: each place's state; zeros for a free place
    """
    assert standing.shape == (table.shape[0], STATE_FIELDS), f"{tuple(standing.shape)} for {table.shape[0]} places"
    if on_cpu("read_standing", table):
        reference.read_standing(table, standing)
    else:
        from kernels.verify import kernel

        kernel.read_standing(table, standing)


def write_standing(table: Tensor, standing: Tensor) -> None:
    """Make the sessions of a step stand where another stage's do: LOGICAL, TOKEN and the drafts; what is a stage's own stays.

    table     [places, fields]        int64  device
    standing  [places, STATE_FIELDS]  int64  device  from `read_standing`, of the same sessions in the same places
    """
    assert standing.shape == (table.shape[0], STATE_FIELDS), f"{tuple(standing.shape)} for {table.shape[0]} places"
    if on_cpu("write_standing", table):
        reference.write_standing(table, standing)
    else:
        from kernels.verify import kernel

        kernel.write_standing(table, standing)
