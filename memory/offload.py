"""A session whose rows live in RAM, behind a ring and one hot cache a selection group.

Knows no model. See `session.py` for the protocol and `append.py` for chunks.

Invariants:
1. Rows at positions from 64 * (mirrored // 64) on are in the ring; all below are in the arena's blocks.
2. Hot slots hold positions below 64 * (mirrored // 64) only, if steps round their snapshot of MIRRORED down to whole blocks. So rows of a
   partial block, which a later copy of their block writes again, are never read from RAM while that copy runs.
3. A partial flush (barrier) frees no ring row: room counts whole mirrored blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, BlockLayout, StateField, TableLayout
from memory.append import Addresses, AppendChunk, Destinations, blocks_of
from memory.copyback import Copyback, copy_bytes, first_cause, report_failure, write_state
from memory.elastic import HotCaches
from memory.errors import RingOverrun
from memory.fork import own_page
from memory.hot import HotCache
from memory.ring import AppendRing, Ring, room
from memory.session import Holdings, Peered, SessionStatistics, reads_of
from memory.staging import Glance
from streams import Event, Stream

__all__ = ["OffloadSession"]


class OffloadSession:
    """See SessionMemory. Made by `placement.Offload`."""

    def __init__(self, holdings: Holdings, layout: BlockLayout, ring: Ring, append_ring: AppendRing, caches: HotCaches) -> None:
        self.holdings = holdings
        self.session_id = holdings.session_id
        self.counts, self.operations = holdings.counts, holdings.operations
        self.history, self.pages = holdings.history, holdings.pages
        self.state, self.hidden = holdings.state, holdings.hidden
        self.peered: Peered | None = None
        self.ring: Ring | None = ring
        self.caches = caches
        self.device_block: Callable[[int], Tensor] = ring.block_view
        self.mirror_block: Callable[[int], Tensor] = holdings.history.view
        self._ring = ring
        self._append_ring = append_ring
        self._mapped = Glance(holdings.state.device, len(caches.caches))
        self._layout = layout
        self._table_layout = TableLayout(layout.key_layers)
        holdings.kept_block = self._kept_block

    def _kept_block(self, block: int) -> Tensor:
        """RAM for blocks that are whole there, the ring for those behind."""
        return self.history.view(block) if block < self.counts.mirrored // BLOCK_ROWS else self._ring.block_view(block)

    @property
    def reads(self) -> tuple[int, int, int]:
        """See SessionMemory."""
        return reads_of(self.state)

    @property
    def hot(self) -> list[HotCache]:
        """One a selection group; none while it rests."""
        return self.caches.caches

    def table_row(self, rows: int) -> list[int]:
        """See SessionMemory."""
        assert self.hot, f"session {self.session_id} rests: it has no hot cache"
        fields = self.holdings.leading_fields(rows, self._ring.buffer.data_ptr(), self._table_layout)
        for group, cache in enumerate(self.hot):
            first = self._table_layout.group(group, 0)
            values = cache.table_fields()
            fields[first : first + len(values)] = values
        return fields

    def room(self, upper: int, rows: int) -> bool:
        """See SessionMemory."""
        fits = upper + rows <= self.holdings.tokens_max and not self.operations.frozen
        return fits and room(upper, rows, self.counts.mirrored)

    def ensure_rows(self, upper: int, stream: Stream) -> bool:
        """See SessionMemory."""
        return self.holdings.ensure_rows(upper, stream)

    def advance(self, rows: int) -> None:
        """See SessionMemory."""
        assert not self.holdings.chunk_open, f"session {self.session_id} has an open chunk"
        if not self.room(self.counts.logical, rows):
            raise RingOverrun(f"session {self.session_id}: no room for {rows} rows, {self.counts!r}")
        self.counts.advance(rows)

    def commit(self, rows: int, copyback: Copyback, after: Event[Any]) -> None:
        """See SessionMemory."""
        self.counts.commit(rows)
        for block in range(self.counts.submitted // BLOCK_ROWS, self.counts.committed // BLOCK_ROWS):
            copyback.submit_block(self, block, [after])

    def begin_append(self, rows: int, compute: Stream, after: Sequence[Event[Any]] = ()) -> AppendChunk:
        """See SessionMemory."""
        first, end = self.holdings.begin_chunk(rows)
        self._append_ring.open(self.session_id, rows, compute)
        self.holdings.chunk_open = True
        try:
            self.ensure_rows(end, compute)
            addresses = self._chunk_addresses(first, end)
            destinations = Destinations(self._layout, first, rows, addresses, self.pages.addresses, self.state.device, self.holdings.share)
            # What is read of a session whose fork or cut fails is nobody's: the chunk must not count behind it.
            ready = self._prepare(first, destinations, compute, (*after, *self.operations.placing))
        except BaseException:
            self._abandon(first, ())
            raise
        return AppendChunk(first, rows, *destinations.targets, ready, partial(self._finish, first, end), partial(self._abandon, first))

    def _chunk_addresses(self, first: int, end: int) -> Addresses:
        """Where each block of the history and of the chunk is: RAM, the ring for blocks not mirrored yet, the append ring."""
        addresses = self.history.addresses[: blocks_of(end)].copy()
        tail = first // BLOCK_ROWS
        for block in range(self.counts.mirrored // BLOCK_ROWS, tail):
            addresses[block] = self._ring.block_view(block).data_ptr()
        for block in range(tail, len(addresses)):
            addresses[block] = self._append_ring.block_view(block - tail).data_ptr()
        return addresses

    def _prepare(self, first: int, destinations: Destinations, compute: Stream, after: Sequence[Event[Any]]) -> Event[None]:
        """Submit what fills the address tensors and moves a partial tail block to where the chunk writes."""
        targets = destinations.targets
        if first % BLOCK_ROWS == 0:
            return self.holdings.submit(compute, "append ready", destinations.fill, after=after, writes=targets)
        source, target = self._ring.block_view(first // BLOCK_ROWS), self._append_ring.block_view(0)

        def prepare() -> None:
            destinations.fill()
            target.copy_(source)

        return self.holdings.submit(compute, "append ready", prepare, after=after, reads=[source], writes=[*targets, target])

    def _abandon(self, first: int, after: Sequence[Event[Any]]) -> None:
        for event in after:
            self.operations.hold(event)
        self.holdings.drop_chunk(first)
        self._append_ring.release(after)

    def _finish(self, first: int, end: int, compute: Stream, copyback: Copyback, after: Event[Any]) -> Event[None]:
        del compute  # all of it runs on the copyback stream, in order: the tail then lands behind earlier copies out of its ring place
        moves: list[Event[Any]] = [after]
        try:
            raised = self._submit_end(first, end, copyback, after, moves)
        except BaseException:
            self._abandon(first, moves)
            raise
        return raised

    def _submit_end(self, first: int, end: int, copyback: Copyback, after: Event[Any], moves: list[Event[Any]]) -> Event[None]:
        """Submit the chunk's copies, adding them to `moves`, and what raises the counts behind them."""
        tail, whole = first // BLOCK_ROWS, end // BLOCK_ROWS
        stream = copyback.stream
        for block in range(tail, whole):
            moves.append(copyback.submit_copy(self, block, self._append_ring.block_view(block - tail), [after]))
        if end % BLOCK_ROWS:
            source, target = self._append_ring.block_view(whole - tail), self._ring.block_view(whole)
            work = partial(copy_bytes, target, source)
            moves.append(self.holdings.submit(stream, "append tail", work, after=[after], reads=[source], writes=[target]))
        # A raise before may be in flight, and a barrier may have mirrored more than whole blocks.
        mirrored = max(self.counts.mirrored, BLOCK_ROWS * whole)
        previous = [] if self.operations.last_raise is None else [self.operations.last_raise]

        def raise_counts() -> None:
            write_state(self.state, StateField.MIRRORED, mirrored)
            write_state(self.state, StateField.LOGICAL, end)

        # A copy that fails fails the raise at once, while others may still run: the append ring is free behind this one only.
        fence = self.holdings.submit(stream, "append ring free", _nothing)
        raised = stream.submit(raise_counts, label="append raised", session=self.session_id, after=[*moves, *previous])
        self._append_ring.release([fence, after])
        raised.on_done(partial(self._finished, first, end, mirrored, after))
        self.operations.hold(raised)
        return raised

    def _finished(self, first: int, end: int, mirrored: int, after: Event[Any], raised: Event[None]) -> None:
        error = raised.error()
        if error is not None:
            self.holdings.drop_chunk(first)
            if after.error() is None:
                report_failure(self, end, error)
            return
        self.holdings.chunk_open = False
        counts = self.counts
        counts.advance(end - first)
        counts.commit(end - first)
        counts.submit(max(mirrored, counts.submitted))
        counts.complete(mirrored, counts.epoch)

    def truncate(self, rows: int, stream: Stream) -> Event[None]:
        """See SessionMemory."""
        self.holdings.may_truncate(rows)
        counts, state = self.counts, self.state
        block = rows // BLOCK_ROWS
        whole = counts.mirrored // BLOCK_ROWS
        deep = rows < counts.mirrored
        load = rows % BLOCK_ROWS != 0 and block < whole  # the ring holds blocks from `whole` on only
        own_page(self.holdings, rows, stream)
        source = self.history.view(block) if load else None
        parted = self.history.replace(block) if load and self.history.allotment.shared(block) else None
        # A block of our own holds none of the rows yet: they go to the ring, and a later copy of the block brings them to RAM.
        mirrored = rows if parted is None else BLOCK_ROWS * block
        target = self._ring.block_view(block)
        hot = tuple(self.hot) if deep else ()

        def apply() -> None:
            write_state(state, StateField.LOGICAL, rows)
            if deep:
                write_state(state, StateField.MIRRORED, mirrored)
            if source is not None:
                target.copy_(source, non_blocking=True)
            if parted is not None:
                parted[0]()
            for cache in hot:
                cache.unmap_from(BLOCK_ROWS * block)

        writes = [state[StateField.LOGICAL : StateField.LOGICAL + 1], *([target] if load else []), *(cache.slot_of for cache in hot)]
        writes += [] if parted is None else [parted[0].entries]
        reads: list[Tensor] = [] if source is None else [source]
        event = self.holdings.submit(stream, "truncate", apply, reads=reads, writes=writes, places=True)
        event.on_done(partial(_broken_by, self))
        if parted is not None:
            self.operations.when_idle(parted[1])
        counts.truncate(rows, mirrored)
        self.holdings.cut(rows)
        return event

    def close(self) -> None:
        """See SessionMemory."""
        self.holdings.close()

    def statistics(self) -> SessionStatistics:
        """See SessionMemory."""
        counts = self.counts.snapshot()
        still = None if self.operations.outstanding else counts
        mapped = self._mapped.look(lambda: torch.stack([cache.mapped() for cache in self.hot]), still) if self.hot else []
        hot = tuple(cache.statistics(count) for cache, count in zip(self.hot, mapped, strict=True))
        outstanding = self.operations.outstanding
        return SessionStatistics(counts, self.history.blocks, self.pages.pages, counts.logical - counts.mirrored, outstanding, hot)

    def check_integrity(self) -> None:
        """See SessionMemory."""
        self.holdings.check_integrity()
        self._ring.check_integrity(self.counts.logical, self.counts.mirrored)
        for cache in self.hot:
            cache.check_integrity(mirrored=self.counts.mirrored, round_now=int(self.state[StateField.ROUND]))


def _nothing() -> None:
    """Work that only marks a place in its stream's order."""


def _broken_by(session: OffloadSession, event: Event[None]) -> None:
    error = event.error()
    if error is not None:
        session.operations.break_with(first_cause(error))
