"""One session's memory on a stage of another machine. See `remote.py`."""

from collections.abc import Callable
from typing import Any

from engine.errors import NodeLost
from engine.node import calls
from engine.node.far_room import NO_NEEDS, FarRoom
from engine.node.far_session import FarSession
from kernels.layout import BLOCK_ROWS
from memory.append import blocks_of
from memory.errors import CopybackInFlight, DoesNotFit
from memory.needs import Needs
from memory.placement import PlacementStatistics
from memory.ring import room
from memory.session import SessionStatistics
from streams import Event

__all__ = ["RemoteMemory"]


class RemoteMemory:
    """See FollowerMemory."""

    def __init__(self, session: FarSession, room: FarRoom, tokens_max: int, closed: Callable[[], None]) -> None:
        """Args: closed: told when it is."""
        self.session = session
        self._room = room
        self._tokens_max = tokens_max
        self._closed = closed
        self._rests, self._shed = False, 0

    @property
    def held(self) -> SessionStatistics:
        """See FollowerMemory."""
        return self.session.held

    @property
    def reads(self) -> tuple[int, int, int]:
        """See FollowerMemory."""
        return self.session.reads

    @property
    def extra_bytes(self) -> int:
        """See FollowerMemory."""
        return self.session.extra_bytes

    def room(self, upper: int, rows: int) -> bool:
        """See FollowerMemory."""
        if self.session.frozen or upper + rows > self._tokens_max:
            return False
        return self._room.held.placement == "resident" or room(upper, rows, self.held.counts.mirrored)

    def check_cut(self, rows: int) -> None:
        """See FollowerMemory."""
        one, counts = self.session, self.held.counts
        copied = one.committed // BLOCK_ROWS * BLOCK_ROWS
        if one.frozen or (rows < copied and (one.copying or counts.mirrored < counts.submitted)):
            raise CopybackInFlight(f"session {one.name}: copies of rows behind {rows} are in flight on {one.far.name}")
        arena = self._room.held.arena
        if rows % BLOCK_ROWS and arena.free <= arena.reserved and arena.references > arena.blocks - arena.free:
            raise DoesNotFit(host_missing_bytes=arena.block_bytes)  # somebody shares a block, maybe this one

    def _call(self, name: str, body: object, *, copies: bool = False) -> Event[calls.Held | None]:
        event: Event[calls.Held | None] = self.session.ask(name, body, calls.Held | None)  # type: ignore[arg-type]  # a union, as a type
        self.session.follow(event, copies=copies)
        return event

    def commit(self, rows: int) -> None:
        """See FollowerMemory."""
        one = self.session
        one.committed += rows
        assert one.committed <= one.logical, f"{one.committed} rows committed of {one.logical}"
        self._call("commit", calls.Rows(one.number, rows), copies=True)

    def retract(self, rows: int) -> None:
        """See FollowerMemory."""
        if rows:
            self.session.logical -= rows
            self._call("retract", calls.Rows(self.session.number, rows))

    def truncate(self, rows: int) -> Event[None]:
        """See FollowerMemory."""
        one, cut = self.session, Event[None]("truncate", session=self.session.name)
        one.logical, one.committed = rows, min(one.committed, rows)
        self._call("truncate", calls.Rows(one.number, rows)).on_done(lambda done: _pass(done, cut))
        return cut

    def grow(self, tokens_max: int, cut: int | None) -> bool:
        """See FollowerMemory. Raises Asked, NodeLost too."""
        if tokens_max <= self._tokens_max and not self._rests and not self._shed:
            return False
        one, tokens_max = self.session, max(tokens_max, self._tokens_max)
        if one.gone is not None:
            raise NodeLost(str(one.gone))
        whole, has = self._room.needs(tokens_max), blocks_of(one.committed if self._rests else self._tokens_max)
        block_bytes = self._room.layout.block_bytes
        needs = Needs(max(0, whole.host_bytes - has * block_bytes) + (0 if cut is None else block_bytes), whole.device_bytes)
        # Not held: the stages grow one after the other, each only while nothing of the session is in flight.
        one.follow(self._room.ask_grow(one, calls.Grow(one.number, tokens_max, cut), needs), copies=False, holds=False)
        self._tokens_max, self._rests, self._shed = tokens_max, False, 0
        return True

    def rest(self) -> bool:
        """See FollowerMemory."""
        if self._rests:
            return False
        self._rests = True
        self._room.note(self._call("rest", calls.Memory(self.session.number)), NO_NEEDS)
        return True

    def shed(self, *, shared: bool) -> bool:
        """See FollowerMemory."""
        level = 2 if shared else 1
        if self._shed >= level:
            return False
        self._rests, self._shed = True, level
        self._room.note(self._call("shed", calls.Shed(self.session.number, shared)), NO_NEEDS)
        return True

    def shrink(self) -> bool:
        """See FollowerMemory."""
        if self.session.chunk_open:
            return False
        self._room.note(self._call("shrink", calls.Memory(self.session.number)), NO_NEEDS)
        return True

    def close(self) -> None:
        """See FollowerMemory."""
        one = self.session
        one.closed = True
        self._closed()
        event = one.ask("close", calls.Memory(one.number), PlacementStatistics)
        event.on_done(self._freed)
        one.told.hold(event)
        self._room.note(event, NO_NEEDS)

    def _freed(self, event: Event[PlacementStatistics]) -> None:
        if event.error() is None:
            self.session.far.held = event.result()


def _pass(done: Event[Any], to: Event[None]) -> None:
    to.settle(None, done.error())
