"""The sessions that callers hold: made, looked at, forked, cut and closed between their turns.

Holds them by id. Knows the step loop, which runs their turns; knows no prompts and no HTTP.

Invariants:
1. A session's revision says how often what it holds has changed: once a turn, also one that was left, and once a cut.
2. What is checked about a revision holds until the turn is queued: between the last check and that nobody else runs.
3. Forks share rows of the same namespace only.
Source: design, section 11.
"""

import secrets
from collections.abc import Callable
from typing import TypeVar

from engine.errors import BadRequest, NodeLost, NotAdmitted, SessionBusy, StaleRevision, UnknownSession
from engine.loop import StepLoop
from engine.protocol import SessionId, SessionView
from engine.request import Request
from engine.session import Phase, Session
from engine.stored import reusable
from kernels.layout import BLOCK_ROWS, RING_BLOCKS
from memory.errors import DoesNotFit

__all__ = ["Sessions"]

T = TypeVar("T")
_MANIFEST_BYTES = 8192  # beside tokens, hidden states as base64, and two checksums of 35 characters a block


class Sessions:
    """One engine's. Loop thread only."""

    def __init__(self, loop: StepLoop, sessions_max: int) -> None:
        self.by_id = loop.departures.held
        self._loop = loop
        self._sessions_max = sessions_max

    def find(self, session_id: SessionId, namespace: str | None = None) -> Session:
        """Raises UnknownSession, also where the session is not of the namespace; None: any will do."""
        found = self.by_id.get(session_id)
        if found is None or namespace not in (None, found.namespace):
            raise UnknownSession(f"no session {session_id!r}", field="session")
        return found

    def fresh(self, namespace: str = "") -> Session:
        """A session of a single request, that nobody holds."""
        return Session(SessionId(secrets.token_hex(8)), temporary=True, namespace=namespace)

    def create(self, namespace: str = "") -> Session:
        """A new, empty session. Raises NotAdmitted when too many are held."""
        if len(self.by_id) >= self._sessions_max:
            raise NotAdmitted(f"{len(self.by_id)} sessions are held, the most allowed; close one", retry_after_s=5.0)
        session = Session(SessionId(secrets.token_hex(8)), temporary=False, namespace=namespace)
        session.used()
        self.by_id[session.id] = session
        return session

    def fork(self, session_id: SessionId, tokens: int | None, revision: int | None) -> Session:
        """A session that begins with the first `tokens` tokens of another one, all of them by default; the other may be running.

        Raises: UnknownSession, StaleRevision, BadRequest: more tokens than there are, or it is broken; NotAdmitted; NodeLost.
        """
        source = self.find(session_id)
        self.check(source, revision)
        if source.broken is not None or source.phase is Phase.BROKEN:
            raise BadRequest(f"session {source.id} is broken, and its rows with it; fork another", field="session")
        count = _count(source, tokens)
        made = self.create(source.namespace)
        held = min(count, source.rows)
        rows, stage = reusable(self._loop.stage, source, held, held), self._loop.stage
        memory = source.memory
        if memory is not None and rows:
            try:
                made.memory = self._fitted(
                    lambda: stage.placement.fork(
                        memory, made.id, count, rows, compute=stage.streams.compute, copyback=stage.copyback
                    ),
                    source,
                )  # fmt: skip
            except BaseException:
                del self.by_id[made.id]
                raise
        made.tokens = source.tokens[:count]
        if made.memory is not None:
            made.move(Phase.ARCHIVED)  # it comes with rows, as one from an archive does
            made.move(Phase.READY)
        self._loop.stored.note(made)
        return made

    async def truncate(self, session_id: SessionId, tokens: int, revision: int | None) -> Session:
        """Keep the first `tokens` tokens of a session that is between two turns.

        Raises: UnknownSession, StaleRevision, SessionBusy, NotAdmitted, NodeLost; BadRequest: more tokens than there are, or it broke.
        Nothing changed then.
        """
        session = self.find(session_id)
        self.check(session, revision)
        while session.busy and session.memory is not None and self._between(session):
            await session.memory.operations.settle()
        self.check(session, revision)
        if not self._between(session):
            raise SessionBusy(f"session {session.id} is {session.phase.value}; truncate it between its turns", field="session")
        count, memory = _count(session, tokens), session.memory
        held = min(count, session.rows)
        rows = reusable(self._loop.stage, session, held, held)
        if memory is not None and rows < memory.counts.logical:
            self._fitted(lambda: memory.truncate(rows, self._loop.stage.streams.compute), session)
        if count < len(session.tokens):
            session.revision += 1
        session.cut(count)
        session.used()
        self._loop.stored.note(session)
        return session

    def _fitted(self, take: Callable[[], T], spared: Session) -> T:
        """What `take` gives, with what idle sessions give back for it. Raises NotAdmitted, caused by what is missing."""
        while True:
            try:
                return take()
            except DoesNotFit as error:
                device = error.device_missing_bytes  # what running sessions have of it beyond the usual is waited for: nobody idle pays
                if self._loop.pressure.can_ease(device) or self._loop.stored.reclaim(spared, device=device > 0) is None:
                    raise NotAdmitted(f"it does not fit now: {error}; close a session, or try later", retry_after_s=5.0) from error

    def _between(self, session: Session) -> bool:
        """Whether the session is between two turns."""
        return session.idle and not session.closing and not self.running(session)

    def running(self, session: Session) -> list[Request]:
        """Requests of the session that have not ended."""
        return self._loop.of(session)

    def check(self, session: Session, revision: int | None) -> None:
        """Raise where nobody may go on with it.

        Raises: NodeLost: rows of it were lost with a node that is away, or are just coming back, or it was cut off since it was found (an
        export now would replace its archive by one without rows); BadRequest: it is closed, or broke;
        StaleRevision: it is not at `revision`, or a turn is on its way; None: any will do.
        """
        over = session.phase in (Phase.BROKEN, Phase.CLOSED) or session.broken is not None
        whole = not over and (session.memory is not None or not session.tokens)  # else what is done now would be done to a part of it
        if not session.closing and ((self._loop.away and not whole) or self.by_id.get(session.id, session) is not session):
            raise NodeLost(f"{self._loop.away or 'a node was away'}; session {session.id} goes on, try again when it is back")
        session.check_open()
        if revision is None:
            return
        if session.revision != revision:
            raise StaleRevision(f"session {session.id} is at revision {session.revision}, not {revision}", session.revision)
        if self.running(session):
            raise StaleRevision(f"session {session.id} has a turn running behind revision {revision}", session.revision)

    async def between_turns(self, session: Session) -> None:
        """As `settle`, then as `check` of any revision. Where the device failed there is neither a turn nor anybody who goes on."""
        if not self._loop.stage.backend.lost.done():
            await self.settle(session)
            self.check(session, None)

    async def settle(self, session: Session) -> None:
        """Wait for turns whose last token was handed out already: the session is theirs for a moment more."""
        while ending := [request for request in self.running(session) if request.finished]:
            await ending[0].ended.wait()

    def views(self) -> dict[SessionId, SessionView]:
        """All that are held, in order of their making."""
        return {session_id: self._view(session) for session_id, session in self.by_id.items()}

    def _view(self, session: Session) -> SessionView:
        host = device = 0
        archive = 8 * len(session.tokens) + _MANIFEST_BYTES
        if session.memory is not None:
            archive += session.rows * (self._loop.stage.block_bytes + 70) // BLOCK_ROWS + 6 * session.memory.hidden.numel()
            host, device = held_bytes(self._loop, session)
        return SessionView(
            id=session.id, namespace=session.namespace, phase=session.phase.value, revision=session.revision, token_ids=session.tokens,
            rows=session.rows, host_bytes=host, device_bytes=device, used_at=session.used_at, archive_bytes=archive,
        )  # fmt: skip


def held_bytes(loop: StepLoop, session: Session) -> tuple[int, int]:
    """Bytes of blocks in RAM, and on the device, that a session holds; shared ones count for each that shares them."""
    memory, stage = session.memory, loop.stage
    assert memory is not None, f"{session!r} holds nothing"
    held, block_bytes = memory.statistics(), stage.block_bytes
    blocks = held.blocks * block_bytes
    pages = held.pages * sum(layout.key_layers * layout.key.page_bytes for layout in stage.layouts)
    if memory.ring is None:
        return -(-held.counts.mirrored // BLOCK_ROWS) * block_bytes, blocks + pages
    hot = sum(cache.row_bytes + cache.map_bytes for cache in held.hot)
    return blocks, pages + RING_BLOCKS * block_bytes + hot


def _count(session: Session, tokens: int | None) -> int:
    held = len(session.tokens)
    if tokens is None:
        return held
    if not 0 <= tokens <= held:
        raise BadRequest(f"session {session.id} has {held} tokens, so 0 to {held} can be kept, not {tokens}", field="tokens")
    return tokens
