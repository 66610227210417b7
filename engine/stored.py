"""Histories that outlive their requests: which of them a prompt continues, and who gives memory back when it runs short.

Holds the index of prefixes and, in order of use, the sessions that have rows: idle ones of ended requests (`stored`), and those that
requests or callers hold. Where no histories are stored, the index is empty, and only the order is kept. Knows no steps; moves no phase but
that of a stored session which it gives up.

Invariants:
1. A stored session is temporary, ready, and nobody's: it is continued, forked, rested or dropped here and nowhere else.
2. What is reused is always less than the prompt: the logits of its last token are needed.
3. Rows are reused only where the state before the next row is known, or its MTP row is there already (`step_back`).
4. Nothing is found across namespaces.
5. What goes another way than a stored history leaves its tail as it was, if a fork fits. Of what it left, more than half of which lives
   on in the fork, memory is taken back first: so a prompt asked again and again drives out its own old answers and nobody else's history.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.prefix import Match, PrefixIndex
from engine.request import Request
from engine.session import Phase, Session
from engine.stage import Stage
from kernels.layout import BLOCK_ROWS
from memory.fork import shared_rows
from memory.session import SessionMemory

__all__ = ["Beginning", "StoredSessions", "Storing", "reusable", "step_back"]


@dataclass(frozen=True, slots=True)
class Storing:
    """How histories are stored."""

    identity: bytes  # of model and row formats
    sessions_max: int  # idle ones, at most


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a request begins with: the first `rows` rows of `source`, which is continued itself (`in_place`) or forked."""

    source: Session
    rows: int
    in_place: bool
    saves: int = 0  # rows of the source that this fork keeps and that continuing it in place would cut off; 0: it could not be


def step_back(rows: int, held: int) -> int:
    """Where to go on from when the hidden state of row `rows - 1` is not known: the row there is written again and keeps its MTP row.

    Args: rows: wanted. held: rows whose tokens go on as they are; their MTP rows are there.
    Returns: at most `rows` and below `held`, inside a block whose copy brings that MTP row along; or 0, where none is needed.
    """
    first = min(rows, held - 1)
    while first > 0 and first % BLOCK_ROWS == 0:
        first -= 1
    return max(0, first)


