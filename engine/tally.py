"""What an engine's requests have come to: tokens, and how long running generations waited between their steps.

Holds counts that only grow. Knows requests; decides nothing.

1. A step costs a call, whatever it was made of: while the same requests step together, their waits are one.
2. Tokens of a running request are its own until it has ended; whoever wants sums adds those of the running ones.
3. Time is the backend's, so a virtual run asks nothing of the real world.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from engine.measures import Tokens, Waits
from engine.request import Request
from streams import Clock

__all__ = ["GAP_BOUNDS_S", "STALL_S", "Tally"]

# From a card's step with a short history to what a person takes for a hang.
GAP_BOUNDS_S: Final = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
STALL_S: Final = 0.2
_BOUNDS_NS: Final = tuple(round(bound * 1e9) for bound in GAP_BOUNDS_S)
_STALL_NS: Final = round(STALL_S * 1e9)


class Tally:
    """One engine's. Loop thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._members: tuple[Request, ...] = ()  # of the step that was followed last
        self._last_ns = 0  # and when that was
        self.restart()

    def restart(self) -> None:
        """Forget what was counted: behind requests nobody asked for."""
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0
        self.stalls = 0
        self._ended = Tokens()

    def began(self, request: Request) -> None:
        """Its first token is there, and no step has given it one yet."""
        request.followed_ns = self._clock.now_ns()

    def followed(self, members: tuple[Request, ...]) -> None:
        """A step of these requests has given them tokens now."""
        now_ns = self._clock.now_ns()
        if members == self._members:
            self._waited(now_ns - self._last_ns, len(members))
        else:
            self._part()
            for request in members:
                if request.followed_ns:
                    self._waited(now_ns - request.followed_ns, 1)
            self._members = members
        self._last_ns = now_ns

    def _part(self) -> None:
        """Those who stepped together last no longer do: each keeps when that was."""
        for request in self._members:
            request.followed_ns = self._last_ns
        self._members = ()

    def _waited(self, gap_ns: int, requests: int) -> None:
        self._counts[bisect_left(_BOUNDS_NS, gap_ns)] += requests
        self._sum_ns += gap_ns * requests
        if gap_ns > _STALL_NS:
            self.stalls += requests

    def ended(self, request: Request) -> None:
        """The request is over, however it ended."""
        if request in self._members:
            self._part()  # nothing of it is held any longer
        self._ended = self._ended.plus(tokens_of(request))

    def waits(self) -> Waits:
        """How long generations waited from one step of theirs to the next, so far."""
        return Waits(GAP_BOUNDS_S, tuple(self._counts), self._sum_ns / 1e9)

    def tokens(self, running: Iterable[Request]) -> Tokens:
        """Tokens so far. Args: running: requests that have not ended."""
        total = self._ended
        for request in running:
            total = total.plus(tokens_of(request))
        return total


def tokens_of(request: Request) -> Tokens:
    """What one request has come to so far. A prompt that was not begun to be read counts nothing."""
    if request.state is None:  # its turn never came
        return Tokens()
    appended = request.appended_rows if request.append is None else request.append.done_rows
    return Tokens(request.cached + appended, request.cached, request.generated)
