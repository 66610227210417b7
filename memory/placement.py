"""The two ways to hold a session's rows, chosen once when an engine is built.

Holds one stage's arena, pool, key pages and append ring, and makes sessions over them. Knows no scheduling: what does not fit is
refused with the missing bytes a tier, and whoever asked decides whether to wait.

Invariants:
1. `open` and `grow` hold all or nothing: after an error ledger, arena and pool are as before.
2. `needs` is to the byte what `open` takes and reserves.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, BlockLayout
from memory.append import blocks_of, pages_of
from memory.arena import Arena, ArenaStatistics
from memory.copyback import Copyback
from memory.errors import DoesNotFit
from memory.fork import begin, shared_units
from memory.history import BlockStore, DeviceBlocks
from memory.hot import HotCache
from memory.idle import bytes_shed, rest, shed, wake_pages
from memory.keys import KeyPages
from memory.needs import Needs, hot_bytes, hot_slots, offload_needs, resident_needs, shared_bytes
from memory.offload import OffloadSession
from memory.pool import Pool, PoolStatistics, allocated
from memory.resident import ResidentSession
from memory.ring import AppendRing, Ring
from memory.session import Holdings, SessionMemory, Shared
from streams import Stream

__all__ = ["Needs", "Offload", "Placement", "PlacementStatistics", "Resident"]


@dataclass(frozen=True, slots=True)
class PlacementStatistics:
    """What a stage holds. Bytes of sessions are in arena and pool."""

    placement: str
    arena: ArenaStatistics
    pool: PoolStatistics
    append_ring_bytes: int


class Placement(Protocol):
    """One stage's memory for sessions. Loop thread only."""

    def needs(self, tokens_max: int) -> Needs:
        """What a session of `tokens_max` rows takes and reserves."""
        ...

    def open(self, session_id: str, tokens_max: int) -> SessionMemory:
        """A session without rows. Raises DoesNotFit with the missing bytes per tier; nothing is held then."""
        ...

    def grow(self, session: SessionMemory, tokens_max: int) -> bool:
        """Make room for a longer turn. Nothing of the session may be in flight.

        Returns: whether addresses changed, so that its step table place must be written again.
        Raises: DoesNotFit with the missing bytes per tier; the session is as before.
        """
        ...

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback
    ) -> SessionMemory:
        """A session of `tokens_max` rows that begins with the first `rows` rows of `source`, at least 1, all of them committed.

        Nobody waits, and the source may go on decoding. While a chunk of it is open, only rows of full blocks that are in RAM
        (`fork.shared_rows`) may be taken, and what is a part of such a block. See `fork.begin`; the new session holds the event.
        Raises: DoesNotFit with the missing bytes per tier; nothing is held then.
        """
        ...

    def rest(self, session: SessionMemory) -> bool:
        """An idle session gives up its hot caches and what it has reserved; a `grow` brings it back. Nothing of it may be in flight.

        Returns: whether that freed anything.
        """
        ...

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """An idle session rests and gives up pages of its index keys, which its next turn fills from its blocks again.

        Args: shared: also those that other sessions hold, which frees them once nobody does. Nothing of it may be in flight.
        Returns: whether that gave anything up.
        """
        ...

    def statistics(self) -> PlacementStatistics:
        """A snapshot."""
        ...

    def close(self) -> None:
        """Let go of the stage's own buffers. All sessions are closed by then; arena and pool are the caller's."""
        ...


def _units_bytes(layout: BlockLayout, shared: Shared, block_bytes: int) -> tuple[int, int]:
    """Bytes of shared blocks, and device bytes of shared pages."""
    return len(shared.blocks) * block_bytes, len(shared.pages) * allocated(layout.key_layers * layout.key.page_bytes)


