"""The definition of copies by address, in torch on the CPU. Knows layouts; nothing of who holds the memory."""

import torch
from torch import Tensor

from kernels.address import rows_at, store_at, store_values_at, values_at
from kernels.layout import BLOCK_ROWS, KeyLayout

__all__ = ["copy_keys", "copy_rows"]


def _used(sources: Tensor, targets: Tensor, source_offset: int, target_offset: int) -> tuple[Tensor, Tensor]:
    used = (sources != 0) & (targets != 0)
    return sources[used] + source_offset, targets[used] + target_offset


def copy_rows(sources: Tensor, targets: Tensor, row_bytes: int, source_offset: int, target_offset: int) -> None:
    at, to = _used(sources, targets, source_offset, target_offset)
    store_at(to, rows_at(at, row_bytes))


def copy_keys(sources: Tensor, targets: Tensor, layout: KeyLayout, source_offset: int, target_offset: int) -> None:
    at, to = _used(sources, targets, source_offset, target_offset)
    if not layout.scale_bytes:
        store_at(to, rows_at(at, layout.key_bytes))
        return
    from_values, from_scales = _parts(at, layout)
    to_values, to_scales = _parts(to, layout)
    store_at(to_values, rows_at(from_values, layout.values_bytes))
    store_values_at(to_scales, values_at(from_scales, torch.int32))


def _parts(addresses: Tensor, layout: KeyLayout) -> tuple[Tensor, Tensor]:
    """Where values and scale of each key lie."""
    number = addresses % BLOCK_ROWS
    run = addresses - number
    return run + number * layout.values_bytes, run + BLOCK_ROWS * layout.values_bytes + number * layout.scale_bytes
