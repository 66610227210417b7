"""A session's blocks on all stages, going out behind their barriers or coming in: what one stage has is a list of one. Knows no files.

Invariants:
1. Every stage has passed its barrier, with the same rows, before a block is read; a barrier that fails on one ends the export. Where the
   device of this process failed, there is none: what RAM has goes.
2. A session that comes in has its rows on a stage only when the stages before have theirs; until the last, nobody knows it.
"""

from collections.abc import AsyncGenerator

import torch
from torch import Tensor

from engine.archive.parts import Block, Bytes
from engine.joint import id_of
from engine.stage import Stage
from kernels.layout import BLOCK_ROWS
from memory.errors import BarrierFailed
from memory.image import Image, Loading, read_out, rows_in_ram
from memory.session import SessionMemory

__all__ = ["Places"]


class Places:
    """Of one session. Loop thread only; what it gives is read and filled by threads."""

    def __init__(self, stage: Stage, memory: SessionMemory) -> None:
        self._stage, self._memory = stage, memory
        self._others = [one.image(id_of(memory)) for one in stage.before]
        self._loading: Loading | None = None

    async def read_out(self, rows_max: int) -> Image:
        """Pass the barriers of all stages, or if the device failed say what RAM has, of whole blocks up to `rows_max` rows.

        Raises: BarrierFailed, ArenaFull.
        """
        if self._stage.backend.lost.done():
            left = [rows_in_ram(self._memory), *[await other.read_out() for other in self._others]]
            rows = min(rows_max, *left) // BLOCK_ROWS * BLOCK_ROWS
            return Image(rows, torch.zeros_like(self._memory.hidden, device="cpu"), rows)
        image = await read_out(self._memory, self._stage.copyback)
        for number, other in enumerate(self._others):
            rows = await other.read_out()
            if rows != image.rows:
                raise BarrierFailed(f"session {self._memory.session_id}: {image.rows} rows on the last stage, {rows} on stage {number}")
        return image

    async def batches(self, first: int, stop: int, batch: int) -> AsyncGenerator[tuple[int, list[Block]], None]:
        """Blocks [first, stop) as they are, a batch at a time, with the number of each batch's first."""
        for start in range(first, stop, batch):
            yield start, await self._blocks(start, min(start + batch, stop))

    async def begin(self, rows: int, window: int) -> None:
        """The session, which has no rows, is loaded with so many. Args: window: see `Loading`."""
        streams = self._stage.streams
        for other in self._others:
            await other.begin(rows, window)
        self._loading = Loading(self._memory, self._stage.layout, rows, tables=streams.compute, copies=streams.copyback, window=window)

    async def targets(self, first: int, stop: int) -> list[Block]:
        """Blocks [first, stop), to be filled."""
        return await self._blocks(first, stop)

    async def _blocks(self, first: int, stop: int) -> list[Block]:
        find = self._memory.mirror_block if self._loading is None else self._loading.target
        own: list[Bytes] = [find(block).numpy() for block in range(first, stop)]
        if not self._others:
            return list(own)
        others = [await other.blocks(first, stop) for other in self._others]
        return list(zip(*others, own, strict=True))

    async def place(self, first: int, stop: int) -> None:
        """Blocks [first, stop) are filled: bring them to where steps read them."""
        assert self._loading is not None, "nothing is being loaded"
        for other in self._others:
            await other.place(first, stop)
        await self._loading.place(first, stop)

    async def finish(self, hidden: Tensor, hidden_from: int) -> None:
        """All blocks were placed: the session has its rows. Args: hidden, hidden_from: see `Image`."""
        assert self._loading is not None, "nothing is being loaded"
        for other in self._others:
            await other.finish(hidden_from)
        await self._loading.finish(hidden, hidden_from)
