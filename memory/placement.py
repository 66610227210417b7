"""The two ways to hold a session's rows, chosen once when an engine is built.

Holds one stage's arena, pool, key pages and append ring, and makes sessions over them. Knows no scheduling: what does not fit is
refused with the missing bytes a tier, and whoever asked decides whether to wait.

Invariants:
1. `open` and `grow` hold all or nothing: after an error ledger, arena and pool are as before.
2. `needs` is to the byte what `open` takes and reserves.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kernels.layout import BLOCK_ROWS, WHOLE, BlockLayout, PageShare
from memory.append import blocks_of
from memory.arena import Arena, ArenaStatistics
from memory.copyback import Copyback
from memory.elastic import HotCaches
from memory.errors import DoesNotFit
from memory.fork import begin, shared_units
from memory.history import BlockStore, DeviceBlocks
from memory.idle import bytes_shed, rest, shed, wake_pages
from memory.keys import KeyPages
from memory.needs import Needs, hot_bytes, hot_slots, offload_needs, resident_needs, shared_bytes
from memory.offload import OffloadSession
from memory.operations import Operations
from memory.pool import Pool, PoolStatistics, allocated
from memory.resident import ResidentSession
from memory.ring import AppendRing, Ring
from memory.room import check_room, check_still, grow_tables, kept_for_cuts, let_go, tables_bytes, units_bytes, use_tables
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

    def grow(self, session: SessionMemory, tokens_max: int, *, cut: int | None = None) -> bool:
        """Make room for a longer turn. Nothing of the session may be in flight.

        Args: cut: rows that a cut right behind keeps, so that what it parts from shared blocks and pages does not use up the room.
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

    def extra_bytes(self, session: SessionMemory) -> int:
        """Device bytes that a `shrink` of the session would free."""
        ...

    def shrink(self, session: SessionMemory) -> bool:
        """Bring a session's hot caches back to what is reserved for them, keeping the rows used last; nothing if they are no larger.

        It needs no free memory. Nothing of the session may be in flight; its step table place must be written again.
        Returns: False where a chunk of it is open: nothing has changed then.
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


class Offload:
    """Rows in RAM, a ring and hot caches on the device. Raises PoolExhausted when made without room for the append ring."""

    def __init__(
        self, layout: BlockLayout, arena: Arena, pool: Pool, *, hidden: int, hot_rows: int, picks: int, chunk_rows: int,
        elastic: bool = False, share: PageShare = WHOLE, store_of: Callable[[], BlockStore] | None = None,
    ) -> None:  # fmt: skip
        """One stage.

        Args: hidden: values of a hidden state. hot_rows: hot slots a group, at least 1; cut to a session's positions but never below
            `picks`, the top-k of a selection. chunk_rows: rows of the longest append chunk. elastic: hot caches grow beyond `hot_rows`
            into what the pool has to spare (`memory/elastic.py`). share: the pages of index keys that are here. store_of: gives a session
            the RAM that another device's has taken for it (`replica.py`); None: it takes its own of the arena.
        """
        assert hot_rows >= 1, f"{hot_rows} hot rows"
        self.arena, self.pool = arena, pool
        self._layout = layout
        self._hidden = hidden
        self._hot_rows = hot_rows
        self._picks = picks
        self._elastic = elastic
        self._keys = KeyPages(layout, pool, share)
        self._store_of = store_of
        self._host_bytes = layout.block_bytes if store_of is None else 0  # of a block
        self.append_ring = AppendRing(layout, chunk_rows, pool)

    def _hot_bytes(self, tokens_max: int) -> int:
        return hot_bytes(self._layout, self._hot_rows, self._picks, tokens_max)

    def _take_hot(self, tokens_max: int, undo: ExitStack) -> HotCaches:
        positions = BLOCK_ROWS * blocks_of(tokens_max)
        slots = hot_slots(self._hot_rows, self._picks, positions)
        margin = self.needs(tokens_max).device_bytes  # another session like it is admitted without a shrink
        caches = HotCaches.take(self.pool, self._layout, positions, slots, margin if self._elastic else None)
        undo.callback(caches.give)
        return caches

    def needs(self, tokens_max: int) -> Needs:
        """See Placement."""
        needs = offload_needs(self._layout, self._hidden, self._hot_rows, self._picks, tokens_max, self._keys.share)
        return Needs(needs.host_bytes if self._host_bytes else 0, needs.device_bytes)

    def open(self, session_id: str, tokens_max: int, operations: Operations | None = None) -> OffloadSession:
        """See Placement. Args: operations: those of the same session on another device."""
        check_room(self.needs(tokens_max), self.arena, self.pool)
        return self._open(session_id, tokens_max, Shared(), operations)

    def _open(self, session_id: str, tokens_max: int, shared: Shared, operations: Operations | None) -> OffloadSession:
        with ExitStack() as undo:
            store = self.arena if self._store_of is None else self._store_of()
            holdings = Holdings(session_id, tokens_max, store, self._keys, self.pool, self._hidden, shared, operations)
            undo.callback(holdings.close)
            ring = Ring(self._layout, self.pool)
            undo.callback(ring.close)
            hot = self._take_hot(tokens_max, undo)
            undo.pop_all()
        session = OffloadSession(holdings, self._layout, ring, self.append_ring, hot)
        holdings.own(ring.close)
        holdings.own(session.caches.give)
        return session

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback,
        operations: Operations | None = None, opened: Callable[[OffloadSession], None] | None = None,
    ) -> OffloadSession:  # fmt: skip
        """See Placement. Args: operations: as in `open`. opened: called with the new session before it takes more than it shares."""
        assert isinstance(source, OffloadSession), "a session of another placement"
        session = self._share(source, session_id, tokens_max, rows, operations)
        if opened is not None:
            opened(session)
        begin(source, session, rows, compute, copyback, held_by=session.holdings, chunk_open=source.holdings.chunk_open)
        return session

    def _share(
        self, source: OffloadSession, session_id: str, tokens_max: int, rows: int, operations: Operations | None
    ) -> OffloadSession:  # fmt: skip
        """The first half of a fork: a session over what it shares, without rows yet."""
        shared, needs = shared_units(source, rows), self.needs(tokens_max)
        host, device = units_bytes(self._layout, shared, self._host_bytes)
        try:
            check_room(Needs(needs.host_bytes - host, needs.device_bytes - device), self.arena, self.pool)
        except DoesNotFit:
            let_go(shared, source.history.store, self._keys)
            raise
        return self._open(session_id, tokens_max, shared, operations)

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        check_still(session.holdings)
        given, hot = rest(session.holdings), bool(session.hot)
        session.caches.give()
        return given or hot

    def _wake(self, session: OffloadSession) -> bool:
        """Give a session at rest with tables long enough hot caches and pages back. Raises DoesNotFit; returns whether it was at rest."""
        holdings, history = session.holdings, session.history
        asleep = not session.hot
        hot_bytes = self._hot_bytes(holdings.tokens_max) if asleep else 0
        host_bytes = history.allotment.lacking * self._host_bytes
        check_room(Needs(host_bytes, hot_bytes + bytes_shed(holdings)), self.arena, self.pool)
        with ExitStack() as undo:
            undo.callback(history.grow(history.blocks_max))
            hot = self._take_hot(holdings.tokens_max, undo) if asleep else None
            asleep = wake_pages(holdings) or asleep
            undo.pop_all()
        if hot is not None:
            session.caches.replace(hot)
        return asleep

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        rested = self.rest(session)
        return shed(session.holdings, shared=shared) or rested

    def extra_bytes(self, session: SessionMemory) -> int:
        """See Placement."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        return session.caches.extra_bytes

    def shrink(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        if session.holdings.chunk_open:
            return False
        check_still(session.holdings)
        session.caches.shrink()
        return True

    def grow(self, session: SessionMemory, tokens_max: int, *, cut: int | None = None) -> bool:
        """See Placement. What the hot caches hold is kept; old and new ones exist together for a moment and are counted so."""
        assert isinstance(session, OffloadSession), "a session of another placement"
        check_still(session.holdings)
        with kept_for_cuts(session, cut, tokens_max):
            return self._grow(session, tokens_max)

    def _grow(self, session: OffloadSession, tokens_max: int) -> bool:
        holdings = session.holdings
        if tokens_max <= holdings.tokens_max:
            return self._wake(session)
        more = blocks_of(tokens_max) - session.history.blocks_max + session.history.allotment.lacking
        before, after = (shared_bytes(self._layout, self._hidden, rows, holdings.share) for rows in (holdings.tokens_max, tokens_max))
        device = after - before + self._hot_bytes(tokens_max) + tables_bytes(holdings) + bytes_shed(holdings)
        check_room(Needs(more * self._host_bytes, device), self.arena, self.pool)
        with ExitStack() as undo:
            tables = grow_tables(holdings, tokens_max, undo)
            hot = self._take_hot(tokens_max, undo)
            undo.pop_all()
        use_tables(holdings, tokens_max, tables)
        session.caches.replace(hot)
        return True

    def statistics(self) -> PlacementStatistics:
        """See Placement."""
        ring_bytes = allocated(self.append_ring.buffer.numel())
        return PlacementStatistics("offload", self.arena.statistics(), self.pool.statistics(), ring_bytes)

    def close(self) -> None:
        """See Placement."""
        self.append_ring.close()


class Resident:
    """Rows on the device; the arena is used by barriers only, and nothing of it is reserved."""

    def __init__(
        self, layout: BlockLayout, arena: Arena, pool: Pool, *, hidden: int, share: PageShare = WHOLE, mirrors: bool = True
    ) -> None:  # fmt: skip
        """One stage.

        Args: hidden: values of a hidden state. share: the pages of index keys that are here. mirrors: whether barriers copy to the arena;
            else another device's do.
        """
        self._mirrors = mirrors
        self.arena, self.pool = arena, pool
        self._layout = layout
        self._hidden = hidden
        self._keys = KeyPages(layout, pool, share)
        self._blocks = DeviceBlocks(layout, pool)

    def needs(self, tokens_max: int) -> Needs:
        """See Placement."""
        return resident_needs(self._layout, self._hidden, tokens_max, self._keys.share)

    def open(self, session_id: str, tokens_max: int, operations: Operations | None = None) -> ResidentSession:
        """See Placement. Args: operations: those of the same session on another device."""
        check_room(self.needs(tokens_max), self.arena, self.pool)
        return self._open(session_id, tokens_max, Shared(), operations)

    def _open(self, session_id: str, tokens_max: int, shared: Shared, operations: Operations | None) -> ResidentSession:
        holdings = Holdings(session_id, tokens_max, self._blocks, self._keys, self.pool, self._hidden, shared, operations)
        return ResidentSession(holdings, self._layout, self.arena if self._mirrors else None)

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback,
        operations: Operations | None = None, opened: Callable[[ResidentSession], None] | None = None,
    ) -> ResidentSession:  # fmt: skip
        """See Placement. Args: operations: as in `open`. opened: called with the new session before it takes more than it shares."""
        assert isinstance(source, ResidentSession), "a session of another placement"
        session = self._share(source, session_id, tokens_max, rows, operations)
        if opened is not None:
            opened(session)
        begin(source, session, rows, compute, copyback, held_by=session.holdings, chunk_open=source.holdings.chunk_open)
        return session

    def _share(
        self, source: ResidentSession, session_id: str, tokens_max: int, rows: int, operations: Operations | None
    ) -> ResidentSession:  # fmt: skip
        """The first half of a fork: a session over what it shares, without rows yet."""
        shared = shared_units(source, rows)
        device = self.needs(tokens_max).device_bytes - sum(units_bytes(self._layout, shared, allocated(self._layout.block_bytes)))
        try:
            check_room(Needs(0, device), self.arena, self.pool)
        except DoesNotFit:
            let_go(shared, self._blocks, self._keys)
            raise
        return self._open(session_id, tokens_max, shared, operations)

    def extra_bytes(self, session: SessionMemory) -> int:
        """See Placement. A resident session has no hot cache."""
        del session
        return 0

    def shrink(self, session: SessionMemory) -> bool:
        """See Placement. A resident session has no hot cache."""
        del session
        return True

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, ResidentSession), "a session of another placement"
        check_still(session.holdings)
        return rest(session.holdings)

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement. Keys lie in the device's blocks too."""
        assert isinstance(session, ResidentSession), "a session of another placement"
        rested = self.rest(session)
        return shed(session.holdings, shared=shared) or rested

    def grow(self, session: SessionMemory, tokens_max: int, *, cut: int | None = None) -> bool:
        """See Placement."""
        assert isinstance(session, ResidentSession), "a session of another placement"
        check_still(session.holdings)
        with kept_for_cuts(session, cut, tokens_max):
            return self._grow(session.holdings, tokens_max)

    def _grow(self, holdings: Holdings, tokens_max: int) -> bool:
        if tokens_max <= holdings.tokens_max:
            with ExitStack() as undo:
                undo.callback(holdings.history.grow(holdings.history.blocks_max))
                asleep = wake_pages(holdings)
                undo.pop_all()
            return asleep
        device = self.needs(tokens_max).device_bytes - self.needs(holdings.tokens_max).device_bytes
        check_room(Needs(0, device + tables_bytes(holdings) + bytes_shed(holdings)), self.arena, self.pool)
        with ExitStack() as undo:
            tables = grow_tables(holdings, tokens_max, undo)
            undo.pop_all()
        use_tables(holdings, tokens_max, tables)
        return True

    def statistics(self) -> PlacementStatistics:
        """See Placement."""
        return PlacementStatistics("resident", self.arena.statistics(), self.pool.statistics(), 0)

    def close(self) -> None:
        """See Placement. A resident stage has no buffer of its own."""
        self._blocks.check_integrity()
