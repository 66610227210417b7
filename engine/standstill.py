"""A process whose loop stands still for minutes is ended: a call of a device's driver may never return, and nothing else would end it.

Knows no engine. A thread looks once a second whether the loop turned; the loop's part costs it one timer a second.

1. What counts is looks in a row, not a clock: a process that was stopped (SIGSTOP, a machine that slept) is not ended when it goes on.
2. Nothing can be archived, since that is the loop's to do; what was archived before is as it was.
3. A call that keeps Python's lock keeps the thread from looking, too: only another process can end that one.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["LOOKS_MAX", "SAID", "Standstill", "ended_at_a_standstill"]

LOOKS_MAX: Final = 240  # a second each: twice as long as a device may end nothing
_LOOK_S: Final = 1.0
SAID: Final = "nothing ran for minutes: a call of the device's driver does not return; the kernel's log may say what the device reported"


class Standstill:
    """Counts looks at a loop that does not turn."""

    def __init__(self, looks_max: int) -> None:
        self._turns = 0  # written by the loop's thread
        self._seen = -1
        self._still = 0  # looks in a row that saw no turn
        self._looks_max = looks_max

    def turned(self) -> None:
        """The loop turns. Loop thread only."""
        self._turns += 1

    def look(self) -> bool:
        """Whether the loop has stood still for too long. The watcher's thread only."""
        turns = self._turns
        self._still = self._still + 1 if turns == self._seen else 0
        self._seen = turns
        return self._still >= self._looks_max


@contextmanager
def ended_at_a_standstill(end: Callable[[str], object]) -> Iterator[None]:
    """Call `end` from another thread, with one line that says why, if the running loop stands still for minutes in the block."""
    still, over, loop = Standstill(LOOKS_MAX), threading.Event(), asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def turn() -> None:
        nonlocal timer
        still.turned()
        timer = loop.call_later(_LOOK_S, turn)

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if still.look():
                end(SAID)
                return

    watcher = threading.Thread(target=watch, name="standstill", daemon=True)
    turn()
    watcher.start()
    try:
        yield
    finally:
        over.set()
        assert timer is not None, "armed above"
        timer.cancel()
        watcher.join()
