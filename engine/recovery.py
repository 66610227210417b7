"""What becomes of sessions when a node that has some of their layers is lost: they keep their tokens, and get their rows again.

Holds which sessions lost rows. Knows the engine's loop, sessions and archives; of the nodes only that they were lost and are there again.

Invariants:
1. From the loss on nobody new begins, and what ran has ended with `NodeLost`, until every session was seen to again.
2. A session keeps its id, its revision moves by one if a turn was cut off, and it has every token that a caller was given; what a prompt
   brought that had not been read to its end is not in it.
3. Rows come from the last archive, where there is one of these tokens; those behind are made again by the session's next turn. So too
   where another loss cuts that off.
"""

from collections.abc import MutableMapping
from contextlib import AbstractAsyncContextManager

import structlog

from engine.archive.transfers import Archives
from engine.errors import ForebayError, NodeLost
from engine.loop import StepLoop
from engine.node.head import Head
from engine.protocol import SessionId
from engine.request import Request
from engine.session import Phase, Session

__all__ = ["Recovery"]

_log = structlog.get_logger("engine")


class Recovery:
    """Of one engine. Loop thread only."""

    def __init__(self, loop: StepLoop, sessions: MutableMapping[SessionId, Session], archives: Archives) -> None:
        self._loop = loop
        self._sessions = sessions
        self._archives = archives
        self._touched: dict[Session, None] = {}
        self._losses = 0

    def met(self, head: Head) -> AbstractAsyncContextManager[None]:
        """With all nodes there, for the length of the block; sessions live through the loss of one."""
        head.on_lost, head.on_whole = self.lost, self.found
        return head.met()

    def lost(self, error: BaseException) -> None:
        """A node is out of reach: nobody new begins, and what runs ends."""
        self._losses += 1
        if not self._loop.away:
            self._loop.away = f"a node is away ({error})"
        for session in self._sessions.values():
            if session.phase not in (Phase.BROKEN, Phase.CLOSED) and not session.closing:
                self._touched[session] = None
        for request in (*self._loop.appending, *self._loop.decoding):
            if request.session.memory is not None:
                request.session.memory.operations.break_with(error)
        self._loop.wake()

    async def found(self) -> None:
        """All nodes are there: see to every session, then let requests begin again."""
        while cut_off := self._cut_off():
            self._loop.wake()
            await cut_off[0].ended.wait()
        for session in self._loop.stored.sessions:
            if session.broken is not None:
                self._loop.stored.give_up(session)
        losses = self._losses
        for session in list(self._touched):
            if losses != self._losses:
                break
            del self._touched[session]
            if self._sessions.get(session.id) is session and not session.closing:
                await self._again(session)
        if losses == self._losses:  # else somebody was lost meanwhile: all nodes are met again, and this is called again
            self._loop.away = ""
        self._loop.wake()

    def _cut_off(self) -> list[Request]:
        """Requests that the loss ends: those that run, and those that wait behind one of them. They are told while a node is away."""
        loop, over = self._loop, (Phase.BROKEN, Phase.CLOSED)
        return [*loop.appending, *loop.decoding, *(one for one in loop.waiting if one.session.phase in over)]

    async def _again(self, session: Session) -> None:
        """Bring one session to where its next turn can begin."""
        await self._archives.left(session)
        if session.phase in (Phase.BROKEN, Phase.CLOSED):
            session = self._made_anew(session)
        elif session.broken is None and (session.memory is not None or not session.tokens):
            return  # nothing of it was in flight, and no part of it lay there; without memory it lost its rows to a loss before this one
        self._loop.drop_memory(session)
        rows, place = 0, self._loop.departures.archive_of(session)
        if place is not None:
            try:
                rows = await self._archives.refill(session, place)
            except NodeLost:
                self._touched[session] = None
                return
            except ForebayError as error:
                _log.warning("session.not_refilled", session_id=session.id, error=str(error))
        if session.closing:  # while its rows came, so that whoever closed it found no memory
            self._loop.drop_memory(session)
            return
        if rows:
            self._loop.stored.note(session)
        _log.info("session.recovered", session_id=session.id, tokens=len(session.tokens), rows=rows)

    def _made_anew(self, broken: Session) -> Session:
        """A session in the place of one whose turn was cut off."""
        if broken.phase is Phase.BROKEN:
            broken.move(Phase.CLOSED)
        self._loop.drop_memory(broken)
        session = Session(broken.id, temporary=False, namespace=broken.namespace)
        session.tokens, session.revision, session.used_at = broken.tokens, broken.revision + 1, broken.used_at
        session.made_up = broken.made_up
        session.move(Phase.ARCHIVED)
        session.move(Phase.READY)
        self._sessions[session.id] = session
        return session
