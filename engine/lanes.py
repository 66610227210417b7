"""Micro-batches of decoding requests: as many lanes as there are stages, so that each stage may have the step of another one.

Holds who is in which lane and whose turn it is. Knows no steps: whoever submits and follows them asks for the lane's members. One stage
has one lane, with everybody in it.

Invariants:
1. A request is in one lane at a time, and changes it only with no step of it in flight: a session is never in two steps at once.
2. Lanes take turns in a circle; one with nobody to step and nothing to follow is passed over. All of it follows from the order in
   which requests come and go.
3. Lanes differ by at most one request, but for the moment that one takes to change: who came last to the fullest sits out until its step
   was followed, and goes on in the emptiest.
"""

from collections.abc import Sequence

from engine.request import Request

__all__ = ["Lanes"]


class Lanes:
    """Loop thread only."""

    def __init__(self, count: int) -> None:
        self.current = 0
        self._members: list[list[Request]] = [[] for _ in range(count)]  # in order of their coming
        self._moving: Request | None = None

    def join(self, request: Request) -> None:
        """The request begins to decode: in the emptiest lane."""
        self._emptiest.append(request)

    def leave(self, request: Request) -> None:
        """It decodes no more."""
        next(lane for lane in self._members if request in lane).remove(request)
        if request is self._moving:
            self._moving = None

    @property
    def _emptiest(self) -> list[Request]:
        return min(self._members, key=len)  # the first of several

    def turn(self, flights: Sequence[object | None]) -> None:
        """It is the next lane's turn. Args: flights: of each lane, what is to be followed."""
        count = len(self._members)
        if count == 1:
            return
        moving = self._moving
        if moving is not None and moving.in_flight == 0:
            next(lane for lane in self._members if moving in lane).remove(moving)
            self._emptiest.append(moving)
            self._moving = None
        behind = ((self.current + step) % count for step in range(1, count + 1))
        self.current = next((lane for lane in behind if self._members[lane] or flights[lane] is not None), self.current)
        here = self._members[self.current]
        if self._moving is None and len(here) - len(self._emptiest) > 1:
            self._moving = here[-1]

    def offered(self) -> list[Request]:
        """Requests of the lane whose turn it is, in order of their coming, that may step in it."""
        return [request for request in self._members[self.current] if request is not self._moving]
