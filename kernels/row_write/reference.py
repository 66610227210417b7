"""New rows and keys in torch: norm, rotate, pack, store, in this order. Holds nothing."""

import torch
from torch import Tensor

from kernels.layout import KeyLayout, RowLayout
from kernels.norm.reference import layer_norm, rms_norm
from kernels.quantize.reference import append_keys, append_rows
from kernels.rope.reference import rotate, rotate_first

__all__ = ["write_keys", "write_rows"]


def _kept(values: Tensor, positions: Tensor | None) -> Tensor:
    """Values of rows, zeros in the row of position 0: whatever it would hold, NaN included, is not kept."""
    return values if positions is None else torch.where((positions > 0)[:, None], values, 0.0)


def write_rows(
    projected: Tensor, weight: Tensor, eps: float, rope_table: tuple[Tensor, Tensor], destinations: Tensor, offset_bytes: int,
    layout: RowLayout, positions: Tensor | None,
) -> None:  # fmt: skip
    """See the package page."""
    latent = rms_norm(projected[:, : layout.latent], weight, eps)
    rope = rotate(projected[:, layout.latent :], *rope_table)
    append_rows(_kept(latent, positions), _kept(rope, positions), destinations, offset_bytes, layout)


def write_keys(
    projected: Tensor, weight: Tensor, bias: Tensor, eps: float, rope_table: tuple[Tensor, Tensor], destinations: Tensor,
    offset_bytes: int, pages: Tensor, layout: KeyLayout, positions: Tensor | None,
) -> None:  # fmt: skip
    """See the package page."""
    keys = _kept(rotate_first(layer_norm(projected, weight, bias, eps), *rope_table), positions)
    append_keys(keys, destinations, offset_bytes, layout)
    append_keys(keys, pages, 0, layout)
