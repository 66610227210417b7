"""One layer's new rows and keys: quantised once, stored where a step or a chunk says. Holds nothing.

Both ways to write rows, decode and append, come through here, so a row's bytes cannot depend on the way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.layer import LayerWeights
from kernels.layout import BlockLayout
from kernels.quantize import append_keys, append_rows

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
    destinations: Destinations, present: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one layer's packed rows, and its index keys where it has any, to ring (or block) and page.

    u        [T, hidden]  float  normed input of the layer
    present  [T, 1]       bool   rows that are False are stored as zeros: slot 0 of the MTP layer stays empty, the same bytes in every run
    Args: local: the layer in the stage. key_layer: its selection group if it makes the selection, else None.
    """
    if key_layer is not None:
        store_key(layer, u, rope_table, layout, key_layer, destinations, present)
    store_row(layer, u, rope_table, layout, local, destinations, present)


def store_row(
    layer: LayerWeights, u: Tensor, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, local: int, destinations: Destinations,
    present: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one layer's packed rows; see `store`."""
    latent, rope = layer.mla.project_row(u, *rope_table)
    if present is not None:
        latent, rope = torch.where(present, latent, 0.0), torch.where(present, rope, 0.0)
    append_rows(latent, rope, destinations.rows, layout.row_offset(local), layout.row)


def store_key(
    layer: LayerWeights, u: Tensor, rope_table: tuple[Tensor, Tensor], layout: BlockLayout, key_layer: int, destinations: Destinations,
    present: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one full layer's index keys; see `store`."""
    keys = layer.full_indexer.index_key(u, *rope_table)
    if present is not None:
        keys = torch.where(present, keys, 0.0)
    append_keys(keys, destinations.keys, key_layer * layout.key_layer_bytes, layout.key)
    append_keys(keys, destinations.pages[key_layer], 0, layout.key)
