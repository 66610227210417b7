"""A node that has no stage: it answers the doctor and nobody else, so that machines can be compared before a model lies on them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress

from engine.node.address import Address
from engine.node.agreement import DOCTOR_TERMS
from engine.node.visit import answer_doctor
from streams import ChannelLimits, StreamError, listen

__all__ = ["Tasks", "wait_for_doctor"]


class Tasks:
    """Work beside the loop's other work, each part to its end, in one task group."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def run(self, work: Awaitable[object], name: str) -> None:
        """Await `work`; of the channel it belongs to, what goes wrong was told there already."""
        task = self._group.create_task(_to_its_end(work), name=name)
        if isinstance(work, Coroutine):
            task.add_done_callback(lambda _: work.close())  # a task that is cancelled before its first turn never comes to it


async def _to_its_end(work: Awaitable[object]) -> None:
    with suppress(StreamError):  # the channel has ended, and says why itself
        await work


async def wait_for_doctor(address: Address, key: bytes, limits: ChannelLimits, told: Callable[[int], None]) -> None:
    """Answer until cancelled. Args: told: called with the port. Raises StreamError: the address cannot be had."""
    listener = await listen(address.host, address.port, key=key, terms=DOCTOR_TERMS, limits=limits)
    try:
        told(listener.port)
        async with asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            while True:
                answer_doctor(await listener.accept(), key, "", tasks.run)
    finally:
        await listener.close()
