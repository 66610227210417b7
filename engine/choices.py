"""The generations of one request as one stream of chunks: one a choice, of the same prompt.

Knows the engine's face alone.

1. The first choice reads the prompt. The others start when it has its first token, with the same token ids: where histories are kept they
   fork what it has of the prompt, else each reads it again. Their chunks are the same either way.
2. What makes a request impossible is raised before the first chunk of any choice is handed out; what fails later ends all of them.
3. Leaving the block ends every generation within one step, and so does cancelling it from beside; the reader is then told so.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from engine.chunk import Chunk, Usage
from engine.errors import RequestCancelled
from engine.protocol import GenerationFace, Prompt
from engine.sampling import Sampling

__all__ = ["Choices"]

_WAITING_MAX = 64  # chunks of all choices that nobody has taken yet; then the generations' own queues hold them


class Choices:
    """An async context manager and, inside, an async iterator of (choice, chunk). One reader."""

    def __init__(self, generate: Callable[[Prompt, Sampling], GenerationFace], prompt: Prompt, samplings: Sequence[Sampling]) -> None:
        self.prompt_ids: tuple[int, ...] = ()
        self._generate, self._prompt, self._samplings = generate, prompt, samplings
        self._generations: list[GenerationFace] = []
        self._usages: dict[int, Usage] = {}
        self._left: set[int] = set()
        self._stack = AsyncExitStack()
        self._taken: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(_WAITING_MAX)
        self._open = len(samplings)
        self._pumps: list[asyncio.Task[None]] = []
        self._cancelled = False

    @property
    def first(self) -> GenerationFace:
        """The generation that reads the prompt."""
        return self._generations[0]

    @property
    def usage(self) -> Usage:
        """Of all choices so far: the prompt counts once."""
        found = [self._usages[choice] for choice in sorted(self._usages)]
        if len(found) <= 1:
            return found[0] if found else Usage(len(self.prompt_ids), 0)
        return Usage(
            found[0].prompt_tokens,
            sum(one.completion_tokens for one in found),
            found[0].cached_tokens,
            sum(one.accepted_drafts for one in found),
            sum(one.refused_drafts for one in found),
            _summed([one.drafts_proposed for one in found]),
            _summed([one.drafts_accepted for one in found]),
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            first = self._generate(self._prompt, self._samplings[0])
            self._generations.append(first)
            await stack.enter_async_context(first)
            self.prompt_ids = await first.prompt()
            if len(self._samplings) > 1:
                await self._start_others(stack, first)
            self._stack = stack.pop_all()
        return self

    async def _start_others(self, stack: AsyncExitStack, first: GenerationFace) -> None:
        begun = await anext(first, None)
        self._check()
        assert begun is not None, "a generation has at least one chunk"
        self._taken.put_nowait((0, begun))
        for sampling in self._samplings[1:]:
            other = await stack.enter_async_context(self._generate(self.prompt_ids, sampling))
            self._generations.append(other)
            self._check()
        group = asyncio.TaskGroup()
        await group.__aenter__()
        stack.push_async_callback(group.__aexit__, None, None, None)  # without the block's own error, which it would wrap
        self._pumps = [group.create_task(self._pump(choice)) for choice in range(len(self._generations))]
        stack.callback(self._stop_pumps)  # before the group waits for them

    def _stop_pumps(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    async def _pump(self, choice: int) -> None:
        """Hand on all chunks of one choice, then None."""
        last: Exception | None = None
        try:
            async for chunk in self._generations[choice]:
                await self._taken.put((choice, chunk))
        except Exception as error:  # the reader's to raise
            last = error
        await self._taken.put((choice, last))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        try:
            item = await (self._next_of_one() if len(self._samplings) == 1 else self._next_of_any())
        except StopAsyncIteration:
            self._check()
            raise
        self._check()
        return item

    def _check(self) -> None:
        """Raise RequestCancelled if somebody did."""
        if self._cancelled:
            raise RequestCancelled("the request was cancelled by its id")

    async def cancel(self) -> None:
        """End all of it within one step, from beside its reader, who gets RequestCancelled. Also before it is entered."""
        self._cancelled = True
        for generation in list(self._generations):
            await generation.aclose()

    async def _next_of_any(self) -> tuple[int, Chunk]:
        while self._open:
            choice, item = await self._taken.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                self._open -= 1
            elif choice not in self._left:
                self._usages[choice] = item.usage
                return choice, item
        raise StopAsyncIteration

    async def _next_of_one(self) -> tuple[int, Chunk]:
        if self._left:
            raise StopAsyncIteration
        chunk = await anext(self.first)
        self._usages[0] = chunk.usage
        return 0, chunk

    async def leave(self, choice: int) -> None:
        """End one choice within one step; the others go on."""
        self._left.add(choice)
        await self._generations[choice].aclose()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.__aexit__(kind, error, trace)


def _summed(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Counts by place, of all choices together."""
    return tuple(sum(column) for column in itertools.zip_longest(*counts, fillvalue=0))
