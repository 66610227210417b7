"""Host memory in whole blocks, taken once at start-up.

Holds the registered chunks, a reference count a block and a compact list of freed blocks. Knows nothing of sessions.

Invariants:
1. A block lies in one chunk; chunks are sized to whole blocks.
2. free + taken blocks == blocks; reserved <= free. A block is free exactly when its reference count is 0.
3. Blocks never taken yet are not in the free list and their pages were never touched.
4. Reserved blocks can be taken only with `reserved=True`.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NewType

import numpy
from torch import Tensor

from kernels.layout import BlockLayout
from memory.errors import ArenaFull
from memory.host import HostBuffer, NoRegistration, Registration
from memory.ledger import Ledger

__all__ = ["Arena", "ArenaStatistics", "BlockId", "BlockPlace"]

BlockId = NewType("BlockId", int)

CHUNK_BYTES = 1 << 30  # drivers register a gigabyte in well under a second; larger chunks only coarsen the progress shown


class BlockPlace(NamedTuple):
    """Where a block's bytes are."""

    address: int  # device address of the first byte
    bytes: Tensor  # uint8 [block_bytes], sharing the memory


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Counts of blocks. `references`: the sum over taken blocks."""

    blocks: int
    free: int
    reserved: int
    references: int
    chunks: int
    block_bytes: int
    allocated_bytes: int


class Arena:
    """Blocks of one layout. Loop thread only."""

    def __init__(
        self,
        layout: BlockLayout,
        size_bytes: int,
        ledger: Ledger,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        registration: Registration | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Allocate and register `size_bytes`, rounded down to whole blocks, chunk by chunk.

        Args: chunk_bytes: rounded down to whole blocks, at least one. progress: called with (blocks so far, blocks) after each chunk.
        Raises: ArenaFull: the machine refused a chunk; nothing is kept.
        """
        self._block_bytes = layout.block_bytes
        self._blocks = size_bytes // self._block_bytes
        self._chunk_blocks = max(1, chunk_bytes // self._block_bytes)
        self._ledger = ledger
        self._chunks: list[HostBuffer] = []
        self._allocate(registration or NoRegistration(), progress)
        self._references = numpy.zeros(self._blocks, dtype=numpy.int32)
        self._freed = array("q")  # a stack; the block freed last is the likeliest to be in the processor's caches
        self._untouched = 0  # blocks from here on were never taken
        self._reserved = 0
        self._allocated_bytes = sum(chunk.allocated_bytes for chunk in self._chunks)
        ledger.charge("host", "arena", self._blocks * self._block_bytes, self._allocated_bytes)

    def _allocate(self, registration: Registration, progress: Callable[[int, int], None] | None) -> None:
        """Make the chunks, or none."""
        try:
            for first in range(0, self._blocks, self._chunk_blocks):
                blocks = min(self._chunk_blocks, self._blocks - first)
                self._chunks.append(HostBuffer(blocks * self._block_bytes, registration))
                if progress is not None:
                    progress(first + blocks, self._blocks)
        except BaseException:
            for chunk in self._chunks:
                chunk.close()
            raise
        registration.announce()

    @property
    def available(self) -> int:
        """Blocks that are neither taken nor reserved."""
        return self._free - self._reserved

    def reserve(self, blocks: int) -> None:
        """Keep blocks for later takes. Raises ArenaFull; nothing is reserved then."""
        if blocks > self.available:
            raise ArenaFull((blocks - self.available) * self._block_bytes)
        self._reserved += blocks

    def unreserve(self, blocks: int) -> None:
        """Give up blocks kept by `reserve`."""
        assert 0 <= blocks <= self._reserved, f"{blocks} of {self._reserved} reserved blocks"
        self._reserved -= blocks

    def take(self, *, reserved: bool = False) -> BlockId:
        """A block with one reference; what it held before is still in it. Raises ArenaFull (never with `reserved`)."""
        if reserved:
            self.unreserve(1)
        elif self.available == 0:
            raise ArenaFull(self._block_bytes)
        if self._freed:
            block = self._freed.pop()
        else:
            block = self._untouched
            self._untouched += 1
        assert self._references[block] == 0, f"block {block} was handed out twice"
        self._references[block] = 1
        return BlockId(block)

    def retain(self, block: BlockId) -> None:
        """One more reference to a taken block."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] += 1

    def release(self, block: BlockId) -> bool:
        """One reference less; returns whether that freed the block."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] -= 1
        if self._references[block]:
            return False
        self._freed.append(block)
        return True

    def references(self, block: BlockId) -> int:
        """How many hold the block; 0: it is free."""
        return int(self._references[block])

    def place(self, block: BlockId) -> BlockPlace:
        """Where a taken block lies; valid while the caller holds a reference."""
        assert self._references[block] > 0, f"block {block} is free"
        chunk, number = divmod(block, self._chunk_blocks)
        offset = number * self._block_bytes
        buffer = self._chunks[chunk]
        return BlockPlace(buffer.address + offset, buffer.bytes[offset : offset + self._block_bytes])

    def close(self) -> None:
        """Unregister and let go of the memory. All blocks must be free: our bug otherwise."""
        assert self._free == self._blocks, f"{self._blocks - self._free} blocks are still held"
        assert self._reserved == 0, f"{self._reserved} blocks are still reserved"
        for chunk in self._chunks:
            chunk.close()
        self._ledger.credit("host", "arena", self._blocks * self._block_bytes, self._allocated_bytes)
        self._chunks, self._blocks, self._untouched, self._allocated_bytes = [], 0, 0, 0
        del self._freed[:]

    @property
    def _free(self) -> int:
        return len(self._freed) + self._blocks - self._untouched

    def statistics(self) -> ArenaStatistics:
        """What is taken and reserved now."""
        references = int(self._references.sum())
        return ArenaStatistics(
            self._blocks, self._free, self._reserved, references, len(self._chunks), self._block_bytes, self._allocated_bytes
        )

    def check_integrity(self) -> None:
        """Assert the invariants over every block."""
        assert (self._references >= 0).all()
        taken = int((self._references > 0).sum())
        assert taken + self._free == self._blocks, f"{taken} taken, {self._free} free of {self._blocks} blocks"
        assert 0 <= self._reserved <= self._free, f"{self._reserved} reserved of {self._free} free blocks"
        freed = numpy.asarray(self._freed, dtype=numpy.int64)
        assert len(numpy.unique(freed)) == len(freed), "a block is in the free list twice"
        assert (self._references[freed] == 0).all(), "a taken block is in the free list"
        assert (self._references[self._untouched :] == 0).all(), "a block that was never taken has references"
