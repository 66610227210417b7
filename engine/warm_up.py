"""Requests nobody asked for, before the first real one: on a device they compile every kernel and record the steps of every batch size.

Without them the first prompt, and the first step of each larger batch, would wait for a compiler while others decode. Compiled kernels are
kept on disk by Triton, so only the first start on a machine takes long.

1. What a prompt launches may follow the rows of its chunks, and nothing else: not how long the history is, nor where in it a chunk begins.
   Tests ask Triton itself for what an append of any length makes it compile, and compare it with what the turns here do.
2. A library chooses its own kernels by the rows of a product, and loads each at its first use: so chunks of every size between.
3. A device's allocator asks the driver once for what the longest prompt takes, and keeps it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count, takewhile

import structlog

from engine.append_scratch import reserve_scratch
from engine.protocol import EngineFace
from engine.sampling import Sampling
from engine.stage import Stage
from kernels.place import BULK_ROWS

__all__ = ["turns", "warm_up"]

_log = structlog.get_logger("engine")
_STEPS = 3  # issued anew, recorded, replayed
_TOKENS_MAX = 16  # of context that one of the short ones may take, and more
# Rows of a step's kernels, which appends of few rows run too: one, odd, and every power of two that Triton may tell apart.
_FEW = (BULK_ROWS, 16, 8, 4, 3, 2, 1)


def turns(chunk_rows: int, picks: int, room: int) -> Iterator[int]:
    """Rows that each turn of one session appends, `room` in all at most.

    The first is whole chunks, more rows than a row picks; then chunks of fewer and fewer rows, down to one, which reads its picks alone.
    """
    begun = -(-(picks + 1) // chunk_rows) * chunk_rows
    shorter = takewhile(lambda rows: rows > BULK_ROWS, (chunk_rows >> halvings for halvings in count(1)))
    for rows in (begun if begun <= room else min(chunk_rows, room), *shorter, *(few for few in _FEW if few < chunk_rows)):
        if rows <= room:
            room -= rows
            yield rows


async def warm_up(engine: EngineFace, stage: Stage, *, sessions: int, context_max: int) -> None:
    """Append a long prompt and short ones, then `sessions` short ones that end one after another: every batch size steps a few times.

    Args: sessions: that may decode at once; fewer where half the context has no room for so many. context_max: tokens of a session.
    """
    started, rows = time.monotonic(), stage.tokens_fit(context_max)
    sessions = min(sessions, max(1, context_max // 2 // _TOKENS_MAX))
    for event in reserve_scratch(stage, rows):
        await event
    session = await engine.create_session()
    for number, each in enumerate(turns(stage.append_rows, stage.model.config.top_k, rows // 2)):
        last = int(number > 0)  # the token that the turn before ended with has no row yet
        sampling = Sampling(max_tokens=1 if number else _STEPS, ignore_eos=True)
        await _drain(engine.generate([0] * (each - last), sampling, session=session))
    # A look at what it holds loads kernels of its own: done now, since a look at a device that hangs must not wait for that.
    assert session in engine.sessions, "it is held until the next line"
    await engine.close_session(session)
    lengths = (_STEPS * (2 + number) for number in range(sessions))
    await asyncio.gather(*(_drain(engine.generate([0], Sampling(max_tokens=length, ignore_eos=True))) for length in lengths))
    _log.info("engine.warm", seconds=round(time.monotonic() - started, 1))


async def _drain(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass
