"""Hot caches that are larger than usual, of running sessions, brought back when somebody waits for device memory.

Holds which sessions are to shrink. Such a session sits out a step or two, or the next chunk of its prompt: once nothing of it is in flight
its caches are replaced by those reserved for it, with the rows used last, and it goes on. Idle sessions are `stored.py`'s: they give up
their caches whole.

Invariants:
1. A session shrinks only with nothing of it in flight, and what names its addresses is forgotten before its next step.
2. Nobody is asked for more than is missing, the largest extra first; who runs no more is not asked any more.
"""

from collections.abc import Callable, Sequence

from engine.request import Request
from engine.session import Session
from memory.placement import Placement

__all__ = ["Pressure"]


class Pressure:
    """Of one stage. Loop thread only."""

    def __init__(self, placement: Placement, running: Callable[[], Sequence[Request]], forget: Callable[[Request], None]) -> None:
        """Args: running: requests that append or decode now. forget: told of a request whose addresses changed."""
        self._placement = placement
        self._running = running
        self._forget = forget
        self._asked: set[Session] = set()

    def ask(self, missing_bytes: int) -> bool:
        """Have running sessions give back what their hot caches have beyond the usual; returns whether any will."""
        self._drop_gone()
        extra = {one.session: self._extra(one.session) for one in self._running()}
        coming = sum(extra[session] for session in self._asked)
        for session in sorted(extra.keys() - self._asked, key=lambda one: (-extra[one], one.id)):
            if coming >= missing_bytes or extra[session] == 0:
                break
            self._asked.add(session)
            coming += extra[session]
        return bool(self._asked)

    def holds(self, session: Session) -> bool:
        """Whether a session is to take no step and begin no chunk now."""
        return session in self._asked

    def turn(self) -> None:
        """Shrink those that are still."""
        if not self._asked:
            return
        self._drop_gone()
        for request in self._running():
            session, memory = request.session, request.session.memory
            still = memory is not None and request.in_flight == 0 and memory.operations.outstanding == 0
            if session in self._asked and memory is not None and still and self._placement.shrink(memory):
                self._forget(request)
                self._asked.discard(session)

    def _drop_gone(self) -> None:
        self._asked &= {one.session for one in self._running()}

    def _extra(self, session: Session) -> int:
        return 0 if session.memory is None else self._placement.extra_bytes(session.memory)
