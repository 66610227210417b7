"""The definition of where new and resident rows lie, in torch on the CPU. Reads tables only; writes addresses only."""

import torch
from torch import Tensor

from kernels.address import values_at
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, RING_BLOCKS, WHOLE, BlockLayout, PageShare, TableField
from kernels.place import live_rows
from kernels.round.plan import RoundPlan

__all__ = ["locate_new", "locate_resident"]


def _blocks_of(table: Tensor, layout: BlockLayout, place: Tensor, position: Tensor) -> Tensor:
    """Address of the block that a new row goes to: in the ring, or in the history of a place without one. int64 [n]."""
    blocks = table[place, TableField.RING] + position // BLOCK_ROWS % RING_BLOCKS * layout.block_bytes
    resident = table[place, TableField.RING] == 0
    entries = table[place[resident], TableField.BLOCKS] + 8 * (position[resident] // BLOCK_ROWS)
    blocks[resident] = values_at(entries, torch.int64)
    assert bool((blocks != 0).all()), "a new row's block is not in the block table"
    return blocks


def locate_new(
    table: Tensor, block_layout: BlockLayout, place_of: Tensor, positions: Tensor, share: PageShare = WHOLE
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    place, live = live_rows(table, place_of)
    place, position = place[live], positions[live]
    blocks = _blocks_of(table, block_layout, place, position)
    row = position % BLOCK_ROWS
    rows, keys = torch.zeros_like(positions), torch.zeros_like(positions)
    rows[live] = blocks + row * block_layout.row.row_bytes
    keys[live] = blocks + block_layout.keys_offset + row * block_layout.key.step_bytes
    pages = torch.zeros((block_layout.key_layers, positions.shape[0]), dtype=torch.int64)
    here = position // PAGE_KEYS % share.devices == share.device
    live[live.clone()], place, position, row = here, place[here], position[here], row[here]
    layer = torch.arange(block_layout.key_layers)[:, None]
    entries = table[place, TableField.PAGES] + 8 * (layer * table[place, TableField.PAGES_MAX] + position // PAGE_KEYS // share.devices)
    page = values_at(entries.flatten(), torch.int64).view(entries.shape)
    assert bool((page != 0).all()), "a new key's page is not in the page table"
    pages[:, live] = page + position % PAGE_KEYS // BLOCK_ROWS * block_layout.key.run_bytes + row * block_layout.key.step_bytes
    return rows, keys, pages


def locate_resident(table: Tensor, block_layout: BlockLayout, place_of: Tensor, selection: Tensor, plan: RoundPlan) -> None:
    place, live = live_rows(table, place_of)
    used = (selection >= 0) & live[:, None]
    owner = place[:, None].expand(selection.shape)[used]
    position = selection[used].long()
    blocks = values_at(table[owner, TableField.BLOCKS] + 8 * (position // BLOCK_ROWS), torch.int64)
    assert bool((blocks != 0).all()), "a selected position's block is not in the block table"
    plan.forget()
    if selection.data_ptr() != plan.selection.data_ptr():
        plan.selection.copy_(selection)
    plan.source[used] = blocks + position % BLOCK_ROWS * block_layout.row.row_bytes
