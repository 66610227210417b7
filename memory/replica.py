"""A session on two devices: the owner's memory and the peer's, behind the protocol of one.

Each device has its own ring, hot caches, block and page tables, state and share of the pages of index keys; steps bring the owner's packed
rows and keys to the peer's ring and pages as they are (`engine`). What moves counts or places is done on both, here and nowhere else.
With one mirror the blocks of RAM are the owner's: the peer reads them, copies nothing there, and counts them behind the owner. With two the
peer has an arena of its own and copies its own ring to it. Resident sessions have their rows on both devices.

Invariants:
1. `counts` is the peer's, which never run ahead of the owner's logical and committed rows; of the same rows both say the same in the end.
2. `operations` is one: nothing of either device is let go while an operation of any is in flight, and what breaks one breaks the session.
3. With one mirror the peer's block table names the blocks of the owner's, position for position, whenever a step may be submitted.
4. Both parts of a cut, a chunk or a fork happen, or none: what may be refused is asked of both first, or comes first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernels.layout import BLOCK_ROWS, BlockLayout
from kernels.quantize import stored_keys
from memory.append import AppendChunk, blocks_of
from memory.arena import Arena, BlockId, BlockPlace
from memory.copyback import Copyback
from memory.errors import BarrierFailed
from memory.fork import own_page
from memory.history import History
from memory.offload import OffloadSession
from memory.resident import ResidentSession
from memory.session import Peered, SessionMemory, SessionStatistics
from streams import Event, Stream

__all__ = ["FollowedBlocks", "FollowingCopyback", "PairSession", "verify_replica"]

OneSession = OffloadSession | ResidentSession


class FollowedBlocks:
    """The owner's blocks of RAM for one session of the peer. Holds no reference: what the owner lets go of nobody uses any more."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._owner: History | None = None
        self._offered: deque[BlockId] = deque()
        self._known: frozenset[BlockId] = frozenset()

    def follow(self, owner: History) -> None:
        """Whose blocks these are. Call it before anything is taken."""
        self._owner = owner

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """What the next takes give, in order."""
        self._offered = deque(blocks)

    def look(self) -> None:
        """See which blocks the owner has now, before `references` is asked."""
        assert self._owner is not None, "nobody is followed yet"
        self._known = frozenset(self._owner.allotment.ids)

    def reserve(self, units: int) -> None:
        """Nothing: the owner has reserved them."""

    def unreserve(self, units: int) -> None:
        """Nothing."""

    def take(self, *, reserved: bool = False) -> BlockId:
        """The next block that the owner has taken."""
        assert self._offered, "the owner has taken no block for this place"
        return self._offered.popleft()

    def retain(self, unit: BlockId) -> None:
        """Nothing: whoever shares a block shares the owner's."""

    def release(self, unit: BlockId) -> bool:
        """Nothing is freed here, so nothing is in the way."""
        return True

    def references(self, unit: BlockId) -> int:
        """1 if the owner's session had the block at the last look; else it must be replaced or let go, as if others held it."""
        return 1 if unit in self._known else 2

    def place(self, block: BlockId) -> BlockPlace:
        """Where it lies."""
        return self._arena.place(block)


class FollowingCopyback(Copyback):
    """The peer's copyback where the mirror is the owner's: it copies nothing, and raises counts behind the owner's copies."""

    def submit_copy(
        self, session: Any, block: int, source: Tensor, after: Sequence[Event[Any]] = (), *, freezes: bool = False
    ) -> Event[None]:  # fmt: skip
        """The last of `after`, which is the owner's copy or comes behind it."""
        del session, block, source, freezes
        return after[-1] if after else Event.completed(None)


