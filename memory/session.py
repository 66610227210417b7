"""Everything one session holds on one stage, behind one protocol for both placements.

Holds `SessionMemory`, what the engine may ask of a session's memory, and `Holdings`, the parts that both placements hold alike. The two
implementations are `offload.py` and `resident.py`; `placement.py` makes them.

Invariants:
1. Everything a session of `tokens_max` rows can need is held or reserved from the moment it exists; no later call but `grow` can fail
   for want of memory.
2. Nothing is let go while an operation given to `operations.hold` is in flight.
3. Addresses in a table row stay the same for the life of the session, but for a grow.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, STATE_FIELDS, StateField, TableField, TableLayout
from memory.append import AppendChunk, blocks_of, pages_of
from memory.arena import BlockId
from memory.copyback import Copyback, copy_bytes, first_cause, write_state
from memory.counts import CountsSnapshot, RowCounts
from memory.errors import CopybackInFlight
from memory.history import BlockStore, History, TableWrite
from memory.hot import HotStatistics
from memory.keys import PAGE_BLOCKS, KeyPages, PageId, PageTable, key_moves
from memory.operations import Operations
from memory.pool import Pool
from memory.ring import Ring
from memory.staging import behind_fills
from streams import Event, Stream

__all__ = ["Holdings", "Peered", "SessionMemory", "SessionStatistics", "Shared", "check_copies", "reads_of"]


@dataclass(frozen=True, slots=True)
class Peered:
    """A session on two devices: the memory of each, and the peer's streams (`replica.py`)."""

    owner: "SessionMemory"
    peer: "SessionMemory"
    compute: Stream  # that the peer's part of steps begins on
    copyback: Copyback


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """What one session holds now. Bytes are allocated bytes; reserved ones are not among them."""

    counts: CountsSnapshot
    blocks: int
    pages: int  # a key layer
    ring_rows: int  # rows that are only on the device, in the ring
    outstanding: int  # operations in flight
    hot: tuple[HotStatistics, ...]  # a selection group; empty when resident


class SessionMemory(Protocol):
    """One session's rows, keys and state on one stage. Loop thread only.

    Rows count up in three moves: `advance` when a step is submitted, `commit` when the host has followed it, and by itself when a
    block's copy has completed. Give every step's last event to `operations.hold`.
    """

    session_id: str
    counts: RowCounts
    operations: Operations
    history: History  # blocks in RAM (offload) or on the device (resident)
    pages: PageTable
    state: Tensor  # int64 [STATE_FIELDS], device; steps and copybacks write it
    hidden: Tensor  # f32 [HIDDEN_ROWS, hidden], device
    ring: Ring | None  # None when resident
    peered: Peered | None  # of a session on two devices; what stands beside is then the owner's. None: there is one device
    device_block: Callable[[int], Tensor]  # block -> uint8 [block_bytes]; offload: only blocks from mirrored // 64 on are promised
    mirror_block: Callable[[int], Tensor]  # block -> uint8 [block_bytes] in RAM; resident: takes an arena block, may raise ArenaFull

    @property
    def reads(self) -> tuple[int, int, int]:
        """Hits, misses and ring reads of its steps so far, as the device counts them: it waits for a device."""
        ...

    def table_row(self, rows: int) -> list[int]:
        """This session's fields of the step table, in TableLayout order, for steps of `rows` query rows."""
        ...

    def room(self, upper: int, rows: int) -> bool:
        """Whether a step of `rows` rows may be submitted when at most `upper` rows exist before it.

        `tokens_max`, the ring's rule (offload), and no copy of a block that is not full in flight (a barrier's).
        """
        ...

    def ensure_rows(self, upper: int, stream: Stream) -> bool:
        """Make blocks and pages exist for positions below `upper`, before a step that may write them is submitted.

        New table entries are written by one operation on `stream`, which must be the stream that steps begin on. Steps in flight may go
        on: they only read entries below their own upper bound, and none of those changes.
        Returns: whether entries were written. The step table itself stays valid.
        """
        ...

    def advance(self, rows: int) -> None:
        """A step that writes `rows` rows was submitted: `room` was asked and `ensure_rows` called before."""
        ...

    def commit(self, rows: int, copyback: Copyback, after: Event[Any]) -> None:
        """The host has followed the step of the next `rows` rows; `after` is its event.

        Offload: submits a copy for every block whose 64 rows are now all committed. Raises: Full: the rows are committed, the copies
        that did not fit are submitted by a later commit or the barrier.
        """
        ...

    def begin_append(self, rows: int, compute: Stream, after: Sequence[Event[Any]] = ()) -> AppendChunk:
        """Open a chunk of `rows` rows behind the logical ones, all of which are committed; `room` for a chunk is only `tokens_max`.

        Args: after: work before it on other streams. No barrier's copies may be in flight (`operations.frozen`).

        Raises: RingOverrun: the stage's append ring is taken, or the chunk is longer than it; nothing changed.
        """
        ...

    def truncate(self, rows: int, stream: Stream) -> Event[None]:
        """Keep the first `rows` rows; the host's counts move now, the device's LOGICAL and maps in order on `stream`.

        Safe at once: a cut at or past the submitted rows (a rollback: its rows were never in a copy), or with no copy in flight.
        TOKEN is the caller's to set. Blocks and pages past the end are freed once nothing of the session is in flight. A block or page
        that others share and the cut goes through is replaced by one of the session's own.
        Returns: the device's part. Raises: CopybackInFlight: a cut into rows of a copy in flight; DoesNotFit: no block or page to
        replace a shared one. The rows are as before.
        """
        ...

    def close(self) -> None:
        """Let go of everything as soon as nothing of the session is in flight. The last call."""
        ...

    def statistics(self) -> SessionStatistics:
        """A snapshot; on a device, while operations are in flight, the slots mapped are those of an earlier call: nobody waits for it."""
        ...

    def check_integrity(self) -> None:
        """Assert the invariants of every part. Call it with nothing in flight."""
        ...


