"""`Departures`: idle sessions that leave memory for the disk, one at a time, so that others find room.

Holds the sessions of callers. Decides which one goes next, and when a session that was archived may be let go of. Knows no directory:
whoever has a place for archives says how a session is brought there (`archive_with`). Without such a place nobody leaves.

Invariants:
1. A session leaves only if since before its export began nobody has come for it and nothing of it has changed: the archive is all of it.
2. The least recently used goes first. One at a time: whoever waits for room looks again after each.
3. What cannot be archived stays in memory; it is tried once, and again only after somebody was refused for want of it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from engine.errors import ArchiveFailed, ForebayError, SessionBusy, UnknownSession
from engine.protocol import SessionId
from engine.request import Request
from engine.session import Phase, Session

__all__ = ["Departures"]

_log = structlog.get_logger("engine")


class Departures:
    """One engine's. Loop thread only."""

    def __init__(
        self, by_use: Callable[[], Iterable[Session]], requests_of: Callable[[Session], Sequence[Request]],
        let_go: Callable[[Session], None], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        """None leaves yet.

        Args: by_use: sessions that have rows, the least recently used first. requests_of: those of a session that have
            not ended. let_go: closes its memory. wake: called when one has left, or could not.
        """
        self.held: dict[SessionId, Session] = {}  # the sessions of callers, by id; who leaves is taken out
        self._by_use = by_use
        self._requests_of = requests_of
        self._let_go = let_go
        self._wake = wake
        self._archives: dict[str, Callable[[SessionId], Awaitable[object]]] = {}  # by namespace
        self._find: dict[str, Callable[[SessionId], Path | None]] = {}  # likewise: where an archive lies
        self._failed: set[Session] = set()  # tried since the last one left or somebody was refused
        self._next: Session | None = None
        self._asked, self._done = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._moves = 0
        self.failure = ""  # why the last one that was tried stayed; empty once one has left
        self.count = 0  # that have left to make room

    def archive_with(
        self, archive: Callable[[SessionId], Awaitable[object]], namespace: str, find: Callable[[SessionId], Path | None] | None = None
    ) -> None:
        """From now on sessions of a namespace leave.

        Args: archive: exports one to where it will be found again; raises ForebayError. find: where that is, if it is there.
        """
        self._archives[namespace] = archive
        if find is not None:
            self._find[namespace] = find

    def archive_of(self, session: Session) -> Path | None:
        """Where the last archive of a session lies, if there is one."""
        find = self._find.get(session.namespace)
        return None if find is None else find(session.id)

    @property
    def under_way(self) -> bool:
        """Whether a session is leaving."""
        return self._next is not None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A session goes to an archive or comes from one for the length of the block; afterwards it may leave."""
        self._moves += 1
        try:
            yield
        finally:
            self._moves -= 1
            self._wake()

    @property
    def unsettled(self) -> bool:
        """Whether sessions that have memory will soon be idle or at work, which are neither now: whoever waits is woken then."""
        return self._moves > 0 or any(session.coming and session.memory is not None for session in self.held.values())

    def begin(self, *spared: Session | None) -> bool:
        """Let the next one leave, if none is leaving; returns False where nobody may, or all have been tried in vain."""
        if self._next is None and self._archives and not self._closing:
            free = [one for one in self._by_use() if one not in spared and self._may_leave(one)]
            left = [one for one in free if one not in self._failed]
            if left:
                self._next, self._done = left[0], asyncio.Event()
                self._asked.set()
            elif not free:
                self.failure = ""
        return self.under_way

    def refused(self) -> None:
        """Whoever waited for room is told that there is none: for the next one all may be tried again."""
        self._failed.clear()

    async def make_room(self, *spared: Session | None) -> bool:
        """Wait until one has left or was tried; returns False where nobody may."""
        if not self.begin(*spared):
            self.refused()
            return False
        await self._done.wait()
        return True

    def _may_leave(self, session: Session) -> bool:
        at_rest = session.phase is Phase.READY and not session.busy and session.broken is None
        mine = self.held.get(session.id) is session and session.namespace in self._archives
        return mine and at_rest and bool(session.tokens) and not self._expected(session)

    def _expected(self, session: Session) -> bool:
        return session.closing or session.coming > 0 or bool(self._requests_of(session))

    async def archive(self, session_id: SessionId) -> bool:
        """Bring a session to disk and let go of its memory; returns False where it stays because somebody came for it meanwhile.

        Raises: UnknownSession; SessionBusy: it is in a turn; BadRequest: it broke; and what archiving raises. It stays then.
        """
        session = self.held.get(session_id)
        if session is None:
            raise UnknownSession(f"no session {session_id!r}", field="session")
        while ending := [request for request in self._requests_of(session) if request.finished]:
            await ending[0].ended.wait()  # the session is theirs for a moment more
        return await self._leave(session)

    async def _leave(self, session: Session) -> bool:
        archive = self._archives.get(session.namespace)
        assert archive is not None, "nobody said where archives go"
        session.check_open()
        if not session.idle or self._expected(session):
            raise SessionBusy(f"session {session.id} is {session.phase.value}; archive it between its turns", field="session")
        before = (session.revision, len(session.tokens))
        await archive(session.id)
        changed = (session.revision, len(session.tokens)) != before
        if self.held.get(session.id) is not session or changed or not session.idle or self._expected(session):
            return False
        del self.held[session.id]
        session.closing = True
        self._let_go(session)
        _log.info("session.archived", session_id=session.id, tokens=len(session.tokens))
        return True

    async def run(self) -> None:
        """Until closed. Cancel: nobody leaves any more, and whoever waits for room hears of it."""
        try:
            while not self._closing:
                await self._asked.wait()
                self._asked.clear()
                if self._next is not None:
                    await self._try(self._next)
                    self._one_tried()
        finally:
            self._closing = True
            self._one_tried()  # also one that was asked to leave and had not begun to

    def _one_tried(self) -> None:
        self._next = None
        self._done.set()
        self._wake()

    async def _try(self, session: Session) -> None:
        try:
            if await self._leave(session):
                self.failure = ""
                self._failed.clear()
                self.count += 1
            else:
                self._failed.add(session)
        except ForebayError as error:
            self.failure = str(error)
            self._failed.add(session)
            if isinstance(error, ArchiveFailed):  # the disk's fault: the others would meet it too
                self._failed.update(one for one in self._by_use() if self._may_leave(one))
            _log.warning("session.not_archived", session_id=session.id, reason=str(error))
        except Exception as error:  # the edge of this task: the session stays, and nobody else pays for it
            self.failure = f"{type(error).__name__} while session {session.id} was archived; see the log"
            self._failed.add(session)
            _log.exception("session.not_archived", session_id=session.id)

    def close(self) -> None:
        """Let nobody leave any more; `run` returns once the one that is leaving has left."""
        self._closing = True
        self._asked.set()

    async def settle(self) -> None:
        """Let nobody leave any more, and wait for the one that is leaving."""
        self.close()
        if self.under_way:
            await self._done.wait()