def _check_room(needs: Needs, arena: Arena, pool: Pool) -> None:
    """Raise DoesNotFit if either tier is short, naming both."""
    host = arena.statistics()
    host_missing = max(0, needs.host_bytes - arena.available * host.block_bytes)
    device_missing = pool.missing_bytes(needs.device_bytes)
    if host_missing or device_missing:
        raise DoesNotFit(host_missing_bytes=host_missing, device_missing_bytes=device_missing)


def _grow_tables(holdings: Holdings, tokens_max: int, undo: ExitStack) -> list[Tensor]:
    """Grow both allotments and take both tables; returns the new tables."""
    pool, pages = holdings.pool, pages_of(tokens_max)
    undo.callback(holdings.history.grow(blocks_of(tokens_max)))
    undo.callback(holdings.pages.grow(pages))
    tables = [pool.take(8 * blocks_of(tokens_max), "tables").view(torch.int64)]
    undo.callback(pool.give, tables[0])
    key_layers = holdings.pages.table.shape[0]
    tables.append(pool.take(8 * key_layers * pages, "tables").view(torch.int64).view(key_layers, pages))
    undo.callback(pool.give, tables[1])
    return tables


def _use_tables(holdings: Holdings, tokens_max: int, tables: Sequence[Tensor]) -> None:
    holdings.pool.give(holdings.history.move_table(tables[0]))
    holdings.pool.give(holdings.pages.move_table(tables[1]))
    holdings.tokens_max = tokens_max


def _let_go(shared: Shared, blocks: BlockStore, keys: KeyPages) -> None:
    for block in shared.blocks:
        blocks.release(block)
    for page in shared.pages:
        keys.release(page)


def _check_still(holdings: Holdings) -> None:
    assert not holdings.closed, f"session {holdings.session_id} is closed"
    assert holdings.operations.outstanding == 0, f"session {holdings.session_id}: {holdings.operations.outstanding} operations in flight"
    assert holdings.counts.committed == holdings.counts.logical, f"{holdings.counts!r}: a step is in flight"


def _keep_hot(old: HotCache, new: HotCache) -> None:
    """Copy what `old` holds to the larger `new`."""
    slots, positions = old.position_of.shape[0], old.slot_of.shape[0]
    new.slots[:, :slots].copy_(old.slots)
    new.slot_of[:positions].copy_(old.slot_of)
    new.position_of[:slots].copy_(old.position_of)
    new.pin_round[:slots].copy_(old.pin_round)
    new.hand.copy_(old.hand)


