"""The only source of time: integer nanoseconds from an arbitrary start, never going back.

Holds the protocol and the real clock. The virtual clock lives with the virtual backend, which moves it.
"""

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "RealClock"]


class Clock(Protocol):
    """Time that a backend runs in."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment; only differences mean something."""
        ...

    async def wait_ns(self, duration_ns: int) -> None:
        """Wait at least `duration_ns` (0: let others run once)."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds of the monotonic performance counter."""
        return time.perf_counter_ns()

    async def wait_ns(self, duration_ns: int) -> None:
        """Wait at least `duration_ns`. Loop timers have a grain of 1 ms: a shorter wait may last that long."""
        assert duration_ns >= 0, f"duration {duration_ns} ns is negative"
        await asyncio.sleep(duration_ns / 1e9)
