"""Index keys on the device, in pages of 1,024, and a session's table of them.

`KeyPages` holds spans: for one stretch of 1,024 positions the pages of all key layers in one exact-size buffer, because every layer
needs its page at the same moment and shares it with the same sessions. `PageTable` holds one session's spans and the device's int64
table of page addresses. Both placements use them. Knows nothing of what the keys are.

Invariants:
1. A span's pages lie `page_bytes` apart, in the order of the key layers.
2. `addresses[layer, n]` is the address of page n of that layer for n < pages, and 0 past it; the device table equals it for n < pages
   once the write that `ensure` returned has run. Entries past it are never read.
3. A table's address never changes but in `grow`, which no step in flight may see.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NewType

import numpy
import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, WHOLE, BlockLayout, PageShare
from memory.allotment import Allotment
from memory.history import TableWrite
from memory.pool import Pool
from memory.staging import pinned

__all__ = ["PAGE_BLOCKS", "KeyPages", "PageId", "PageTable", "key_moves", "span_of"]

PageId = NewType("PageId", int)  # names a span: page n of every key layer
PAGE_BLOCKS = PAGE_KEYS // BLOCK_ROWS


class KeyPages:
    """Spans of the pages of one device of a stage. Loop thread only."""

    def __init__(self, layout: BlockLayout, pool: Pool, share: PageShare = WHOLE) -> None:
        self.layout = layout
        self.share = share
        self.key_layers = layout.key_layers
        self.page_bytes = layout.key.page_bytes
        self.span_bytes = layout.key_layers * layout.key.page_bytes
        self.pool = pool
        self._buffer_of: dict[PageId, Tensor] = {}
        self._references_of: dict[PageId, int] = {}
        self._next = 0

    def reserve(self, spans: int) -> None:
        """Keep device memory for `spans` later takes. Raises PoolExhausted; nothing is reserved then."""
        self.pool.reserve(self.span_bytes, spans)

    def unreserve(self, spans: int) -> None:
        """Give up spans kept by `reserve`."""
        self.pool.unreserve(self.span_bytes, spans)

    def take(self, *, reserved: bool = False) -> PageId:
        """A zero-filled span with one reference. Raises PoolExhausted (never with `reserved`)."""
        buffer = self.pool.take(self.span_bytes, "pages", reserved=reserved)
        span = PageId(self._next)
        self._next += 1
        self._buffer_of[span] = buffer
        self._references_of[span] = 1
        return span

    def retain(self, span: PageId) -> None:
        """One more reference to a taken span."""
        self._references_of[span] += 1

    def release(self, span: PageId) -> bool:
        """One reference less; returns whether that freed the span."""
        self._references_of[span] -= 1
        if self._references_of[span]:
            return False
        del self._references_of[span]
        self.pool.give(self._buffer_of.pop(span))
        return True

    def references(self, span: PageId) -> int:
        """How many hold the span; 0: it is free."""
        return self._references_of.get(span, 0)

    def page(self, span: PageId, key_layer: int) -> Tensor:
        """uint8 [1024 * key_bytes]: one layer's page of a taken span."""
        return self._buffer_of[span][key_layer * self.page_bytes : (key_layer + 1) * self.page_bytes]

    def span(self, span: PageId) -> Tensor:
        """uint8 [key layers * 1024 * key_bytes]: the pages of a taken span."""
        return self._buffer_of[span]

    def check_integrity(self) -> None:
        """Assert that every span has a buffer of its own and a reference."""
        assert self._buffer_of.keys() == self._references_of.keys()
        assert all(count > 0 for count in self._references_of.values())
        addresses = {buffer.data_ptr() for buffer in self._buffer_of.values()}
        assert len(addresses) == len(self._buffer_of), "two spans share an address"