class Offload:
    """Rows in RAM, a ring and hot caches on the device. Raises PoolExhausted when made without room for the append ring."""

    def __init__(self, layout: BlockLayout, arena: Arena, pool: Pool, *, hidden: int, hot_rows: int, picks: int, chunk_rows: int) -> None:
        """One stage.

        Args: hidden: values of a hidden state. hot_rows: hot slots a group, at least 1; cut to a session's positions but never below
            `picks`, the top-k of a selection. chunk_rows: rows of the longest append chunk.
        """
        assert hot_rows >= 1, f"{hot_rows} hot rows"
        self.arena, self.pool = arena, pool
        self._layout = layout
        self._hidden = hidden
        self._hot_rows = hot_rows
        self._picks = picks
        self._keys = KeyPages(layout, pool)
        self.append_ring = AppendRing(layout, chunk_rows, pool)

    def _slots(self, positions_max: int) -> int:
        return hot_slots(self._hot_rows, self._picks, positions_max)

    def _hot_bytes(self, tokens_max: int) -> int:
        return hot_bytes(self._layout, self._hot_rows, self._picks, tokens_max)

    def _take_hot(self, tokens_max: int, undo: ExitStack) -> list[HotCache]:
        positions = BLOCK_ROWS * blocks_of(tokens_max)
        caches = []
        for group in self._layout.groups:
            cache = HotCache(len(group), self._slots(positions), positions, self._layout.row.row_bytes, take=self.pool.take)
            undo.callback(self.pool.give, cache.buffer)
            caches.append(cache)
        return caches

    def needs(self, tokens_max: int) -> Needs:
        """See Placement."""
        return offload_needs(self._layout, self._hidden, self._hot_rows, self._picks, tokens_max)

    def open(self, session_id: str, tokens_max: int) -> OffloadSession:
        """See Placement."""
        _check_room(self.needs(tokens_max), self.arena, self.pool)
        return self._open(session_id, tokens_max, Shared())

    def _open(self, session_id: str, tokens_max: int, shared: Shared) -> OffloadSession:
        with ExitStack() as undo:
            holdings = Holdings(session_id, tokens_max, self.arena, self._keys, self.pool, self._hidden, shared)
            undo.callback(holdings.close)
            ring = Ring(self._layout, self.pool)
            undo.callback(ring.close)
            hot = self._take_hot(tokens_max, undo)
            undo.pop_all()
        session = OffloadSession(holdings, self._layout, ring, self.append_ring, hot)
        holdings.own(ring.close)
        holdings.own(lambda: self._give_hot(session.hot))
        return session

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback
    ) -> OffloadSession:
        """See Placement."""
        assert isinstance(source, OffloadSession), "a session of another placement"
        shared, needs = shared_units(source, rows), self.needs(tokens_max)
        host, device = _units_bytes(self._layout, shared, self._layout.block_bytes)
        try:
            _check_room(Needs(needs.host_bytes - host, needs.device_bytes - device), self.arena, self.pool)
        except DoesNotFit:
            _let_go(shared, self.arena, self._keys)
            raise
        session = self._open(session_id, tokens_max, shared)
        chunk_open = source.holdings.chunk_open
        begin(source, session, rows, compute, copyback, held_by=session.holdings, chunk_open=chunk_open)
        return session

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        _check_still(session.holdings)
        given, hot = rest(session.holdings), session.hot
        session.hot = []
        self._give_hot(hot)
        return given or bool(hot)

    def _wake(self, session: OffloadSession) -> bool:
        """Give a session at rest with tables long enough hot caches and pages back. Raises DoesNotFit; returns whether it was at rest."""
        holdings, history = session.holdings, session.history
        asleep = not session.hot
        hot_bytes = self._hot_bytes(holdings.tokens_max) if asleep else 0
        host_bytes = history.allotment.lacking * self._layout.block_bytes
        _check_room(Needs(host_bytes, hot_bytes + bytes_shed(holdings)), self.arena, self.pool)
        with ExitStack() as undo:
            undo.callback(history.grow(history.blocks_max))
            hot = session.hot or self._take_hot(holdings.tokens_max, undo)
            asleep = wake_pages(holdings) or asleep
            undo.pop_all()
        session.hot = hot
        return asleep

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        rested = self.rest(session)
        return shed(session.holdings, shared=shared) or rested

    def _give_hot(self, caches: Sequence[HotCache]) -> None:
        for cache in caches:
            self.pool.give(cache.buffer)

    def grow(self, session: SessionMemory, tokens_max: int) -> bool:
        """See Placement. What the hot caches hold is kept; old and new ones exist together for a moment and are counted so."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        holdings = session.holdings
        _check_still(holdings)
        if tokens_max <= holdings.tokens_max:
            return self._wake(session)
        more = blocks_of(tokens_max) - session.history.blocks_max + session.history.allotment.lacking
        shared = shared_bytes(self._layout, self._hidden, tokens_max) - shared_bytes(self._layout, self._hidden, holdings.tokens_max)
        device = shared + self._hot_bytes(tokens_max) + _tables_bytes(holdings) + bytes_shed(holdings)
        _check_room(Needs(more * self._layout.block_bytes, device), self.arena, self.pool)
        with ExitStack() as undo:
            tables = _grow_tables(holdings, tokens_max, undo)
            hot = self._take_hot(tokens_max, undo)
            undo.pop_all()
        _use_tables(holdings, tokens_max, tables)
        for old, new in zip(session.hot, hot, strict=bool(session.hot)):  # a session at rest has none
            _keep_hot(old, new)
        self._give_hot(session.hot)
        session.hot = hot
        return True

    def statistics(self) -> PlacementStatistics:
        """See Placement."""
        ring_bytes = allocated(self.append_ring.buffer.numel())
        return PlacementStatistics("offload", self.arena.statistics(), self.pool.statistics(), ring_bytes)

    def close(self) -> None:
        """See Placement."""
        self.append_ring.close()


def _tables_bytes(holdings: Holdings) -> int:
    """Device bytes of a session's present tables, which exist beside the new ones for a moment."""
    return sum(allocated(8 * table.numel()) for table in (holdings.history.table, holdings.pages.table))


