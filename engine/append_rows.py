"""Rows of a layer that an append reads, by a chunk's block addresses: all of a history in order, or those that it picked. Holds nothing."""

import torch
from torch import Tensor

from kernels.gather import gather_blocks, gather_rows
from kernels.layout import BLOCK_ROWS, BlockLayout
from memory.append import AppendChunk

__all__ = ["bring_rows", "picked_rows"]


def bring_rows(chunk: AppendChunk, layout: BlockLayout, local: int, first: int, end: int, held: Tensor) -> None:
    """Gather rows [first, end) of one layer to their places in `held`, uint8 [rows, row_bytes], in whole blocks from that of `first`."""
    if first < end:
        start = first // BLOCK_ROWS
        rows = end - start * BLOCK_ROWS
        gather_blocks(chunk.block_addresses[start:], layout.row_offset(local), rows, layout.row.row_bytes, held[start * BLOCK_ROWS :])


def picked_rows(chunk: AppendChunk, layout: BlockLayout, local: int, selection: Tensor) -> Tensor:
    """The picked rows of one layer, uint8 [rows, k, row_bytes]; zeros where a pick is unused."""
    row_bytes = layout.row.row_bytes
    position = selection.long().clamp_min(0)
    address = chunk.block_addresses[position // BLOCK_ROWS] + position % BLOCK_ROWS * row_bytes + layout.row_offset(local)
    rows = torch.empty((*position.shape, row_bytes), dtype=torch.uint8, device=position.device)
    gather_rows(torch.where(selection >= 0, address, 0).flatten(), row_bytes, rows.view(-1, row_bytes))
    return rows
