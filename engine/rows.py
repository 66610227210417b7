"""One layer's new rows and keys: quantised once, stored where a step or a chunk says. Holds nothing.

Both ways to write rows, decode and append, come through here, so a row's bytes cannot depend on the way.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from engine.model.indexer import KEY_NORM_EPS
from engine.model.layer import LayerInput, LayerWeights
from kernels.layout import BlockLayout
from kernels.row_write import NewKeys, NewRows, write_keys, write_layer, write_rows

__all__ = ["Copies", "Destinations", "store", "store_input"]


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


@dataclass(frozen=True, slots=True)
class Copies:
    """Where else a layer's new rows go: into picks that were gathered before the rows were there.

    addresses     [T, n]  int64  device  in the first of several compact copies; 0: nowhere
    offset_bytes                 from there to the layer's own copy
    """

    addresses: Tensor
    offset_bytes: int


def store(
    layer: LayerWeights, u: Tensor, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, local: int, key_layer: int | None,
    destinations: Destinations, positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one layer's packed rows, and its index keys where it has any, to ring (or block) and page: where nothing else of it is asked.

    u          [T, hidden]  float  normed input of the layer
    positions  [T] or None  int64  if given, a row at position 0 is stored as zeros: slot 0 of the MTP layer stays empty, the same bytes
                                   in every run
    Args: local: the layer in the stage. key_layer: its selection group if it makes the selection, else None.
    """
    if key_layer is not None:
        write_keys(_new_keys(layer, layer.full_indexer.key_source(u), layout, key_layer, destinations), rope_table, positions)
    write_rows(_new_rows(layer, layer.mla.row_source(u), layout, local, destinations), rope_table, positions)


def store_input(
    layer: LayerWeights, made: LayerInput, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, local: int, key_layer: int | None,
    destinations: Destinations, copies: Copies | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Write one layer's packed rows and index keys from what was made of its input; arguments as in `store`.

    Returns: the normed query latent [T, Rq], and the indexer's head weights, float32 [T, I], of a layer that makes the selection.
    """
    new = _new_rows(layer, made.row, layout, local, destinations)
    if copies is not None:
        new = replace(new, copies=copies.addresses, copies_offset_bytes=copies.offset_bytes)
    keys = None if key_layer is None else _new_keys(layer, made.full_key, layout, key_layer, destinations)
    head_weights = None if key_layer is None else made.full_head_weights
    return write_layer(made.latent, layer.mla.query_norm, layer.mla.norm_eps, new, keys, head_weights, rope_table)


def _new_rows(layer: LayerWeights, source: Tensor, layout: BlockLayout, local: int, destinations: Destinations) -> NewRows:
    return NewRows(source, layer.mla.row_norm, layer.mla.norm_eps, destinations.rows, layout.row_offset(local), layout.row)


def _new_keys(layer: LayerWeights, source: Tensor, layout: BlockLayout, key_layer: int, destinations: Destinations) -> NewKeys:
    indexer, pages = layer.full_indexer, destinations.pages[key_layer]
    offset = key_layer * layout.key_layer_bytes
    return NewKeys(source, indexer.key_norm, indexer.key_bias, KEY_NORM_EPS, destinations.keys, offset, pages, layout.key)