class Resident:
    """Rows on the device; the arena is used by barriers only, and nothing of it is reserved."""

    def __init__(self, layout: BlockLayout, arena: Arena, pool: Pool, *, hidden: int) -> None:
        """One stage. Args: hidden: values of a hidden state."""
        self.arena, self.pool = arena, pool
        self._layout = layout
        self._hidden = hidden
        self._keys = KeyPages(layout, pool)
        self._blocks = DeviceBlocks(layout, pool)

    def needs(self, tokens_max: int) -> Needs:
        """See Placement."""
        return resident_needs(self._layout, self._hidden, tokens_max)

    def open(self, session_id: str, tokens_max: int) -> ResidentSession:
        """See Placement."""
        _check_room(self.needs(tokens_max), self.arena, self.pool)
        holdings = Holdings(session_id, tokens_max, self._blocks, self._keys, self.pool, self._hidden)
        return ResidentSession(holdings, self._layout, self.arena)

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback
    ) -> ResidentSession:
        """See Placement."""
        assert isinstance(source, ResidentSession), "a session of another placement"
        shared = shared_units(source, rows)
        device = self.needs(tokens_max).device_bytes - sum(_units_bytes(self._layout, shared, allocated(self._layout.block_bytes)))
        try:
            _check_room(Needs(0, device), self.arena, self.pool)
        except DoesNotFit:
            _let_go(shared, self._blocks, self._keys)
            raise
        holdings = Holdings(session_id, tokens_max, self._blocks, self._keys, self.pool, self._hidden, shared)
        session = ResidentSession(holdings, self._layout, self.arena)
        chunk_open = source.holdings.chunk_open
        begin(source, session, rows, compute, copyback, held_by=holdings, chunk_open=chunk_open)
        return session

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, ResidentSession), "a session of another placement"
        _check_still(session.holdings)
        return rest(session.holdings)

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement. Keys lie in the device's blocks too."""
        assert isinstance(session, ResidentSession), "a session of another placement"
        rested = self.rest(session)
        return shed(session.holdings, shared=shared) or rested

    def grow(self, session: SessionMemory, tokens_max: int) -> bool:
        """See Placement."""
        assert isinstance(session, ResidentSession), "a session of another placement"
        holdings = session.holdings
        _check_still(holdings)
        if tokens_max <= holdings.tokens_max:
            with ExitStack() as undo:
                undo.callback(holdings.history.grow(holdings.history.blocks_max))
                asleep = wake_pages(holdings)
                undo.pop_all()
            return asleep
        device = self.needs(tokens_max).device_bytes - self.needs(holdings.tokens_max).device_bytes
        _check_room(Needs(0, device + _tables_bytes(holdings) + bytes_shed(holdings)), self.arena, self.pool)
        with ExitStack() as undo:
            tables = _grow_tables(holdings, tokens_max, undo)
            undo.pop_all()
        _use_tables(holdings, tokens_max, tables)
        return True

    def statistics(self) -> PlacementStatistics:
        """See Placement."""
        return PlacementStatistics("resident", self.arena.statistics(), self.pool.statistics(), 0)

    def close(self) -> None:
        """See Placement. A resident stage has no buffer of its own."""
        self._blocks.check_integrity()
