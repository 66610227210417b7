"""Channels with a head's and a node's end on them, in one process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from engine.node.answering import Answering, Taker
from engine.node.caller import Caller
from engine.node.waiting_room import Tasks
from streams import ChannelLimits, TcpChannel
from tests.streams.channel_world import loopback

LIMITS = ChannelLimits(silence_ms_max=1000, beat_ms=100)


class Line:
    """A control channel: the head's caller, the node's answering, both channels, and what the node told by itself."""

    def __init__(self, head: TcpChannel, node: TcpChannel, takers: dict[str, Taker], run: Callable[[Awaitable[Any], str], None], most: int):
        self.head, self.node = head, node
        self.told: list[bytes] = []
        self.caller = Caller(head, self.told.append, calls_max=most)
        self.answering = Answering(node, takers, run)


@asynccontextmanager
async def line(takers: dict[str, Taker], *, calls_max: int = 2048, limits: ChannelLimits = LIMITS) -> AsyncIterator[Line]:
    """Both ends, closed after."""
    async with loopback(limits) as (one, two, _), asyncio.TaskGroup() as group:
        yield Line(one, two, takers, Tasks(group).run, calls_max)
        await one.close()
