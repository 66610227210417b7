"""Memory for sessions on two devices: the owner's placement and the peer's, behind the protocol of one.

Holds both and the peer's streams. Each placement has a pool, tables and a share of the index keys' pages of its own; with one mirror the
peer's takes no RAM (`replica.py`).

Invariants:
1. `open` and `fork` hold all or nothing, on both devices.
2. A `grow` that one device refuses after the other did leaves more held there, and the next that succeeds says that addresses changed.
"""

from collections.abc import Sequence

from kernels.layout import BLOCK_ROWS
from memory.arena import BlockId
from memory.copyback import Copyback
from memory.errors import DoesNotFit
from memory.needs import Needs
from memory.placement import Offload, PlacementStatistics, Resident
from memory.replica import FollowedBlocks, OneSession, PairSession
from memory.room import kept_for_cuts
from memory.session import SessionMemory
from streams import Stream

__all__ = ["PairPlacement"]


class PairPlacement:
    """See Placement. Loop thread only."""

    def __init__(self, owner: Offload | Resident, peer: Offload | Resident, compute: Stream, copyback: Copyback) -> None:
        """Args: compute: the stream that the peer's part of steps begins on. copyback: the peer's (`FollowingCopyback` with one mirror)."""
        assert type(owner) is type(peer), "both devices have the same placement"
        self.owner, self.peer = owner, peer
        self._compute, self._copyback = compute, copyback

    def needs(self, tokens_max: int) -> Needs:
        """See Placement: of the owner, which has no fewer pages."""
        return self.owner.needs(tokens_max)

    def _paired(self, owner: OneSession, peer: OneSession) -> PairSession:
        _follow(owner, peer)
        return PairSession(owner, peer, self._compute, self._copyback)

    def open(self, session_id: str, tokens_max: int) -> PairSession:
        """See Placement."""
        owner = self.owner.open(session_id, tokens_max)
        try:
            peer = self.peer.open(session_id, tokens_max, owner.operations)
        except DoesNotFit:
            owner.close()
            raise
        return self._paired(owner, peer)

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback
    ) -> PairSession:
        """See Placement."""
        assert isinstance(source, PairSession), "a session of another placement"
        reserved = self.peer.needs(tokens_max)
        missing = self.peer.pool.missing_bytes(reserved.device_bytes)
        if missing:  # asked first, since what begins on the owner is not taken back; shared pages are counted as if they were not
            raise DoesNotFit(host_missing_bytes=0, device_missing_bytes=missing)
        owner = self.owner.fork(source.owner, session_id, tokens_max, rows, compute=compute, copyback=copyback)
        peer = self.peer.fork(
            source.peer, session_id, tokens_max, rows, compute=self._compute, copyback=self._copyback, operations=owner.operations,
            opened=lambda opened: _follow(owner, opened),
        )  # fmt: skip
        whole = min(source.owner.counts.mirrored, source.peer.counts.mirrored) // BLOCK_ROWS
        if rows % BLOCK_ROWS and rows // BLOCK_ROWS < whole and source.owner.ring is not None:
            # The peer holds no reference of its own to the block that it copies from; until it is done the source must not write there.
            kept = source.owner.history.share(rows // BLOCK_ROWS + 1, rows // BLOCK_ROWS)
            owner.operations.when_idle(lambda: _release(source.owner, kept))
        return self._paired(owner, peer)

    def extra_bytes(self, session: SessionMemory) -> int:
        """See Placement: of the device where a shrink frees more."""
        assert isinstance(session, PairSession), "a session of another placement"
        return max(self.owner.extra_bytes(session.owner), self.peer.extra_bytes(session.peer))

    def shrink(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, PairSession), "a session of another placement"
        if session.owner.holdings.chunk_open or session.peer.holdings.chunk_open:
            return False
        return self.owner.shrink(session.owner) and self.peer.shrink(session.peer)

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        assert isinstance(session, PairSession), "a session of another placement"
        given = self.owner.rest(session.owner), self.peer.rest(session.peer)
        return any(given)

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement."""
        assert isinstance(session, PairSession), "a session of another placement"
        given = self.owner.shed(session.owner, shared=shared), self.peer.shed(session.peer, shared=shared)
        return any(given)

    def grow(self, session: SessionMemory, tokens_max: int, *, cut: int | None = None) -> bool:
        """See Placement. The peer, which takes no block of the shared arena, is asked first."""
        assert isinstance(session, PairSession), "a session of another placement"
        with kept_for_cuts(session, cut, tokens_max):
            changed = self.peer.grow(session.peer, tokens_max)
            session.moved = session.moved or changed  # the owner may refuse, and the next one finds the peer grown
            changed = self.owner.grow(session.owner, tokens_max) or session.moved
        session.moved = False
        return changed

    def statistics(self) -> PlacementStatistics:
        """See Placement: the owner's."""
        return self.owner.statistics()

    def close(self) -> None:
        """See Placement."""
        self.owner.close()
        self.peer.close()


def _follow(owner: OneSession, peer: OneSession) -> None:
    """Where the peer's blocks of RAM are the owner's: say whose, and offer those that it does not share."""
    store = peer.history.store
    if isinstance(store, FollowedBlocks):
        store.follow(owner.history)
        store.offer(owner.history.allotment.ids[peer.history.blocks :])


def _release(session: OneSession, blocks: Sequence[BlockId]) -> None:
    for block in blocks:
        session.history.store.release(block)
