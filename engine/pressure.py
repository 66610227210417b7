"""Hot caches that are larger than usual, of running sessions, brought back when somebody waits for device memory.

Holds which sessions are to shrink. Such a session sits out a step or two, or the next chunk of its prompt: once nothing of it is in flight
its caches are replaced by those reserved for it, with the rows used last, and it goes on. Idle sessions are `stored.py`'s: they give up
their caches whole.

Invariants:
1. A session shrinks only with nothing of it in flight, and what names its addresses is forgotten before its next step.
2. Nobody is asked for more than is missing, the largest extra first; who runs no more is not asked any more.
3. Who waits for it goes on when nobody is asked any more, also because all ended or the loop did.
"""

import asyncio
from collections.abc import Callable, Sequence

from engine.request import Request
from engine.session import Session
from memory.errors import DoesNotFit
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
        self._eased: asyncio.Event | None = None  # of those who wait until nobody is asked any more; each time a new one

    def can_ease(self, missing_bytes: int) -> bool:
        """Whether device memory is missing that running sessions have beyond the usual."""
        return missing_bytes > 0 and any(self._extra(one.session) > 0 for one in self._running())

    async def eased(self, missing: BaseException | None) -> bool:
        """Ask, and wait until those who were asked have given it back or run no more; returns False at once where there is nothing.

        Args: missing: why something was refused; for anything but missing memory nobody is asked.
        """
        device = missing.device_missing_bytes if isinstance(missing, DoesNotFit) else 0
        if not self.can_ease(device) or not self.ask(device):
            return False
        self._eased = self._eased or asyncio.Event()
        await self._eased.wait()
        return True

    def close(self) -> None:
        """Nobody will shrink any more."""
        self._asked.clear()
        self._told()

    def _told(self) -> None:
        if self._eased is not None and not self._asked:
            self._eased.set()
            self._eased = None

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
        self._drop_gone()
        for request in self._running():
            session, memory = request.session, request.session.memory
            still = memory is not None and request.in_flight == 0 and memory.operations.outstanding == 0
            if session in self._asked and memory is not None and still and self._placement.shrink(memory):
                self._forget(request)
                self._asked.discard(session)
        self._told()

    def _drop_gone(self) -> None:
        self._asked &= {one.session for one in self._running()}

    def _extra(self, session: Session) -> int:
        return 0 if session.memory is None else self._placement.extra_bytes(session.memory)
