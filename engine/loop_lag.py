"""How late the event loop is: a timer that looks at the clock when it is called.

Knows nothing of what keeps the loop. Costs four wakes a second.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from typing import Final

from engine.measures import Waits

__all__ = ["LoopLag"]

EVERY_S: Final = 0.25
_RECENT: Final = 4
BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class LoopLag:
    """Measures while started. Loop thread only."""

    def __init__(self) -> None:
        self._recent = deque([0.0], maxlen=_RECENT)
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure from now on."""
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Measure no more; nothing if it does not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def recent_s(self) -> float:
        """The worst of the last second."""
        return max(self._recent)

    def waits(self) -> Waits:
        """How late the loop was, so far."""
        return Waits(BOUNDS_S, tuple(self._counts), self._sum_s)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(loop.time() + EVERY_S, self._look, loop, loop.time() + EVERY_S)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        late_s = max(0.0, loop.time() - due_s)
        self._recent.append(late_s)
        self._counts[bisect_left(BOUNDS_S, late_s)] += 1
        self._sum_s += late_s
        self._arm(loop)
