"""Requests nobody asked for, before the first real one: on a device they compile every kernel and record the steps of every batch size.

Without them the first prompt, and the first step of each larger batch, would wait for a compiler while others decode. Compiled kernels are
kept on disk by Triton, so only the first start on a machine takes long.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import structlog

from engine.sampling import Sampling

__all__ = ["warm_up"]

_log = structlog.get_logger("engine")
_STEPS = 3  # issued anew, recorded, replayed


async def warm_up(generate: Callable[[list[int], Sampling], AsyncIterator[object]], *, sessions: int, rows: int) -> None:
    """Run a long prompt, then `sessions` short ones that end one after another, so that every batch size steps a few times.

    Args: generate: starts one generation. rows: of the long prompt: a whole chunk of an append.
    """
    started = time.monotonic()
    await _drain(generate([0] * rows, Sampling(max_tokens=_STEPS, ignore_eos=True)))
    lengths = (_STEPS * (2 + number) for number in range(sessions))
    await asyncio.gather(*(_drain(generate([0], Sampling(max_tokens=length, ignore_eos=True))) for length in lengths))
    _log.info("engine.warm", seconds=round(time.monotonic() - started, 1))


async def _drain(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass
