"""One layer's new rows and keys: quantised once, stored where a step or a chunk says. Holds nothing.

Both ways to write rows, decode and append, come through here, so a row's bytes cannot depend on the way.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.model.indexer import KEY_NORM_EPS
from engine.model.layer import LayerWeights
from kernels.layout import BlockLayout
from kernels.row_write import write_keys, write_rows

__all__ = ["Destinations", "store", "store_key", "store_row"]


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where new rows go; 0: nowhere.

    rows   [T]              int64  device  in layer 0 of the ring or block
    keys   [T]              int64  device  in key layer 0 of the same
    pages  [key layers, T]  int64  device  the key in its page
    """

    rows: Tensor
    keys: Tensor
    pages: Tensor


def store(
    layer: LayerWeights, u: Tensor, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, local: int, key_layer: int | None,
    destinations: Destinations, positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one layer's packed rows, and its index keys where it has any, to ring (or block) and page.

    u          [T, hidden]  float  normed input of the layer
    positions  [T] or None  int64  if given, a row at position 0 is stored as zeros: slot 0 of the MTP layer stays empty, the same bytes
                                   in every run
    Args: local: the layer in the stage. key_layer: its selection group if it makes the selection, else None.
    """
    if key_layer is not None:
        store_key(layer, layer.full_indexer.key_source(u), rope_table, layout, key_layer, destinations, positions)
    store_row(layer, layer.mla.row_source(u), rope_table, layout, local, destinations, positions)


def store_row(
    layer: LayerWeights, source: Tensor, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, local: int, destinations: Destinations,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one layer's packed rows, made of `source` [T, R + Dr]; see `store`."""
    mla = layer.mla
    offset = layout.row_offset(local)
    write_rows(source, mla.row_norm, mla.norm_eps, rope_table, destinations.rows, offset, layout.row, positions)


def store_key(
    layer: LayerWeights, source: Tensor, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, key_layer: int, destinations: Destinations,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one full layer's index keys, made of `source` [T, Di]; see `store`."""
    indexer = layer.full_indexer
    write_keys(
        source, indexer.key_norm, indexer.key_bias, KEY_NORM_EPS, rope_table, destinations.keys,
        key_layer * layout.key_layer_bytes, destinations.pages[key_layer], layout.key, positions,
    )  # fmt: skip
