"""The relay between a generation and its reader: bounded, coalescing, closing its producer."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from engine.relay import RELAY_MAX, Relay

pytestmark = pytest.mark.both_loops


class Producer:
    """Yields numbered parts as fast as they are taken."""

    def __init__(self, parts: int, *, error: Exception | None = None) -> None:
        self.parts, self.error = parts, error
        self.made = 0
        self.closed = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            for index in range(self.parts):
                self.made += 1
                yield b"%d;" % index
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def turns() -> None:
    """Let everything that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("parts", [0, 1, RELAY_MAX - 1, RELAY_MAX, RELAY_MAX + 1, 3 * RELAY_MAX + 7])
async def test_everything_arrives_in_order(parts: int) -> None:
    """However many parts there are, the reader gets each once, in order, and then the end."""
    relay, producer = Relay(), Producer(parts)
    got = b""
    async with asyncio.TaskGroup() as group:
        group.create_task(relay.fill(producer.run()))
        while piece := await relay.take():
            got += piece
    assert got == b"".join(b"%d;" % index for index in range(parts))
    assert producer.closed
    assert await relay.take() == b""


async def test_a_producer_waits_for_a_slow_reader() -> None:
    """With nobody reading no more than RELAY_MAX parts are made; one take brings them all as one piece and lets the rest come."""
    relay, producer = Relay(), Producer(2 * RELAY_MAX)
    async with asyncio.TaskGroup() as group:
        filling = group.create_task(relay.fill(producer.run()))
        await turns()
        assert (producer.made, relay.waiting, filling.done()) == (RELAY_MAX, RELAY_MAX, False)
        assert (await relay.take()).count(b";") == RELAY_MAX
        await turns()
        assert producer.made == 2 * RELAY_MAX
        filling.cancel()
    assert producer.closed


async def test_a_cancelled_fill_closes_its_producer() -> None:
    """Cancelling the fill while the reader is behind closes the producer and ends the reader's wait."""
    relay, producer = Relay(), Producer(2 * RELAY_MAX)
    filling = asyncio.ensure_future(relay.fill(producer.run()))
    await turns()
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert producer.closed
    assert (await relay.take()).count(b";") == RELAY_MAX
    assert await relay.take() == b""


async def test_a_failing_producer_ends_the_reader() -> None:
    """A producer's error comes out of `fill`, and the reader sees what came before it and then the end."""
    relay, producer = Relay(), Producer(2, error=ValueError("broken"))
    filling = asyncio.ensure_future(relay.fill(producer.run()))
    assert await relay.take() == b"0;1;"
    assert await relay.take() == b""
    with pytest.raises(ValueError, match="broken"):
        await filling
