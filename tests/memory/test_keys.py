"""Key pages and a session's table of them."""

import pytest
import torch

from kernels.address import tensor_at
from kernels.layout import PAGE_KEYS
from memory.errors import PoolExhausted
from memory.keys import KeyPages, PageTable
from memory.ledger import Ledger
from memory.pool import Pool, allocated
from tests.memory.memory_world import LAYOUT

PAGE = PAGE_KEYS * LAYOUT.key.key_bytes
SPAN = LAYOUT.key_layers * PAGE


def pool(budget_bytes: int | None = None) -> Pool:
    return Pool(torch.device("cpu"), budget_bytes, Ledger())


def test_every_layer_has_pages_of_its_own() -> None:
    """Pages written through their views are read back at the device table's addresses, layer by layer."""
    buffers = pool()
    table = PageTable(KeyPages(LAYOUT, buffers), 3)
    write = table.ensure(2)
    assert write is not None
    write()
    for layer in range(LAYOUT.key_layers):
        for page in range(2):
            table.view(layer, page).fill_(10 * layer + page + 1)
    for layer in range(LAYOUT.key_layers):
        for page in range(2):
            assert (tensor_at(int(table.table[layer, page]), (PAGE,), torch.uint8) == 10 * layer + page + 1).all()
    assert table.table[:, 2].tolist() == [0] * LAYOUT.key_layers
    table.check_integrity()


def test_only_new_entries_are_written() -> None:
    """A later ensure writes no entry that a step may be reading, and nothing when the pages are there."""
    buffers = pool()
    table = PageTable(KeyPages(LAYOUT, buffers), 3)
    first = table.ensure(1)
    assert first is not None
    first()
    old = table.table[:, 0].tolist()
    second = table.ensure(2)
    assert second is not None
    table.table[:, 0] = -5
    second()
    assert table.table[:, 0].tolist() == [-5] * LAYOUT.key_layers
    assert table.addresses[:, 0].tolist() == old
    assert table.ensure(2) is None


def test_pages_are_reserved_at_once_and_taken_one_by_one() -> None:
    """A table of three pages reserves them all, holds what was ensured, and a budget short by one byte is refused whole."""
    entries = allocated(8 * LAYOUT.key_layers * 3)
    buffers = pool(3 * allocated(SPAN) + entries)
    table = PageTable(KeyPages(LAYOUT, buffers), 3)
    table.ensure(1)
    assert buffers.statistics().allocated_bytes == allocated(SPAN) + entries
    assert buffers.statistics().reserved_bytes == 2 * allocated(SPAN)
    table.ensure(3)
    table.close()
    assert buffers.statistics().allocated_bytes == buffers.statistics().reserved_bytes == 0
    short = pool(3 * allocated(SPAN) + entries - 1)
    with pytest.raises(PoolExhausted):
        PageTable(KeyPages(LAYOUT, short), 3)
    assert short.statistics().allocated_bytes == short.statistics().reserved_bytes == 0


def test_shared_pages_survive_a_cut() -> None:
    """A page that another holder shares keeps its keys when its first session is cut, and the session's next page is another one."""
    buffers = pool()
    pages = KeyPages(LAYOUT, buffers)
    table = PageTable(pages, 2)
    table.ensure(2)
    table.view(1, 1).fill_(9)
    shared = table.share(2)
    table.cut(1)
    table.trim()
    table.ensure(2)
    table.view(1, 1).fill_(4)
    assert (pages.page(shared[1], 1) == 9).all()
    assert pages.references(shared[0]) == 2
    assert pages.references(shared[1]) == 1
    pages.check_integrity()
    table.check_integrity()
    for span in shared:
        pages.release(span)
    table.close()
    assert buffers.statistics().buffers == 0


def test_a_moved_table_keeps_its_pages() -> None:
    """After growing, the larger table has the old addresses in the new row stride."""
    buffers = pool()
    table = PageTable(KeyPages(LAYOUT, buffers), 1)
    table.ensure(1)
    old = table.addresses[:, 0].tolist()
    table.grow(3)
    larger = buffers.take(8 * 3 * LAYOUT.key_layers, "tables").view(torch.int64).view(LAYOUT.key_layers, 3)
    buffers.give(table.move_table(larger))
    assert table.table[:, 0].tolist() == old
    assert table.table[:, 1:].tolist() == [[0, 0]] * LAYOUT.key_layers
    table.ensure(3)
    table.check_integrity()