class PairSession:
    """See SessionMemory. Made by `pair.PairPlacement`."""

    def __init__(self, owner: OneSession, peer: OneSession, compute: Stream, copyback: Copyback) -> None:
        """Args: compute, copyback: the peer's."""
        self.owner, self.peer = owner, peer
        self.peered: Peered | None = Peered(owner, peer, compute, copyback)
        self.session_id, self.operations, self.counts = owner.session_id, owner.operations, peer.counts
        self.counts.follower = owner.counts
        self.history, self.pages, self.state, self.hidden = owner.history, owner.pages, owner.state, owner.hidden
        self.ring = owner.ring
        self.device_block: Callable[[int], Tensor] = owner.device_block
        self.mirror_block: Callable[[int], Tensor] = owner.mirror_block
        self.holdings = owner.holdings
        self.moved = False  # addresses changed on one device by a `grow` that the other refused
        self._compute, self._copyback = compute, copyback
        store = peer.history.store
        self._followed = store if isinstance(store, FollowedBlocks) else None

    @property
    def reads(self) -> tuple[int, int, int]:
        """See SessionMemory: the owner's."""
        return self.owner.reads

    def table_row(self, rows: int) -> list[int]:
        """See SessionMemory: the owner's."""
        return self.owner.table_row(rows)

    def room(self, upper: int, rows: int) -> bool:
        """See SessionMemory."""
        return self.owner.room(upper, rows) and self.peer.room(upper, rows)

    def ensure_rows(self, upper: int, stream: Stream) -> bool:
        """See SessionMemory. Entries of the peer's tables are written on the stream its part of steps begins on."""
        written = self.owner.ensure_rows(upper, stream)
        self._offer()
        return self.peer.ensure_rows(upper, self._compute) or written

    def _offer(self) -> None:
        if self._followed is not None and self.peer.history.blocks < self.owner.history.blocks:
            self._followed.offer(self.owner.history.allotment.ids[self.peer.history.blocks :])

    def advance(self, rows: int) -> None:
        """See SessionMemory."""
        self.owner.advance(rows)
        self.peer.advance(rows)

    def commit(self, rows: int, copyback: Copyback, after: Event[Any]) -> None:
        """See SessionMemory."""
        try:
            self.owner.commit(rows, copyback, after)
        finally:
            if self._followed is None:
                self.peer.commit(rows, self._copyback, after)
            else:
                self.peer.counts.commit(rows)
                # The raise that the owner submitted last is the one before: raises of a session come one behind another.
                for block in range(self.peer.counts.submitted // BLOCK_ROWS, self.owner.counts.submitted // BLOCK_ROWS):
                    self._copyback.submit_block(self.peer, block)

    def begin_append(self, rows: int, compute: Stream, after: Sequence[Event[Any]] = ()) -> AppendChunk:
        """See SessionMemory. The chunk has the peer's part in it."""
        chunk = self.owner.begin_append(rows, compute, after)
        try:
            self._offer()
            peer = self.peer.begin_append(rows, self._compute, after)
        except BaseException:
            chunk.abandon(())
            raise

        def finish(stream: Stream, copyback: Copyback, last: Event[Any]) -> Event[None]:
            try:
                raised = chunk.finish(stream, copyback, last)
            except BaseException:
                peer.abandon([last])
                raise
            return peer.finish(self._compute, self._copyback, raised)

        def abandon(events: Sequence[Event[Any]]) -> None:
            chunk.abandon(events)
            peer.abandon(events)

        return AppendChunk(
            chunk.first, chunk.rows, chunk.block_addresses, chunk.row_destinations, chunk.key_destinations, chunk.page_destinations,
            chunk.ready, finish, abandon, peer,
        )  # fmt: skip

    def truncate(self, rows: int, stream: Stream) -> Event[None]:
        """See SessionMemory."""
        for one in (self.owner, self.peer):
            one.holdings.may_truncate(rows)
        own_page(self.peer.holdings, rows, self._compute)  # may be refused; one that it has got is as good as the one before
        owned = self.owner.truncate(rows, stream)
        if self._followed is not None:
            block = rows // BLOCK_ROWS
            ids = self.owner.history.allotment.ids
            self._followed.look()
            self._followed.offer(ids[block : block + 1])  # in place of one that others share
        peers = self.peer.truncate(rows, self._compute)
        both = stream.submit(_nothing, label="truncated", session=self.session_id, after=[owned, peers])
        self.operations.hold(both)
        return both

    def close(self) -> None:
        """See SessionMemory."""
        self.owner.close()
        self.peer.close()

    def statistics(self) -> SessionStatistics:
        """See SessionMemory: the owner's."""
        return self.owner.statistics()

    def check_integrity(self) -> None:
        """See SessionMemory."""
        if self._followed is not None:
            self._followed.look()
        self.owner.check_integrity()
        self.peer.check_integrity()
        mine, its = self.owner.counts, self.peer.counts
        assert (mine.logical, mine.committed) == (its.logical, its.committed), f"owner {mine!r}, peer {its!r}"
        assert self.owner.operations is self.peer.operations, "the parts of a session have operations of their own"
        if self._followed is not None:
            ids = (self.owner.history.allotment.ids, self.peer.history.allotment.ids)
            assert ids[0] == ids[1], f"the owner's blocks are {ids[0]}, the peer's {ids[1]}"


def verify_replica(session: SessionMemory, layout: BlockLayout) -> None:
    """Compare the packed rows and keys that both devices hold, and two mirrors, byte for byte. For tests and requested checks.

    Raises: BarrierFailed: names the first place that differs. Call it with nothing in flight; it waits for its copies from the devices.
    """
    peered = session.peered
    assert peered is not None, f"session {session.session_id} is on one device"
    owner, peer = peered.owner, peered.peer
    rows = owner.counts.logical
    if peer.counts.logical != rows:
        raise BarrierFailed(f"session {session.session_id}: {rows} rows at the owner, {peer.counts.logical} at the peer")
    in_ram = 0 if owner.ring is None else min(owner.counts.mirrored, peer.counts.mirrored) // BLOCK_ROWS
    for block in range(in_ram, blocks_of(rows)):
        within = min(BLOCK_ROWS, rows - BLOCK_ROWS * block)
        _compare_blocks(owner.device_block(block).cpu(), peer.device_block(block).cpu(), layout, block, within, "ring")
    if isinstance(peer, OffloadSession) and not isinstance(peer.history.store, FollowedBlocks):
        for block in range(in_ram):
            _compare_blocks(owner.mirror_block(block), peer.mirror_block(block), layout, block, BLOCK_ROWS, "RAM")


def _compare_blocks(mine: Tensor, its: Tensor, layout: BlockLayout, block: int, within: int, where: str) -> None:
    """The first `within` rows and keys of a block at owner and peer."""
    for layer in range(layout.layers):
        span = slice(layout.row_offset(layer), layout.row_offset(layer, within))
        if bool((mine[span] != its[span]).any()):
            raise BarrierFailed(f"{where}: rows of layer {layer} in block {block} differ between owner and peer")
    for key_layer in range(layout.key_layers):
        start = layout.key_offset(key_layer)
        here, there = (stored_keys(each[start : start + layout.key_layer_bytes], layout.key)[:within] for each in (mine, its))
        if bool((here != there).any()):
            raise BarrierFailed(f"{where}: keys {key_layer} of block {block} differ between owner and peer")


def _nothing() -> None:
    """Work that only marks that both parts are done."""
