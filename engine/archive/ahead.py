"""Blocking work beside the loop: one piece, or many with the next running while one is followed.

Holds no state. Knows no files.

Invariants:
1. When one of them returns or raises, cancelled or not, no thread runs its work any more: what the work touches may be let go of.
2. Work is made and followed on the loop, in order; only the work itself runs in threads.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from typing import Final, Protocol, TypeVar

__all__ = ["AHEAD", "beside", "held", "in_order"]

T = TypeVar("T")
C = TypeVar("C", bound="Closable")
AHEAD: Final = 4  # pieces in threads at a time: one is read or written, others are hashed, or wait for the loop to follow them


async def beside(work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread. Cancel: waits for the thread all the same."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    await _settle([future])
    return future.result()


class Closable(Protocol):
    """Something to let go of, in a thread."""

    def close(self) -> None: ...


@asynccontextmanager
async def held(make: Callable[[], C]) -> AsyncIterator[C]:
    """What `make` makes, for the length of the block; made and closed in threads. Cancelled while it is made, it is closed all the same."""
    future = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        await _settle([future])
    except asyncio.CancelledError:
        if future.exception() is None:
            await beside(future.result().close)
        raise
    made = future.result()
    try:
        yield made
    finally:
        await beside(made.close)


async def in_order(works: AsyncGenerator[Callable[[], T], None], follow: Callable[[T], Awaitable[None]]) -> None:
    """Run all of `works`, `AHEAD` at a time, and await `follow` of each result, in their order.

    A piece is made when there is a thread for it, after the piece `AHEAD` before it was followed. The first failure ends all.
    """
    loop = asyncio.get_running_loop()
    running: deque[asyncio.Future[T]] = deque()
    try:
        async with aclosing(works):
            async for work in works:
                running.append(loop.run_in_executor(None, work))
                if len(running) == AHEAD:
                    await _settle([running[0]])
                    await follow(running.popleft().result())
        while running:
            await _settle([running[0]])
            await follow(running.popleft().result())
    finally:
        await _settle(running)


async def _settle(futures: Collection[asyncio.Future[T]]) -> None:
    """Wait until all are done, whoever cancels meanwhile; the cancellation comes after. Failures count as seen."""
    cancelled = False
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    for future in futures:
        future.exception()
    if cancelled:
        raise asyncio.CancelledError
