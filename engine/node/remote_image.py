"""One session's blocks on a stage of another machine, on their way to an archive or in from one. See `remote.py`.

Blocks travel one a call, some at a time: a block of a large stage is several megabytes, and steps go over the same connection.
"""

from collections import deque
from typing import TypeVar

import numpy

from engine.errors import NodeLost
from engine.node import calls
from engine.node.far_session import FarSession
from engine.stage_calls import Block
from kernels.layout import BlockLayout
from streams import Closed, Event, PeerLost

__all__ = ["RemoteImage"]

_AHEAD = 4
T = TypeVar("T")


class RemoteImage:
    """See FollowerImage."""

    def __init__(self, session: FarSession, layout: BlockLayout) -> None:
        self._held = session
        self._memory = session.number
        self._layout = layout
        self._rows = 0
        self._filled: dict[int, Block] = {}  # handed out to be filled

    async def read_out(self) -> int:
        """See FollowerImage. Raises NodeLost too, as the others do."""
        self._held.frozen += 1
        event = self._held.ask("image.out", calls.Memory(self._memory), tuple[int, calls.Held])
        event.on_done(self._came_back)  # whoever waits may be cancelled
        rows, _ = await _said(event)
        return rows

    def _came_back(self, event: Event[tuple[int, calls.Held]]) -> None:
        self._held.frozen -= 1
        if event.error() is None:
            self._held.hear(event.result()[1])

    async def begin(self, rows: int, window: int) -> None:
        """See FollowerImage."""
        self._rows = rows
        await _said(self._held.ask("image.begin", calls.Load(self._memory, rows, window), type(None)))

    async def blocks(self, first: int, stop: int) -> list[Block]:
        """See FollowerImage."""
        if self._rows:
            made = [numpy.empty(self._layout.block_bytes, numpy.uint8) for _ in range(first, stop)]
            self._filled.update(zip(range(first, stop), made, strict=True))
            return made
        found: list[Block] = []
        under_way: deque[Event[list[bytes]]] = deque()
        for block in range(first, stop):
            under_way.append(self._held.ask("image.send", calls.Blocks(self._memory, block, block + 1), list[bytes]))
            if len(under_way) == _AHEAD:
                found += await _taken(under_way.popleft())
        while under_way:
            found += await _taken(under_way.popleft())
        return found

    async def place(self, first: int, stop: int) -> None:
        """See FollowerImage."""
        under_way: deque[Event[None]] = deque()
        for block in range(first, stop):
            body = calls.Filled(self._memory, block, [self._filled.pop(block).tobytes()])
            under_way.append(self._held.ask("image.take", body, type(None)))
            if len(under_way) == _AHEAD:
                await _said(under_way.popleft())
        while under_way:
            await _said(under_way.popleft())

    async def finish(self, hidden_from: int) -> None:
        """See FollowerImage."""
        held = await _said(self._held.ask("image.finish", calls.Rows(self._memory, hidden_from), calls.Held))
        self._held.counted(self._rows)
        self._held.hear(held)


async def _taken(event: Event[list[bytes]]) -> list[Block]:
    return [numpy.frombuffer(block, numpy.uint8) for block in await _said(event)]


async def _said(event: Event[T]) -> T:
    """An answer. Raises NodeLost where the node is gone."""
    try:
        return await event
    except (PeerLost, Closed) as error:
        raise NodeLost(f"the node with some of its layers is away ({error})") from error
