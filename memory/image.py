"""A session's bytes leave it, and enter a fresh one: what archives and moves of sessions stand on.

Holds `read_out`, which makes RAM hold everything and says what is not in the blocks, and `Loading`, which fills a session block by block.
Knows no files: whoever has the bytes puts them where `Loading.target` says, on any thread.

Invariants:
1. Nothing is read out but behind the barrier, unless the device failed; what `read_out` said holds until something is submitted for
   the session.
2. A session being loaded has no rows for anybody until `finish` returned: its counts and its state say 0 before.
3. Restored rows are where a session of the placement has them: whole blocks in RAM and the partial tail in the ring (offload), or all in
   device blocks (resident). Keys are in the pages in both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, BlockLayout, StateField
from memory.append import blocks_of
from memory.barrier import barrier
from memory.copyback import Copyback, write_state
from memory.keys import key_moves
from memory.session import SessionMemory
from memory.staging import behind_fills, landing, pinned
from streams import Event, Stream

__all__ = ["Image", "Loading", "read_out", "rows_in_ram"]


@dataclass(frozen=True, slots=True)
class Image:
    """A session behind its barrier. Its rows and keys are in `mirror_block(b)` of its blocks."""

    rows: int
    hidden: Tensor  # f32 [HIDDEN_ROWS, hidden], CPU: the state of row p at p % HIDDEN_ROWS
    hidden_from: int  # the first row whose state that is


async def read_out(session: SessionMemory, copyback: Copyback) -> Image:
    """Pass the barrier and bring to the host what no block holds.

    Raises: BarrierFailed, ArenaFull: as the barrier. Cancel: as the barrier.
    """
    rows = await barrier(session, copyback)
    hidden = landing(session.hidden)

    def read() -> None:
        behind_fills(session.hidden.device)
        hidden.copy_(session.hidden, non_blocking=True)

    await copyback.stream.wait_room()
    event = copyback.stream.submit(read, label="image hidden", session=session.session_id, reads=[session.hidden], writes=[hidden])
    session.operations.hold(event)
    await event
    return Image(rows, hidden, session.counts.hidden_from)


def rows_in_ram(session: SessionMemory) -> int:
    """Rows that RAM has of a session whose device failed: the blocks whose copies had completed, as far as they are whole.

    A block is whole once and for all: what was being copied when the device failed is no part of it. Hidden states are gone.
    """
    parts = (session,) if session.peered is None else (session.peered.owner, session.peered.peer)
    return min(part.counts.mirrored for part in parts) // BLOCK_ROWS * BLOCK_ROWS


class Loading:
    """A fresh session that is being filled with `rows` rows. Loop thread only; closing the session is the caller's, also after a failure.

    For each stretch of blocks, in any order: fill every `target(block)`, then await `place(first, stop)`. At last await `finish`.
    """

    def __init__(self, session: SessionMemory, layout: BlockLayout, rows: int, *, tables: Stream, copies: Stream, window: int) -> None:
        """Begin; blocks and pages are taken as they are asked for, since a device that is RAM zeroes them while the loop waits.

        Args: tables: the stream that steps begin on. copies: carries rows and keys to the device. window: blocks that may be between
            `target` and the end of their `place`.
        """
        assert session.counts.logical == 0, f"{session.counts!r}: only a session without rows is loaded"
        assert rows >= 1, f"an image of {rows} rows"
        assert window >= 1, f"a window of {window} blocks"
        self._session, self._layout, self._rows = session, layout, rows
        peered = session.peered
        # Each device's part, and what carries rows and keys to it.
        self._parts = [(session, copies)] if peered is None else [(peered.owner, copies), (peered.peer, peered.copyback.stream)]
        self._tables, self._stream, self._window, self._taken = tables, copies, window, 0
        self._staging: list[Tensor] = []
        if session.ring is None:
            pin = session.state.device.type != "cpu"
            blocks = min(window, blocks_of(rows))
            self._staging = [torch.empty(layout.block_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(blocks)]

    def target(self, block: int) -> Tensor:
        """uint8 [block_bytes] in RAM to be filled with the block, as far as it has rows."""
        assert 0 <= block < blocks_of(self._rows), f"block {block} of {blocks_of(self._rows)}"
        if block >= self._taken:
            self._taken = min(blocks_of(self._rows), block + self._window)
            self._session.ensure_rows(min(self._rows, BLOCK_ROWS * self._taken), self._tables)
        if self._session.ring is None:
            return self._staging[block % len(self._staging)]
        return self._session.mirror_block(block)

    async def place(self, first: int, stop: int) -> None:
        """Bring filled blocks [first, stop) to where steps read them, and wait for that. Cancel: the copies go on, held by the session."""
        blocks = range(first, stop)
        sources = [self.target(block) for block in blocks]
        events = []
        for part, stream in self._parts:
            moves = key_moves(part.pages, first, sources)
            for block, source in zip(blocks, sources, strict=True):
                moves += [(place, source) for place in self._places_of(part, block, source)]
            await stream.wait_room()
            event = stream.submit(
                partial(_copy_all, moves, part.state.device), label="image load", session=part.session_id,
                reads=sources, writes=[target for target, _ in moves], payload_bytes=sum(source.numel() for _, source in moves),
            )  # fmt: skip
            part.operations.hold(event)
            events.append(event)
        for event in events:
            await event

    def _places_of(self, part: SessionMemory, block: int, source: Tensor) -> list[Tensor]:
        """Where the whole block belongs on a device, and in a mirror of its own."""
        if part.ring is None:
            return [part.device_block(block)]
        places = [part.device_block(block)] if block >= self._rows // BLOCK_ROWS else []
        mirror = part.mirror_block(block)
        return places if mirror.data_ptr() == source.data_ptr() else [*places, mirror]

    async def finish(self, hidden: Tensor, hidden_from: int) -> None:
        """All blocks are placed: the session has its rows. Args: hidden, hidden_from: as `Image`'s."""
        session, rows = self._session, self._rows
        assert self._taken == blocks_of(rows), f"{self._taken} blocks of {blocks_of(rows)} were placed"
        offload = session.ring is not None
        assert hidden.shape == session.hidden.shape, f"hidden states {tuple(hidden.shape)} for {tuple(session.hidden.shape)}"
        events = []
        for part, stream in self._parts:
            await stream.wait_room()
            events.append(self._submit_finish(part, stream, hidden))
        for event in events:
            await event
        await session.operations.settle()  # the tables
        broken = session.operations.broken
        if broken is not None:
            raise broken
        for part, _ in self._parts:
            part.counts.begin(rows, rows if offload else 0, hidden_from)

    def _submit_finish(self, part: SessionMemory, stream: Stream, hidden: Tensor) -> Event[None]:
        """Say on one device which rows there are."""
        values, rows = pinned(hidden, part.hidden.device), self._rows
        writes: list[Callable[[], None]] = [partial(write_state, part.state, StateField.LOGICAL, rows)]
        if part.ring is not None:
            writes.append(partial(write_state, part.state, StateField.MIRRORED, rows))

        def work() -> None:
            behind_fills(part.hidden.device)
            part.hidden.copy_(values, non_blocking=True)
            for write in writes:
                write()

        event = stream.submit(work, label="image finish", session=part.session_id, reads=[values], writes=[part.hidden])
        part.operations.hold(event)
        return event


def _copy_all(moves: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    behind_fills(device)
    for target, source in moves:
        target.copy_(source, non_blocking=True)
