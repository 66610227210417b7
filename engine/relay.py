"""Encoded parts of one stream on their way from one producer to one reader.

Knows neither HTTP nor chunks.

1. At most `RELAY_MAX` parts wait; then the producer does.
2. A reader that was behind gets everything that waits as one piece.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

__all__ = ["RELAY_MAX", "Relay"]

RELAY_MAX = 64


class Relay:
    """One producer, one reader, one loop."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._ended = False
        self._filled, self._room = asyncio.Event(), asyncio.Event()

    @property
    def waiting(self) -> int:
        """Parts that nobody has taken yet."""
        return len(self._parts)

    async def fill(self, parts: AsyncGenerator[bytes, None]) -> None:
        """Take all of `parts`, pausing while the reader is behind. Cancel: closes `parts`."""
        try:
            async with aclosing(parts):
                async for part in parts:
                    self._parts.append(part)
                    self._filled.set()
                    while len(self._parts) >= RELAY_MAX:
                        self._room.clear()
                        await self._room.wait()
        finally:
            self._ended = True
            self._filled.set()

    async def take(self) -> bytes:
        """Everything that waits, as one piece; waits for the first part; empty at the end."""
        while not self._parts and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        payload = b"".join(self._parts)
        self._parts.clear()
        self._room.set()
        return payload
