"""The MTP row of each place's first row, which a step writes when it begins. Holds nothing."""

from torch import Tensor

from engine.rows import Destinations, store
from engine.stage import Stage
from kernels.step import load_hidden

__all__ = ["write_first"]


def write_first(
    stage: Stage, table: Tensor, place_of: Tensor, positions: Tensor, embedded: Tensor, rope: tuple[Tensor, Tensor], to: Destinations,
    before: Tensor,
) -> None:  # fmt: skip
    """From the state before it; those of accepted drafts follow when their states are known.

    place_of   [places]      int32  of each place's first row, any stride, as positions
    embedded   [places, H]   embedding of what each first row feeds
    rope       2 [places, Dr / 2]   its table
    to         of all rows of the step
    before     [places, H]   written in full: the state before each first row
    """
    block = stage.model.mtp
    assert block is not None, "asked for where a block is"
    load_hidden(table, place_of, positions, before)
    x = block.join_input(embedded, before)
    each = to.rows.shape[0] // place_of.shape[0]
    first = Destinations(to.rows[::each], to.keys[::each], to.pages[:, ::each])
    layer = block.layer
    store(layer, layer.attention_input(x), rope, stage.layout, stage.mtp_layer, len(stage.main_groups), first, positions)