@dataclass(frozen=True, slots=True)
class Shared:
    """The first blocks and pages of another session, with a reference each that goes to whom they are given."""

    blocks: Sequence[BlockId] = ()
    pages: Sequence[PageId] = ()


_NOTHING = Shared()


class Holdings:
    """The parts both placements hold alike. Raises DoesNotFit when made and something cannot be had; nothing is held then."""

    def __init__(
        self, session_id: str, tokens_max: int, store: BlockStore, keys: KeyPages, pool: Pool, hidden: int, shared: Shared = _NOTHING,
        operations: Operations | None = None,
    ) -> None:  # fmt: skip
        """Args: operations: what is in flight of the session on another device too; None: this is the only one."""
        assert tokens_max >= 1, f"a session of {tokens_max} tokens"
        self.session_id = session_id
        self.tokens_max = tokens_max
        self.counts = RowCounts()
        self.operations = operations or Operations()
        self.share = keys.share
        self.pool = pool
        self.closed = False
        self.chunk_open = False
        self.keys_shed = False  # whether pages of rows that it has were given up and are not filled again yet
        self.kept_block: Callable[[int], Tensor]  # where a full or partial block of committed rows is to be read, uint8 [block_bytes]
        with ExitStack() as undo:
            pages = undo.enter_context(ExitStack())
            for page in shared.pages:
                pages.callback(keys.release, page)
            self.history = History(store, blocks_of(tokens_max), pool, shared.blocks)
            undo.callback(self.history.close)
            pages.pop_all()  # the table's from here on
            self.pages = PageTable(keys, pages_of(tokens_max, keys.share), shared.pages)
            undo.callback(self.pages.close)
            self.state = pool.take(8 * STATE_FIELDS, "state").view(torch.int64)
            undo.callback(pool.give, self.state)
            self.hidden = pool.take(4 * HIDDEN_ROWS * hidden, "state").view(torch.float32).view(HIDDEN_ROWS, hidden)
            undo.callback(pool.give, self.hidden)
            self._parts = undo.pop_all()
        self.kept_block = self.history.view
        write_state(self.state, StateField.BAD_LAYER, -1)

    def begin_chunk(self, rows: int) -> tuple[int, int]:
        """Assert that a chunk may begin; returns its first row and the count of rows after it."""
        first, end = self.counts.logical, self.counts.logical + rows
        assert self.counts.committed == first, f"{self.counts!r}: a step is in flight"
        assert not self.chunk_open, f"session {self.session_id} has an open chunk"
        assert not self.operations.frozen, f"session {self.session_id}: a barrier's copies are in flight"
        assert rows >= 1, f"a chunk of {rows} rows"
        assert end <= self.tokens_max, f"a chunk to row {end} in a session of {self.tokens_max}"
        return first, end

    def drop_chunk(self, first: int) -> None:
        """Blocks and pages as before a chunk that began at row `first`."""
        assert self.chunk_open, f"session {self.session_id} has no open chunk"
        self.chunk_open = False
        self.cut(first)

    def own(self, callback: Callable[[], None]) -> None:
        """Something more to let go of with the rest, before it."""
        self._parts.callback(callback)

    def leading_fields(self, rows: int, ring_address: int, layout: TableLayout) -> list[int]:
        """A step table place of all fields, those of the groups 0."""
        fields = [0] * layout.fields
        fields[TableField.ROWS] = rows
        fields[TableField.STATE] = self.state.data_ptr()
        fields[TableField.RING] = ring_address
        fields[TableField.BLOCKS] = self.history.table.data_ptr()
        fields[TableField.PAGES] = self.pages.table.data_ptr()
        fields[TableField.PAGES_MAX] = self.pages.table.shape[1]  # after a rest it has room for more than the session may hold
        fields[TableField.HIDDEN] = self.hidden.data_ptr()
        return fields

    def ensure_rows(self, upper: int, stream: Stream) -> bool:
        """See SessionMemory."""
        assert not self.closed, f"session {self.session_id} is closed"
        assert upper <= self.tokens_max, f"{upper} rows in a session of {self.tokens_max}"
        held = self.pages.pages
        blocks, pages = blocks_of(upper), pages_of(upper, self.share)
        if blocks <= self.history.blocks and pages <= self.pages.pages:
            return False  # nearly every step
        writes = [write for write in (self.history.ensure(blocks), self.pages.ensure(pages)) if write is not None]
        if not writes:
            return False
        written = self.submit(stream, "tables", partial(_write_all, writes), writes=[write.entries for write in writes])
        written.on_done(self._broken_by)  # the entries would be stale for ever: nobody may step on them
        if self.keys_shed:
            self._fill_pages(held, stream)
        return True

    def _fill_pages(self, first: int, stream: Stream) -> None:
        """Bring the keys of the present rows to the pages from `first` on, from where the session's blocks are."""
        self.keys_shed = False
        blocks = range(PAGE_BLOCKS * self.share.page(first), blocks_of(self.counts.logical))
        moves = key_moves(self.pages, blocks.start, [self.kept_block(block) for block in blocks])
        if moves:
            reads, writes = [source for _, source in moves], [target for target, _ in moves]
            filled = self.submit(stream, "keys", partial(_copy_all, moves), reads=reads, writes=writes, places=True)
            filled.on_done(self._broken_by)

    def _broken_by(self, event: Event[None]) -> None:
        error = event.error()
        if error is not None:
            self.operations.break_with(first_cause(error))

    def submit(
        self,
        stream: Stream,
        label: str,
        work: Callable[[], None],
        *,
        after: Sequence[Event[Any]] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        places: bool = False,
    ) -> Event[None]:
        """Submit work of the session's own, behind whatever filled its buffers, and hold it; `places`: see `Operations.placing`."""
        work = partial(_behind_fills, self.state.device, work)
        event = stream.submit(work, label=label, session=self.session_id, after=after, reads=reads, writes=writes)
        self.operations.hold(event, places=places)
        return event

    def cut(self, rows: int) -> None:
        """Let go of blocks and pages past the first `rows` rows, their memory once nothing is in flight."""
        self.history.cut(blocks_of(rows))
        self.pages.cut(pages_of(rows, self.share))
        self.operations.when_idle(self._trim)

    def _trim(self) -> None:
        self.history.trim()
        self.pages.trim()

    def may_truncate(self, rows: int) -> None:
        """Raise CopybackInFlight unless a cut to `rows` rows is safe now."""
        assert not self.closed, f"session {self.session_id} is closed"
        assert not self.chunk_open, f"session {self.session_id} has an open chunk"
        check_copies(self, rows)

    def close(self) -> None:
        """See SessionMemory."""
        assert not self.closed, f"session {self.session_id} was closed twice"
        self.closed = True
        self.operations.when_idle(self._parts.close)

    def check_integrity(self) -> None:
        """Assert the invariants of the shared parts, host against device."""
        self.counts.check_integrity()
        self.history.check_integrity()
        self.pages.check_integrity()
        blocks, pages = self.history.blocks, self.pages.pages
        assert self.history.table[:blocks].tolist() == self.history.addresses[:blocks].tolist(), "the device's block table differs"
        assert self.pages.table[:, :pages].tolist() == self.pages.addresses[:, :pages].tolist(), "the device's page table differs"
        assert blocks * BLOCK_ROWS >= self.counts.logical, f"{blocks} blocks for {self.counts.logical} rows"
        assert self.keys_shed or pages >= pages_of(self.counts.logical, self.share), f"{pages} pages for {self.counts.logical} rows"
        assert int(self.state[StateField.MIRRORED]) >= self.counts.mirrored, "the host counts rows that the device does not"


class _Copied(Protocol):
    session_id: str
    counts: RowCounts
    operations: Operations


def check_copies(session: _Copied, rows: int) -> None:
    """Raise CopybackInFlight if a cut to `rows` rows would go into rows of a copy in flight."""
    counts, operations = session.counts, session.operations
    assert 0 <= rows <= counts.logical, f"truncate {counts.logical} rows to {rows}"
    behind = counts.mirrored < counts.submitted and operations.broken is None
    if (rows < counts.submitted and behind) or operations.frozen:
        raise CopybackInFlight(
            f"session {session.session_id}: {counts.submitted} rows submitted, {counts.mirrored} mirrored, cut to {rows}, "
            f"{operations.outstanding} operations in flight"
        )


def reads_of(state: Tensor) -> tuple[int, int, int]:
    """Hits, misses and ring reads that a session's state counts."""
    counted = state.tolist()
    return counted[StateField.HITS], counted[StateField.MISSES], counted[StateField.RING_READS]


def _behind_fills(device: torch.device, work: Callable[[], None]) -> None:
    behind_fills(device)
    work()


def _copy_all(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in moves:
        copy_bytes(target, source)


def _write_all(writes: Sequence[TableWrite]) -> None:
    for write in writes:
        write()
