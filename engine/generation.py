"""`Generation`: the caller's end of one request.

Holds the request and hands out its chunks. Knows nothing of steps.

Invariants:
1. Nothing happens until the generation is first awaited, iterated or entered.
2. Leaving it (`aclose`, leaving the block, dropping the object) aborts the request within one step; the session keeps what was generated.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from engine.chunk import Chunk, TokenLogprob, Usage
from engine.errors import BadRequest, ForebayError
from engine.protocol import SessionId
from engine.request import Request

__all__ = ["Completion", "Generation", "Progress"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows of the prompt that are in place, and rows it needs; 0 and 0 until the prompt is known."""

    rows_done: int
    rows_total: int


class Generation:
    """Async iterator and async context manager of chunks."""

    def __init__(self, start: Callable[[], Awaitable[Request]], abort: Callable[[Request], None]) -> None:
        self._start = start
        self._abort = abort
        self._request: Request | None = None
        self._starting: asyncio.Lock | None = None
        self._ended = False
        self._closed = False

    @property
    def session_id(self) -> SessionId | None:
        """The session it runs in; None until it has started."""
        return None if self._request is None else self._request.session.id

    @property
    def revision(self) -> int:
        """The session's revision once this turn is over; 0 until it has started."""
        request = self._request
        return 0 if request is None else request.session.revision + (not request.ended.is_set())

    @property
    def progress(self) -> Progress:
        """How much of the prompt has rows; may be read at any time."""
        request = self._request
        if request is None:
            return Progress(0, 0)
        done = request.cached + (request.appended_rows if request.append is None else request.append.done_rows)
        return Progress(done, request.prompt_tokens)

    async def prompt(self) -> tuple[int, ...]:
        """Token ids of the whole context this generation continues. Raises: BadRequest, NotAdmitted."""
        return (await self._begin()).prompt

    async def complete(self) -> Completion:
        """Read it to the end."""
        text: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        last: Chunk | None = None
        async for last in self:
            text.append(last.text)
            tokens.extend(last.token_ids)
            logprobs.extend(last.logprobs)
        if last is None or last.finish_reason is None:
            raise BadRequest("this generation was closed, or is read by somebody else")
        return Completion("".join(text), tuple(tokens), last.finish_reason, last.usage, tuple(logprobs))

    async def _begin(self) -> Request:
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._request is None:
                request = await self._start()
                self._request = request
                # Dropping the generation without closing it must stop the work too.
                # The collector may find it on any thread.
                weakref.finalize(self, _abort_on_loop, asyncio.get_running_loop(), self._abort, request).atexit = False
                if self._closed:
                    self._abort(request)
        return self._request

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended or self._closed:
            raise StopAsyncIteration
        request = self._request or await self._begin()  # once begun, a chunk takes no lock
        item = await request.chunks.get()
        if self._ended:
            request.chunks.put_nowait(item)  # another reader had the last item: it stays for whoever else waits
            raise StopAsyncIteration
        if isinstance(item, ForebayError) or item.finish_reason is not None:
            self._ended = True
            request.chunks.put_nowait(item)
        if isinstance(item, ForebayError):
            raise item
        return item

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort and wait until the request has ended; nothing if it has. Beside a reader: the reader gets the last chunk."""
        self._closed = True
        if self._starting is not None:
            async with self._starting:  # whoever is starting it finds it closed
                pass
        request = self._request
        if request is not None:
            self._abort(request)
            await request.ended.wait()


def _abort_on_loop(loop: asyncio.AbstractEventLoop, abort: Callable[[Request], None], request: Request) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
        loop.call_soon_threadsafe(abort, request)
