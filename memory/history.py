"""A session's block table: which block holds which 64 rows, for the host and for the device.

Holds block ids in order of position, their addresses on the host and the device's int64 table of them. The counts of rows are
`counts.py`'s. `DeviceBlocks` gives blocks of device memory one at a time, as `Arena` gives blocks of host memory.

Invariants:
1. `addresses[b]` is the address of block `ids[b]` for b < blocks, and 0 past it.
2. The device table equals `addresses` for b < blocks once the write that `ensure` returned has run; entries past it may be stale and
   are never read: no submitted step reaches positions whose blocks were not ensured before it.
3. A table's address never changes but in `grow`, which no step in flight may see.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy
import torch
from torch import Tensor

from kernels.layout import BlockLayout
from memory.allotment import Allotment, Store
from memory.arena import BlockId, BlockPlace
from memory.pool import Pool
from memory.staging import pinned

__all__ = ["BlockStore", "DeviceBlocks", "History", "TableWrite"]


class BlockStore(Store[BlockId], Protocol):
    """Blocks with addresses: `Arena` (host) and `DeviceBlocks` (device)."""

    def place(self, block: BlockId) -> BlockPlace:
        """Where a taken block lies."""
        ...


class DeviceBlocks:
    """Blocks in device memory, one exact-size buffer each. Loop thread only."""

    def __init__(self, layout: BlockLayout, pool: Pool) -> None:
        self._block_bytes = layout.block_bytes
        self._pool = pool
        self._buffer_of: dict[BlockId, Tensor] = {}
        self._references_of: dict[BlockId, int] = {}
        self._next = 0

    def reserve(self, blocks: int) -> None:
        """Keep device memory for `blocks` later takes. Raises PoolExhausted; nothing is reserved then."""
        self._pool.reserve(self._block_bytes, blocks)

    def unreserve(self, blocks: int) -> None:
        """Give up blocks kept by `reserve`."""
        self._pool.unreserve(self._block_bytes, blocks)

    def take(self, *, reserved: bool = False) -> BlockId:
        """A zero-filled block with one reference. Raises PoolExhausted (never with `reserved`)."""
        buffer = self._pool.take(self._block_bytes, "blocks", reserved=reserved)
        block = BlockId(self._next)
        self._next += 1
        self._buffer_of[block] = buffer
        self._references_of[block] = 1
        return block

    def retain(self, block: BlockId) -> None:
        """One more reference to a taken block."""
        self._references_of[block] += 1

    def release(self, block: BlockId) -> bool:
        """One reference less; returns whether that freed the block."""
        self._references_of[block] -= 1
        if self._references_of[block]:
            return False
        del self._references_of[block]
        self._pool.give(self._buffer_of.pop(block))
        return True

    def references(self, block: BlockId) -> int:
        """How many hold the block; 0: it is free."""
        return self._references_of.get(block, 0)

    def place(self, block: BlockId) -> BlockPlace:
        """Where a taken block lies; valid while the caller holds a reference."""
        buffer = self._buffer_of[block]
        return BlockPlace(buffer.data_ptr(), buffer)

    def check_integrity(self) -> None:
        """Assert that every block has a buffer of its own and a reference."""
        assert self._buffer_of.keys() == self._references_of.keys()
        assert all(count > 0 for count in self._references_of.values())
        addresses = {buffer.data_ptr() for buffer in self._buffer_of.values()}
        assert len(addresses) == len(self._buffer_of), "two blocks share an address"


class TableWrite:
    """A write of some entries of a device table, to be submitted on the stream whose steps read the table."""

    def __init__(self, entries: Tensor, values: Tensor) -> None:
        self.entries = entries
        self.values = pinned(values, entries.device)

    def __call__(self) -> None:
        self.entries.copy_(self.values, non_blocking=True)


class History:
    """Blocks of one session. Raises DoesNotFit when made and they cannot be reserved; nothing is held then."""

    def __init__(self, store: BlockStore, blocks_max: int, pool: Pool, shared: Sequence[BlockId] = ()) -> None:
        """Args: shared: the first blocks, from another history's `share`; their references are this one's, also when it raises."""
        self.store = store
        self._pool = pool
        self.allotment: Allotment[BlockId] = Allotment(store, blocks_max, shared)
        try:
            self.table = pool.take(8 * blocks_max, "tables").view(torch.int64)  # [blocks_max]
        except BaseException:
            self.allotment.close()
            raise
        self.addresses = numpy.zeros(blocks_max, dtype=numpy.int64)
        for number, block in enumerate(shared):
            self.addresses[number] = store.place(block).address
        if shared:
            self.table.copy_(pinned(torch.from_numpy(self.addresses), self.table.device), non_blocking=True)

    @property
    def blocks(self) -> int:
        """Blocks held now."""
        return len(self.allotment.ids)

    @property
    def blocks_max(self) -> int:
        """Blocks this history may hold."""
        return self.allotment.units_max

    def ensure(self, blocks: int) -> TableWrite | None:
        """Hold at least `blocks` blocks; returns the write of the new table entries, or None when there are none."""
        first = self.allotment.ensure(blocks)
        if first == self.blocks:
            return None
        for number in range(first, self.blocks):
            self.addresses[number] = self.store.place(self.allotment.ids[number]).address
        return TableWrite(self.table[first : self.blocks], torch.from_numpy(self.addresses[first : self.blocks].copy()))

    def cut(self, blocks: int) -> None:
        """Keep the first `blocks` blocks; the others stay spare until `trim`."""
        self.allotment.cut(blocks)
        self.addresses[self.blocks :] = 0

    def trim(self) -> None:
        """Free the spare blocks. Call once no operation in flight touches them."""
        self.allotment.trim()

    def view(self, block: int) -> Tensor:
        """uint8 [block_bytes]: the bytes of positions 64 * block to 64 * block + 63."""
        return self.store.place(self.allotment.ids[block]).bytes

    def share(self, blocks: int, first: int = 0) -> list[BlockId]:
        """Blocks `first` to `blocks - 1` with one more reference each, which the caller now holds and gives back to `store`."""
        return self.allotment.share(blocks, first)

    def replace(self, block: int) -> tuple[TableWrite, Callable[[], None]]:
        """Hold a fresh block in place of a shared one, at the same position; its bytes are the caller's to fill.

        Returns: the write of the table's entry, and what lets go of the old block once nothing reads it. Raises: DoesNotFit.
        """
        old = self.allotment.replace(block)
        self.addresses[block] = self.store.place(self.allotment.ids[block]).address
        write = TableWrite(self.table[block : block + 1], torch.from_numpy(self.addresses[block : block + 1].copy()))
        return write, partial(_release, self.store, old)

    def grow(self, blocks_max: int) -> Callable[[], None]:
        """Become entitled to more blocks; call `move_table` next. Returns the undo. Raises DoesNotFit; nothing changed then."""
        return self.allotment.grow(blocks_max)

    def move_table(self, table: Tensor) -> Tensor:
        """Use `table`, int64 [blocks_max], from now on, filled here. Returns the old one. No step in flight may see either."""
        old, self.table = self.table, table
        addresses = numpy.zeros(self.blocks_max, dtype=numpy.int64)
        addresses[: self.blocks] = self.addresses[: self.blocks]
        self.addresses = addresses
        table.copy_(pinned(torch.from_numpy(addresses), table.device), non_blocking=True)
        return old

    def close(self) -> None:
        """Let go of blocks and table. Call once no operation in flight touches them."""
        self.allotment.close()
        self._pool.give(self.table)

    def check_integrity(self) -> None:
        """Assert invariant 1 and the allotment's."""
        self.allotment.check_integrity()
        places = [self.store.place(block).address for block in self.allotment.ids]
        assert self.addresses[: self.blocks].tolist() == places, "an address is not its block's"
        assert not self.addresses[self.blocks :].any(), "an address past the last block"


def _release(store: BlockStore, block: BlockId) -> None:
    store.release(block)
