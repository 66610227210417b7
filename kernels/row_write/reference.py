"""New rows and keys in torch: norm, rotate, pack, store, in this order. Holds nothing."""

import torch
from torch import Tensor

from kernels.norm.reference import layer_norm, rms_norm
from kernels.quantize.reference import append_keys, append_rows
from kernels.rope.reference import rotate, rotate_first
from kernels.row_write.source import NewKeys, NewRows

__all__ = ["write_keys", "write_layer", "write_rows"]


def _kept(values: Tensor, positions: Tensor | None) -> Tensor:
    """Values of rows, zeros in the row of position 0: whatever it would hold, NaN included, is not kept."""
    return values if positions is None else torch.where((positions > 0)[:, None], values, 0.0)


def write_rows(new: NewRows, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
    """See the package page."""
    latent = rms_norm(new.projected[:, : new.layout.latent], new.weight, new.eps)
    rope = rotate(new.projected[:, new.layout.latent :], *rope_table)
    latent, rope = _kept(latent, positions), _kept(rope, positions)
    append_rows(latent, rope, new.destinations, new.offset_bytes, new.layout)
    if new.copies is not None:
        for addresses in new.copies.T:
            append_rows(latent, rope, addresses, new.copies_offset_bytes, new.layout)


def write_keys(new: NewKeys, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
    """See the package page."""
    keys = _kept(rotate_first(layer_norm(new.projected, new.weight, new.bias, new.eps), *rope_table), positions)
    append_keys(keys, new.destinations, new.offset_bytes, new.layout)
    append_keys(keys, new.pages, 0, new.layout)


def write_layer(
    latent: Tensor, weight: Tensor, eps: float, rows: NewRows, keys: NewKeys | None, head_weights: Tensor | None,
    rope_table: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See the package page."""
    write_rows(rows, rope_table, None)
    if keys is not None:
        write_keys(keys, rope_table, None)
    return rms_norm(latent, weight, eps), None if head_weights is None else head_weights.to(torch.float32)