class PageTable:
    """Pages of one session; of a share of them those of this device, numbered as they stand here.

    Raises PoolExhausted when made and they cannot be reserved; nothing is held then.
    """

    def __init__(self, pages: KeyPages, pages_max: int, shared: Sequence[PageId] = ()) -> None:
        """Args: shared: the first pages, from another table's `share`; their references are this one's, also when it raises."""
        self.store = pages
        self.allotment: Allotment[PageId] = Allotment(pages, pages_max, shared)
        try:
            self.table = self._new_table(pages_max)  # [key layers, pages_max]
        except BaseException:
            self.allotment.close()
            raise
        self.addresses = numpy.zeros((pages.key_layers, self.table.shape[1]), dtype=numpy.int64)
        for number in range(len(shared)):
            self._set_address(number)
        if shared:
            self.table.copy_(pinned(torch.from_numpy(self.addresses), self.table.device), non_blocking=True)

    def _set_address(self, number: int) -> None:
        start = self.store.page(self.allotment.ids[number], 0).data_ptr()
        self.addresses[:, number] = start + self.store.page_bytes * numpy.arange(self.store.key_layers)

    def _new_table(self, pages_max: int) -> Tensor:
        columns = max(1, pages_max)  # a short session may have no page of a share
        size_bytes = 8 * self.store.key_layers * columns
        return self.store.pool.take(size_bytes, "tables").view(torch.int64).view(self.store.key_layers, columns)

    @property
    def pages(self) -> int:
        """Pages held now, a key layer."""
        return len(self.allotment.ids)

    @property
    def pages_max(self) -> int:
        """Pages this session may hold, a key layer; its table may have room for more."""
        return self.allotment.units_max

    def ensure(self, pages: int) -> TableWrite | None:
        """Hold at least `pages` pages a layer; returns the write of the new table entries, or None when there are none."""
        first = self.allotment.ensure(pages)
        if first == self.pages:
            return None
        for number in range(first, self.pages):
            self._set_address(number)
        return TableWrite(self.table[:, first : self.pages], torch.from_numpy(self.addresses[:, first : self.pages].copy()))

    def cut(self, pages: int) -> None:
        """Keep the first `pages` pages; the others stay spare until `trim`."""
        self.allotment.cut(pages)
        self.addresses[:, self.pages :] = 0

    def trim(self) -> None:
        """Free the spare pages. Call once no operation in flight touches them."""
        self.allotment.trim()

    def view(self, key_layer: int, page: int) -> Tensor:
        """uint8 [1024 * key_bytes]: the keys of 1,024 positions of one key layer."""
        return self.store.page(self.allotment.ids[page], key_layer)

    def share(self, pages: int) -> list[PageId]:
        """The first `pages` pages with one more reference each, which the caller now holds."""
        return self.allotment.share(pages)

    def replace(self, page: int) -> tuple[TableWrite, Callable[[], None]]:
        """Hold a fresh page in place of a shared one, at the same positions; its keys are the caller's to fill.

        Returns: the write of the table's entries, and what lets go of the old page once nothing reads it. Raises: PoolExhausted.
        """
        old = self.allotment.replace(page)
        self._set_address(page)
        write = TableWrite(self.table[:, page : page + 1], torch.from_numpy(self.addresses[:, page : page + 1].copy()))
        return write, partial(_release, self.store, old)

    def grow(self, pages_max: int) -> Callable[[], None]:
        """Become entitled to more pages; call `move_table` next. Returns the undo. Raises DoesNotFit; nothing changed then."""
        return self.allotment.grow(pages_max)

    def move_table(self, table: Tensor) -> Tensor:
        """Use `table`, int64 [key layers, pages_max], from now on, filled here. Returns the old one. No step in flight may see either."""
        old, self.table = self.table, table
        addresses = numpy.zeros((self.store.key_layers, table.shape[1]), dtype=numpy.int64)
        addresses[:, : self.pages] = self.addresses[:, : self.pages]
        self.addresses = addresses
        table.copy_(pinned(torch.from_numpy(addresses), table.device), non_blocking=True)
        return old

    def close(self) -> None:
        """Let go of pages and table. Call once no operation in flight touches them."""
        self.allotment.close()
        self.store.pool.give(self.table)

    def check_integrity(self) -> None:
        """Assert invariants 1 and 2 and the allotment's."""
        self.allotment.check_integrity()
        for number, span in enumerate(self.allotment.ids):
            places = [self.store.page(span, layer).data_ptr() for layer in range(self.store.key_layers)]
            assert self.addresses[:, number].tolist() == places, "an address is not its page's"
        assert not self.addresses[:, self.pages :].any(), "an address past the last page"


def span_of(table: PageTable, page: int) -> Tensor:
    """uint8 [key layers * 1024 * key_bytes]: the keys of 1,024 positions of every key layer."""
    return table.store.span(table.allotment.ids[page])


def key_moves(table: PageTable, first: int, blocks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Targets in the pages, and sources in the blocks, of the keys of consecutive blocks, each uint8 [key layers, 64 * key_bytes].

    Args: first: the number of the first block. Pages of theirs that this device has are held. blocks: uint8 [block_bytes] each, anywhere.
    """
    layout, moves = table.store.layout, []
    offset, shape = layout.keys_offset, (layout.key_layers, layout.key_layer_bytes)  # asked once: an import has thousands of blocks
    spans: dict[int, Tensor] = {}
    for number, block in enumerate(blocks, first):
        page, within = divmod(number, PAGE_BLOCKS)
        if not table.store.share.has(page):
            continue
        page = table.store.share.pages(page)
        if page not in spans:
            spans[page] = span_of(table, page).view(shape[0], PAGE_BLOCKS, shape[1])
        moves.append((spans[page][:, within], block[offset:].view(shape)))
    return moves


def _release(pages: KeyPages, span: PageId) -> None:
    pages.release(span)