class StoredSessions:
    """One engine's. Loop thread only."""

    def __init__(self, stage: Stage, storing: Storing | None, drop: Callable[[Session], None]) -> None:
        """Args: storing: None: no histories are stored. drop: closes a session's memory and ends it."""
        self._stage = stage
        self.stores = storing is not None
        self._index: PrefixIndex[Session] = PrefixIndex(b"" if storing is None else storing.identity)
        self._stored_max = 0 if storing is None else storing.sessions_max
        self._drop_session = drop
        self._stored: dict[Session, None] = {}  # the least recently used first
        self._used: dict[Session, None] = {}  # all that have rows of their tokens, likewise
        self._left: dict[Session, None] = {}  # of `_stored`, those a fork left behind; the first left first
        self._changes = 0
        self._matches: dict[Request, tuple[int, list[Match[Session]]]] = {}  # of waiting requests, with `_changes` when they were found

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Idle histories, the least recently used first."""
        return tuple(self._stored)

    @property
    def by_use(self) -> tuple[Session, ...]:
        """All that have rows of their tokens, the least recently used first."""
        return tuple(self._used)

    def note(self, session: Session) -> None:
        """The session has rows, which may be reused from now on; again whenever it has more of them, and after every cut."""
        if session.made_up or session.rows == 0:
            self.forget(session)
            return
        self._changes += 1
        if self.stores:
            self._index.put(session, session.tokens, session.namespace, session.rows)
        self._used.pop(session, None)
        self._used[session] = None

    def forget(self, session: Session) -> None:
        """The session is closed, broken or another one's now; nothing if it was never noted."""
        self._changes += 1
        self._index.drop(session)
        for held in (self._used, self._stored, self._left):
            held.pop(session, None)

    def keep(self, session: Session) -> bool:
        """A request of the session has ended; returns whether it stays: False where it has nothing to keep."""
        if session.phase is not Phase.READY or session.made_up or session.broken is not None or session.rows == 0:
            return False
        self.note(session)
        if not session.temporary or not self.stores:
            return not session.temporary
        self._stored[session] = None
        while len(self._stored) > self._stored_max:
            self._drop(next(iter(self._left or self._stored)))
        return True

    def close(self) -> None:
        """Drop every stored session."""
        for session in self.sessions:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        self.forget(session)
        self._drop_session(session)

    # What a request begins with.

    def find(self, request: Request, *, cuts: bool) -> Beginning | None:
        """The most rows a stateless request can begin with; of equally many, those of a history that is continued itself.

        Args: cuts: whether a history that goes on otherwise is cut rather than forked.
        """
        changes, matches = self._matches.get(request, (-1, []))
        if changes != self._changes:
            matches = self._index.match(request.appended, request.session.namespace)
            self._matches[request] = (self._changes, matches)
        best: Beginning | None = None
        for match in matches:
            found = self._beginning(match.key, min(match.tokens, match.key.rows), len(request.appended), cuts=cuts)
            if found is not None and (best is None or (found.rows, found.in_place) > (best.rows, best.in_place)):
                best = found
        return best

    def settled(self, request: Request) -> None:
        """The request has left the line."""
        self._matches.pop(request, None)

    def _beginning(self, source: Session, common: int, prompt: int, *, cuts: bool) -> Beginning | None:
        memory = source.memory
        if memory is None or memory.operations.broken is not None or source.phase in (Phase.BROKEN, Phase.CLOSED):
            return None
        rows = reusable(self._stage, source, min(common, prompt - 1), common)
        tail = source.rows - rows
        # Cutting off more than stays would cost the rarer part of what is stored. A tail, like a beginning, of less than a block is read
        # again for less than a fork takes: a block, a page a layer, a hot cache.
        may_cut = source in self._stored and tail <= rows
        in_place = may_cut and (cuts or tail < BLOCK_ROWS)
        if rows == 0 or not (in_place or common >= BLOCK_ROWS):
            return None
        return Beginning(source, rows, in_place, tail if may_cut and not in_place else 0)

    def left(self, begins: Beginning) -> None:
        """A fork has begun with most of a history that could have been cut for it."""
        if begins.saves:
            self._left[begins.source] = None

    # Memory that runs short.

    def reclaim(
        self, spared: Session | None, *, rests: bool = True, device: bool = True, drops_max: int | None = None
    ) -> Session | None:  # fmt: skip
        """Free some memory of idle sessions; returns whose, or None when nothing more is to be had at once.

        Those left behind first, then the least recently used: of all of them hot caches and reservations; then pages of index keys, shared
        ones last; then whole stored histories.
        Args: spared: rests after all others, and only with `rests`; it gives up nothing else. device: whether device memory is short:
            index keys are nowhere else. drops_max: rows that a history may have which is dropped without having been left behind.
        """
        last = {spared: None} if spared is not None and rests else {}
        in_turn = self._left | self._used
        for session in (*self._idle(in_turn, spared), *self._idle(last, None)):
            assert session.memory is not None, "an idle session was chosen for its memory"
            if self._stage.placement.rest(session.memory):
                return session
        for shared in (False, True) if device else ():
            for session in self._idle(in_turn, spared):
                assert session.memory is not None, "an idle session was chosen for its memory"
                if self._stage.placement.shed(session.memory, shared=shared):
                    return session
        dropped = next(self._idle(self._left | self._stored, spared), None)
        if dropped is None or (drops_max is not None and dropped not in self._left and dropped.rows > drops_max):
            return None
        self._drop(dropped)
        return dropped

    def give_up(self, source: Session) -> bool:
        """Drop a stored session that itself holds what is missing; returns False if somebody else has it."""
        if source not in self._stored:
            return False
        self._drop(source)
        return True

    @staticmethod
    def _idle(sessions: dict[Session, None], spared: Session | None) -> Iterator[Session]:
        """Those of which nothing is in flight, in order."""
        for session in list(sessions):
            if session is not spared and session.phase is Phase.READY and session.memory is not None and not session.busy:
                yield session

    @property
    def settling(self) -> SessionMemory | None:
        """Memory of an idle session with operations in flight: it cannot be continued or given back before they are done."""
        return next((session.memory for session in self._used if session.busy and session.phase is Phase.READY), None)

    def take(self, source: Session) -> SessionMemory:
        """A stored session's memory, for the session that continues it; the source is closed."""
        memory = source.memory
        assert memory is not None, f"{source!r} has no memory"
        assert source in self._stored, f"{source!r} is not stored"
        self.forget(source)
        source.memory = None
        source.move(Phase.CLOSED)
        return memory


def reusable(stage: Stage, source: Session, rows: int, held: int) -> int:
    """How many of the first `rows` committed rows of `source` another session can begin with, or it itself when it is cut.

    Args: held: see `step_back`.
    """
    memory = source.memory
    if memory is None:
        return 0
    still = source.idle
    if not still:  # it may be writing behind its full blocks
        rows = min(rows, shared_rows(memory, rows))
    known = still and memory.counts.hidden_from < rows
    return rows if rows == 0 or known or stage.model.mtp is None else step_back(rows, held)
