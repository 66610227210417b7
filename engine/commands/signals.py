"""SIGTERM and SIGINT as the end of a block, so that a phase (loading, serving, draining) stops where it stands.

Needs the main thread. Knows nothing of what is stopped.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

__all__ = ["Signals"]


class Signals:
    """SIGTERM and SIGINT end the current `until_signal` block, and only that."""

    def __init__(self) -> None:
        self._limit: asyncio.Timeout | None = None

    def _end(self) -> None:
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    @asynccontextmanager
    async def until_signal(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._limit = None
