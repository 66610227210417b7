"""A server over an engine that yields tokens at once, and a bare aiohttp writer of the same events: processes to be measured.

    python tests/stub_server.py forebay|bare MODE      # prints its port, serves until its standard input closes

MODE: `step` gives every running stream one token a turn of the loop, `MS` one every so many milliseconds, as a decode step would,
`idle` one token and then nothing. Both servers take tokens from the same stepper: what differs is what a server does for HTTP.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, the folder of this file comes first

import structlog
import uvloop
from aiohttp import web

from engine.chunk import Chunk, Usage
from engine.config import ServerConfig
from engine.sampling import Sampling
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, Progressed

__all__ = ["EVENT", "InstantEngine", "Stepper"]

EVENT = (  # of the bare writer: what a chunk of a completion is here, to the byte but for numbers
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","created":1764500000,"model":"fake","object":"text_completion","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)


class Stepper:
    """Gives each of its queues one token at a time, all in one go, as a step does; the next ones when all were taken."""

    def __init__(self, mode: str) -> None:
        self._pause_s = float(mode) / 1e3 if mode.isdigit() else 0.0
        self._idle = mode == "idle"
        self._left_of: dict[asyncio.Queue[int], int] = {}  # tokens that each queue still gets
        self._given = 0  # and not taken
        self._some, self._taken = asyncio.Event(), asyncio.Event()

    def open(self, tokens: int) -> "asyncio.Queue[int]":
        """A queue that gets the numbers from `tokens` down to 1."""
        queue: asyncio.Queue[int] = asyncio.Queue()
        self._left_of[queue] = tokens
        self._some.set()
        return queue

    async def take(self, queue: "asyncio.Queue[int]") -> int:
        """The next number."""
        token = await queue.get()
        self._took(1)
        return token

    def close(self, queue: "asyncio.Queue[int]") -> None:
        """Nobody takes from it any more."""
        self._left_of.pop(queue, None)
        self._took(queue.qsize())

    def _took(self, tokens: int) -> None:
        self._given -= tokens
        if self._given == 0:
            self._taken.set()

    async def run(self) -> None:
        """Step for ever."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if not self._left_of:
                self._some.clear()
                await self._some.wait()
                due_s = loop.time()
            self._step()
            if self._pause_s:
                due_s += self._pause_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))
            else:
                self._taken.clear()
                await self._taken.wait()

    def _step(self) -> None:
        for queue, left in list(self._left_of.items()):
            queue.put_nowait(left)
            self._given += 1
            if left == 1 or self._idle:
                del self._left_of[queue]
            else:
                self._left_of[queue] = left - 1


class _Generation:
    """As many tokens as were asked for."""

    revision = 0
    session_id = None
    progress = Progressed(1, 1)

    def __init__(self, stepper: Stepper, tokens: int) -> None:
        self._stepper, self._tokens = stepper, tokens
        self._queue: asyncio.Queue[int] | None = None
        self._ended = False

    async def prompt(self) -> tuple[int, ...]:
        return (1, 2, 3)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._queue is None:
            self._queue = self._stepper.open(self._tokens)
        if self._ended:
            raise StopAsyncIteration
        left = await self._stepper.take(self._queue)
        self._ended = left == 1
        return Chunk(" word", (left,), Usage(3, self._tokens - left + 1), finish_reason="length" if self._ended else None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._queue is not None:
            self._stepper.close(self._queue)


class InstantEngine(FakeEngine):
    """Keeps no calls, unlike the one it is made of."""

    stepper: Stepper

    def generate(self, prompt: object, sampling: Sampling = Sampling(), **rest: object) -> Any:  # type: ignore[override]  # noqa: B008
        return _Generation(self.stepper, sampling.max_tokens or 1)


async def _bare(stepper: Stepper) -> AsyncIterator[int]:
    """A handler that writes one event a token and does nothing else."""

    async def stream(request: web.Request) -> web.StreamResponse:
        tokens = (await request.json())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue = stepper.open(tokens)
        try:
            for _ in range(tokens):
                await stepper.take(queue)
                await response.write(EVENT)
            await response.write(b"data: [DONE]\n\n")
        finally:
            stepper.close(queue)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", stream)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def _forebay(stepper: Stepper) -> AsyncIterator[int]:
    service = Service(ServerConfig(port=0))
    engine = InstantEngine([])
    engine.stepper = stepper
    service.engine = engine
    async with listening(service) as address:
        yield int(address.rpartition(":")[2])


async def _main(words: Sequence[str]) -> None:
    kind, mode = words
    stepper = Stepper(mode)
    task = asyncio.ensure_future(stepper.run())
    async for port in _bare(stepper) if kind == "bare" else _forebay(stepper):
        print(json.dumps({"port": port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    task.cancel()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # request lines are few and not what is measured
    uvloop.run(_main(sys.argv[1:]))
