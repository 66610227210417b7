"""A session whose rows live on the device, in blocks of the same layout, and reach RAM in a barrier only.

No ring, no hot cache, no copyback while decoding. See `session.py` for the protocol.

Invariants:
1. Every row is in the session's own device blocks; the mirror's blocks are taken by the barrier and released by a cut.
2. Blocks of the mirror are a prefix of the history's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kernels.layout import BLOCK_ROWS, BlockLayout, StateField, TableLayout
from memory.append import AppendChunk, Destinations, blocks_of
from memory.arena import Arena, BlockId
from memory.copyback import Copyback, copy_bytes, first_cause, write_state
from memory.fork import own_page
from memory.ring import Ring
from memory.session import Holdings, Peered, SessionStatistics, reads_of
from streams import Event, Stream

__all__ = ["ResidentSession"]


class ResidentSession:
    """See SessionMemory. Made by `placement.Resident`."""

    def __init__(self, holdings: Holdings, layout: BlockLayout, arena: Arena | None) -> None:
        """Args: arena: for the barrier's copies; None: it makes none, because another device's does."""
        self.holdings = holdings
        self.session_id = holdings.session_id
        self.counts, self.operations = holdings.counts, holdings.operations
        self.history, self.pages = holdings.history, holdings.pages
        self.state, self.hidden = holdings.state, holdings.hidden
        self.peered: Peered | None = None
        self.ring: Ring | None = None
        self.device_block: Callable[[int], Tensor] = holdings.history.view
        self.mirror_block: Callable[[int], Tensor] = self._mirror_block
        self._arena = arena
        self._mirror: list[BlockId] = []
        self._layout = layout
        self._table_layout = TableLayout(layout.key_layers)
        holdings.own(lambda: self._release(self._mirror))

    def _mirror_block(self, block: int) -> Tensor:
        """Take arena blocks up to this one. Raises ArenaFull; blocks taken before stay."""
        assert self._arena is not None, "the mirror is another device's"
        while len(self._mirror) <= block:
            self._mirror.append(self._arena.take())
        return self._arena.place(self._mirror[block]).bytes

    def _release(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            assert self._arena is not None, "blocks came from somewhere"
            self._arena.release(block)

    @property
    def reads(self) -> tuple[int, int, int]:
        """See SessionMemory."""
        return reads_of(self.state)

    def table_row(self, rows: int) -> list[int]:
        """See SessionMemory. RING and the groups' fields are 0."""
        return self.holdings.leading_fields(rows, 0, self._table_layout)

    def room(self, upper: int, rows: int) -> bool:
        """See SessionMemory. There is no ring to overrun."""
        return upper + rows <= self.holdings.tokens_max and not self.operations.frozen

    def ensure_rows(self, upper: int, stream: Stream) -> bool:
        """See SessionMemory."""
        return self.holdings.ensure_rows(upper, stream)

    def advance(self, rows: int) -> None:
        """See SessionMemory."""
        assert self.room(self.counts.logical, rows), f"{self.counts!r}: no room for {rows} rows"
        assert not self.holdings.chunk_open, f"session {self.session_id} has an open chunk"
        self.counts.advance(rows)

    def commit(self, rows: int, copyback: Copyback, after: Event[Any]) -> None:
        """See SessionMemory. Submits nothing: the barrier copies."""
        del copyback, after
        self.counts.commit(rows)

    def begin_append(self, rows: int, compute: Stream, after: Sequence[Event[Any]] = ()) -> AppendChunk:
        """See SessionMemory. Rows go to the session's own blocks, so any number fits that `tokens_max` allows."""
        first, end = self.holdings.begin_chunk(rows)
        self.ensure_rows(end, compute)
        addresses = self.history.addresses[: blocks_of(end)].copy()
        destinations = Destinations(self._layout, first, rows, addresses, self.pages.addresses, self.state.device, self.holdings.share)
        after = (*after, *self.operations.placing)  # behind a fork or cut that fails the chunk must not count
        ready = self.holdings.submit(compute, "append ready", destinations.fill, after=after, writes=destinations.targets)
        self.holdings.chunk_open = True
        return AppendChunk(first, rows, *destinations.targets, ready, partial(self._finish, first, end), partial(self._abandon, first))

    def _abandon(self, first: int, after: Sequence[Event[Any]]) -> None:
        for event in after:
            self.operations.hold(event)
        self.holdings.drop_chunk(first)

    def _finish(self, first: int, end: int, compute: Stream, copyback: Copyback, after: Event[Any]) -> Event[None]:
        del copyback
        work = partial(write_state, self.state, StateField.LOGICAL, end)
        logical = self.state[StateField.LOGICAL : StateField.LOGICAL + 1]
        raised = compute.submit(work, label="append raised", session=self.session_id, after=[after], writes=[logical])
        raised.on_done(partial(self._finished, first, end))
        self.operations.hold(raised)
        return raised

    def _finished(self, first: int, end: int, raised: Event[None]) -> None:
        if raised.error() is not None:
            self.holdings.drop_chunk(first)
            return
        self.holdings.chunk_open = False
        self.counts.advance(end - first)
        self.counts.commit(end - first)

    def truncate(self, rows: int, stream: Stream) -> Event[None]:
        """See SessionMemory."""
        self.holdings.may_truncate(rows)
        state, block = self.state, rows // BLOCK_ROWS
        deep = rows < self.counts.mirrored
        own_page(self.holdings, rows, stream)
        parted = rows % BLOCK_ROWS != 0 and self.history.allotment.shared(block)
        moves, release = self._own_block(block) if parted else ((), None)

        def apply() -> None:
            write_state(state, StateField.LOGICAL, rows)
            if deep:
                write_state(state, StateField.MIRRORED, rows)
            for target, source in moves:
                copy_bytes(target, source)

        writes = [state[StateField.LOGICAL : StateField.LOGICAL + 1], *(target for target, _ in moves)]
        event = self.holdings.submit(stream, "truncate", apply, reads=[source for _, source in moves], writes=writes, places=True)
        event.on_done(self._truncated)
        if release is not None:
            self.operations.when_idle(release)
        self.counts.truncate(rows)
        self.holdings.cut(rows)
        # Copies of a barrier that nobody waited for may still write the cut blocks; later ones get blocks of their own.
        cut, self._mirror = self._mirror[blocks_of(rows) :], self._mirror[: blocks_of(rows)]
        self.operations.when_idle(partial(self._release, cut))
        return event

    def _own_block(self, block: int) -> tuple[tuple[tuple[Tensor, Tensor], ...], Callable[[], None]]:
        """Hold a block of one's own in place of a shared one.

        Returns: targets and sources of the copies that make it equal, and what lets go of the old one behind them.
        """
        old = self.history.view(block)
        write, release = self.history.replace(block)
        return ((self.history.view(block), old), (write.entries, write.values)), release

    def _truncated(self, event: Event[None]) -> None:
        error = event.error()
        if error is not None:
            self.operations.break_with(first_cause(error))

    def close(self) -> None:
        """See SessionMemory."""
        self.holdings.close()

    def statistics(self) -> SessionStatistics:
        """See SessionMemory."""
        return SessionStatistics(self.counts.snapshot(), self.history.blocks, self.pages.pages, 0, self.operations.outstanding, ())

    def check_integrity(self) -> None:
        """See SessionMemory."""
        self.holdings.check_integrity()
        assert len(set(self._mirror)) == len(self._mirror), "a mirror block is held twice"
        assert len(self._mirror) <= self.history.blocks, f"{len(self._mirror)} mirror blocks of {self.history.blocks}"
        mirrors = self._arena is not None
        assert not mirrors or len(self._mirror) >= blocks_of(self.counts.mirrored), (
            f"{len(self._mirror)} blocks for {self.counts.mirrored} mirrored rows"
        )
