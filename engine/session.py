"""A session: one conversation that outlives its requests, and the only table that moves its phase.

Holds the tokens, the phase and the session's memory. Knows no steps and no HTTP.

Invariants:
1. Phases change through `Session.move` alone; a move that is not in the table raises and changes nothing.
2. `rows <= len(tokens)`: the last sampled token has no row until the next step or turn feeds it. `tokens` grows in place and is cut by
   `cut` alone, so what a request took for its prompt stays.
3. The phase, never a row count, says whether rows go through append or decode.
Source: design, section 11.
"""

from array import array
from enum import Enum
from time import time  # bound here: a virtual run forbids asking, and nothing depends on what it says
from typing import Final

from engine.errors import BadRequest
from engine.protocol import SessionId
from memory.session import SessionMemory

__all__ = ["Phase", "Session"]


class Phase(Enum):
    """Where a session is in its life."""

    NEW = "new"
    APPENDING = "appending"
    READY = "ready"
    DECODING = "decoding"
    EXPORTING = "exporting"
    ARCHIVED = "archived"
    BROKEN = "broken"
    CLOSED = "closed"


_MOVES: Final = {
    Phase.NEW: {Phase.APPENDING, Phase.ARCHIVED, Phase.CLOSED, Phase.BROKEN},
    Phase.APPENDING: {Phase.READY, Phase.BROKEN},
    Phase.READY: {Phase.APPENDING, Phase.DECODING, Phase.EXPORTING, Phase.ARCHIVED, Phase.CLOSED, Phase.BROKEN},
    Phase.DECODING: {Phase.READY, Phase.BROKEN},
    Phase.EXPORTING: {Phase.READY, Phase.ARCHIVED, Phase.BROKEN},
    Phase.ARCHIVED: {Phase.READY, Phase.CLOSED, Phase.BROKEN},
    Phase.BROKEN: {Phase.CLOSED},
    Phase.CLOSED: set(),
}


class Session:
    """One conversation. `temporary`: made for a single request and closed with it."""

    __slots__ = ("_phase", "closing", "coming", "id", "made_up", "memory", "namespace", "revision", "temporary", "tokens", "used_at")

    def __init__(self, session_id: SessionId, *, temporary: bool, namespace: str = "") -> None:
        """Args: namespace: whose it is; its rows are shared with sessions of the same one only."""
        self.id = session_id
        self.temporary = temporary
        self.namespace = namespace
        self.made_up = False  # its rows are not its tokens'
        self.used_at = 0.0  # Unix time of its last turn's beginning, or of its own
        self.tokens: array[int] = array("i")  # 4 bytes each, and nothing that the garbage collector visits
        self.memory: SessionMemory | None = None
        self.revision = 0
        self.closing = False  # nobody may begin in it any more
        self.coming = 0  # turns and cuts that were asked for and have not begun
        self._phase = Phase.NEW

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def rows(self) -> int:
        """Committed rows."""
        return 0 if self.memory is None else self.memory.counts.committed

    @property
    def broken(self) -> BaseException | None:
        """What broke its memory, if anything did."""
        return None if self.memory is None else self.memory.operations.broken

    @property
    def busy(self) -> bool:
        """Whether operations of its memory are in flight."""
        return self.memory is not None and self.memory.operations.outstanding > 0

    @property
    def idle(self) -> bool:
        """Whether a request may start in it now."""
        return self._phase in (Phase.NEW, Phase.READY)

    def check_open(self) -> None:
        """Raise BadRequest where nothing more can be done with it: it is closed, or broke and gave its memory back."""
        if self.closing or self._phase in (Phase.BROKEN, Phase.CLOSED):
            state = "closed" if self.closing else self._phase.value
            raise BadRequest(f"session {self.id} is {state}; create another", field="session")

    def used(self) -> None:
        """Its last turn's beginning, or its own, is now."""
        self.used_at = time()

    def cut(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, in a list of their own: a request that had more of them in its prompt has the old one still."""
        if tokens < len(self.tokens):
            self.tokens = self.tokens[:tokens]

    def move(self, to: Phase) -> None:
        """Change phase; asserts that the table allows it."""
        assert to in _MOVES[self._phase], f"session {self.id} cannot go from {self._phase.value} to {to.value}"
        self._phase = to

    def __repr__(self) -> str:
        return f"<Session {self.id} {self._phase.value}: {len(self.tokens)} tokens, {self.rows} rows>"
