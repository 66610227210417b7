"""Device rows that are not yet known to be in the mirror.

`Ring` holds one session's last four blocks, block `b` in place `b % 4`, in block layout. `AppendRing` holds the blocks of one chunk,
one a stage. Both hold bytes and places only; the counts decide what may be written (`counts.py`, the room rule below).

Invariants:
1. A ring place is written for block b + 4 only after block b is in the mirror: a step of `rows` rows from logical row `upper` on may be
   submitted only if upper + rows - 64 * (mirrored // 64) <= 256.
2. An append ring carries one chunk at a time, and the next chunk's first write is ordered behind the last copy out of it.
"""

from collections.abc import Sequence
from typing import Any, NewType

from torch import Tensor

from kernels.layout import BLOCK_ROWS, RING_BLOCKS, BlockLayout
from memory.errors import RingOverrun
from memory.pool import Pool
from streams import Event, Stream

__all__ = ["RING_ROWS", "AppendRing", "Ring", "RingPlace", "room"]

RingPlace = NewType("RingPlace", int)

RING_ROWS = RING_BLOCKS * BLOCK_ROWS


def room(upper: int, rows: int, mirrored: int) -> bool:
    """Whether rows `upper` to `upper + rows - 1` may be written to a ring when `mirrored` rows are in the mirror. All are counts."""
    assert 0 <= mirrored <= upper, f"{mirrored} rows mirrored of at most {upper}"
    return upper + rows - BLOCK_ROWS * (mirrored // BLOCK_ROWS) <= RING_ROWS


class Ring:
    """One session's four blocks. Raises PoolExhausted when made."""

    def __init__(self, layout: BlockLayout, pool: Pool) -> None:
        self._block_bytes = layout.block_bytes
        self._pool = pool
        self.buffer = pool.take(RING_BLOCKS * layout.block_bytes, "ring")  # uint8

    @staticmethod
    def place_of(position: int) -> RingPlace:
        """The place of the block that `position` lies in."""
        return RingPlace(position // BLOCK_ROWS % RING_BLOCKS)

    def block_view(self, block: int) -> Tensor:
        """uint8 [block_bytes]: the place of `block`, which may by now hold a later or an earlier one."""
        place = self.place_of(block * BLOCK_ROWS)
        return self.buffer[place * self._block_bytes : (place + 1) * self._block_bytes]

    def check_integrity(self, logical: int, mirrored: int) -> None:
        """Assert that all rows that must be here fit."""
        assert room(logical, 0, mirrored), f"{logical} rows, {mirrored} mirrored: the ring was overrun"

    def close(self) -> None:
        """Give the buffer back. Call once no operation in flight touches it."""
        self._pool.give(self.buffer)


class AppendRing:
    """One stage's buffer for the blocks of a chunk of at most `chunk_rows` rows. Raises PoolExhausted when made."""

    def __init__(self, layout: BlockLayout, chunk_rows: int, pool: Pool) -> None:
        assert chunk_rows >= 1, f"chunks of {chunk_rows} rows"
        self.chunk_rows = chunk_rows
        self.blocks = self.blocks_for(chunk_rows)
        self._block_bytes = layout.block_bytes
        self._pool = pool
        self.buffer = pool.take(self.blocks * layout.block_bytes, "append ring")  # uint8
        self._chunk_of = ""  # session whose chunk is open
        self._last: list[Event[Any]] = []  # operations that may still touch the buffer

    @staticmethod
    def blocks_for(chunk_rows: int) -> int:
        """Blocks for chunks of up to `chunk_rows` rows: one may begin and end inside a block."""
        return chunk_rows // BLOCK_ROWS + 2

    def block_view(self, number: int) -> Tensor:
        """uint8 [block_bytes]: block `number` of the chunk, counted from the one its first row lies in."""
        assert 0 <= number < self.blocks, f"block {number} of {self.blocks}"
        return self.buffer[number * self._block_bytes : (number + 1) * self._block_bytes]

    def open(self, session_id: str, rows: int, stream: Stream) -> None:
        """Begin a chunk whose first write will be the next work of `stream`, ordered behind the copies of the chunk before.

        Raises: RingOverrun: another chunk is open, or this one is too long; nothing changed.
        """
        if self._chunk_of:
            raise RingOverrun(f"the append ring holds a chunk of session {self._chunk_of}; one of session {session_id} must wait")
        if not 1 <= rows <= self.chunk_rows:
            raise RingOverrun(f"a chunk of {rows} rows in an append ring for 1 to {self.chunk_rows}")
        for event in self._last:
            # Order only: a copy that failed is its own session's failure, not the next chunk's.
            if not event.done():
                stream.wait(event)
        self._last = []
        self._chunk_of = session_id

    def release(self, events: Sequence[Event[Any]]) -> None:
        """End the open chunk; the buffer is touched until all `events` are done."""
        assert self._chunk_of, "no chunk is open"
        self._chunk_of = ""
        self._last = list(events)

    def close(self) -> None:
        """Give the buffer back. Call once no operation in flight touches it."""
        assert not self._chunk_of, f"a chunk of session {self._chunk_of} is open"
        assert all(event.done() for event in self._last), "copies out of the append ring are in flight"
        self._pool.give(self.buffer)
