"""The oracle of a scenario: compares every row that moves or is read with what it must be, while the run goes on and at its end.

Knows memory's parts and what the bytes must be (`Expected`); knows no engine and no orders.

What is checked, and when:
1. each plan: pins, fills, leaders and maps agree (`WatchedRounds.plan`); each gather: its bytes are the selected rows (`gather`).
2. each rise of a mirrored count, in the loop round it happens: all rows below it are in RAM, every layer and key (`poll`).
3. a session with nothing in flight (`check_session`): counts on host and device, rows in ring, blocks, RAM, pages and hot slots.
4. a session that closes: its hot slots; what it gives back is poisoned, so that work still in flight on it shows.
5. the end (`check_empty`): no byte, block or reservation is held.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.stage import Stage
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, BlockLayout, StateField
from memory.append import blocks_of
from memory.arena import Arena, BlockId
from memory.copyback import Copyback
from memory.ledger import Ledger
from memory.offload import OffloadSession
from memory.placement import Needs, Placement, PlacementStatistics
from memory.pool import Pool
from memory.resident import ResidentSession
from memory.session import SessionMemory
from streams import Stream

__all__ = ["Expected", "PoisonedArena", "PoisonedPool", "Watch", "WatchedPlacement", "check_empty"]


class Expected(Protocol):
    """What a session's rows must be."""

    @property
    def length(self) -> int:
        """Positions whose bytes are known; what lies past them is not compared."""
        ...

    def rows(self, layer: int, positions: Tensor) -> Tensor:
        """uint8 [n, row_bytes] of int64 positions [n]."""
        ...

    def keys(self, key_layer: int, positions: Tensor) -> Tensor:
        """uint8 [n, key_bytes] of int64 positions [n]."""
        ...


class PoisonedArena(Arena):
    """An arena whose freed blocks hold poison: a copy still in flight on one is caught, and so is a row read from it."""

    def release(self, block: BlockId) -> bool:
        """See Arena."""
        place = self.place(block)
        freed = super().release(block)
        if freed:
            place.bytes.fill_(255)
        return freed


class PoisonedPool(Pool):
    """A pool whose buffers hold poison once they were given back, and stay where they are: who still uses one does no other harm."""

    def __init__(self, device: torch.device, budget_bytes: int | None, ledger: Ledger) -> None:
        super().__init__(device, budget_bytes, ledger)
        self._given: list[Tensor] = []

    def give(self, buffer: Tensor) -> None:
        """See Pool."""
        super().give(buffer)
        self._given.append(buffer.reshape(-1).view(torch.uint8).fill_(255))

    def check_untouched(self) -> None:
        """Assert that nobody wrote to a buffer after giving it back."""
        written = [buffer.numel() for buffer in self._given if not bool((buffer == 255).all())]
        assert not written, f"buffers of {written} bytes were written after they were given back"


class Watch:
    """Sessions of one stage and what their rows must be. Loop thread only."""

    def __init__(self) -> None:
        self.layout: BlockLayout | None = None
        self._memory_of: dict[int, SessionMemory] = {}  # by the address of its state
        self._expected_of: dict[str, Expected] = {}
        self._proved_of: dict[str, int] = {}  # rows seen in RAM
        self.expecting: Callable[[SessionMemory], Expected | None] = lambda memory: None  # of sessions that nobody named in advance
        self.rises = 0  # compared with RAM, so that a test can say the oracle was asked
        self.gathers = 0

    def expect(self, session_id: str, expected: Expected) -> None:
        """From now on the session's rows must be these; a fork's, which is open, has some in RAM already."""
        self._expected_of[session_id] = expected
        memory = self.memory_of(session_id)
        if memory is not None:
            self._check_mirror(memory, 0, memory.counts.mirrored)

    def opened(self, memory: SessionMemory) -> None:
        """A session's memory exists; it is watched until it closes. The device knows of the rows that a fork begins with a little later."""
        assert isinstance(memory, OffloadSession | ResidentSession)
        self._memory_of[memory.state.data_ptr()] = memory
        self._proved_of[memory.session_id] = memory.counts.mirrored
        memory.holdings.own(lambda: self._closing(memory))

    def _closing(self, memory: SessionMemory) -> None:
        del self._memory_of[memory.state.data_ptr()]
        self._check_hot(memory)

    def expected_of(self, memory: SessionMemory) -> Expected | None:
        """What was said of it."""
        return self._expected_of.get(memory.session_id) or self.expecting(memory)

    def memory_at(self, state_address: int) -> SessionMemory | None:
        """The open session whose state lies there."""
        return self._memory_of.get(state_address)

    def memory_of(self, session_id: str) -> SessionMemory | None:
        """The open session of this name."""
        return next((memory for memory in self._memory_of.values() if memory.session_id == session_id), None)

    def poll(self) -> None:
        """Check what has become mirrored since the last call. Call it every loop round."""
        for memory in list(self._memory_of.values()):
            counts = memory.counts
            proved = min(self._proved_of[memory.session_id], counts.mirrored)
            if counts.mirrored > proved:
                on_device = int(memory.state[StateField.MIRRORED])
                assert on_device >= counts.mirrored, f"the host counts {counts.mirrored} mirrored rows, the device {on_device}"
                self._check_mirror(memory, proved, counts.mirrored)
                self.rises += 1
            self._proved_of[memory.session_id] = counts.mirrored

    def check_session(self, memory: SessionMemory) -> None:
        """Compare everything; nothing of the session may be in flight and every step was followed."""
        counts, layout = memory.counts, self.layout
        assert layout is not None, "the watch was not told the layout"
        assert counts.logical == counts.committed, f"{counts!r}: a step was not followed"
        found = (int(memory.state[StateField.LOGICAL]), int(memory.state[StateField.MIRRORED]))
        assert found == (counts.logical, counts.mirrored), f"the device has {found} logical and mirrored rows, the host {counts!r}"
        memory.check_integrity()
        expected = self.expected_of(memory)
        assert expected is not None, f"nothing was expected of {memory.session_id}"
        self._check_mirror(memory, 0, counts.mirrored)
        rows = min(counts.logical, expected.length)
        for block in range(0 if memory.ring is None else counts.mirrored // BLOCK_ROWS, blocks_of(rows)):
            self._check_block(memory.device_block(block), block, 0, rows, expected, f"device block of {memory.session_id}")
        self._check_pages(memory, rows, expected)
        self._check_hot(memory)

    def _check_mirror(self, memory: SessionMemory, first: int, end: int) -> None:
        expected = self.expected_of(memory)
        if expected is None:
            return
        rows = min(end, expected.length)
        for block in range(first // BLOCK_ROWS, blocks_of(rows)):
            self._check_block(memory.mirror_block(block), block, first, rows, expected, f"RAM of {memory.session_id}, {end} rows mirrored")

    def _check_block(self, block: Tensor, number: int, first: int, end: int, expected: Expected, where: str) -> None:
        """Rows and keys of positions [first, end) that lie in the block."""
        layout = self.layout
        assert layout is not None
        low, high = max(first, BLOCK_ROWS * number), min(end, BLOCK_ROWS * (number + 1))
        if low >= high:
            return
        positions, row = torch.arange(low, high), low % BLOCK_ROWS
        for layer in range(layout.layers):
            start, size = layout.row_offset(layer, row), (high - low) * layout.row.row_bytes
            same(block[start : start + size].view(high - low, -1), expected.rows(layer, positions), positions, f"{where}, layer {layer}")
        for layer in range(layout.key_layers):
            start, size = layout.key_offset(layer, row), (high - low) * layout.key.key_bytes
            same(block[start : start + size].view(high - low, -1), expected.keys(layer, positions), positions, f"{where}, key {layer}")

    def _check_pages(self, memory: SessionMemory, rows: int, expected: Expected) -> None:
        for page in range(min(-(-rows // PAGE_KEYS), memory.pages.pages)):  # an idle session may have given them up
            positions = torch.arange(PAGE_KEYS * page, min(rows, PAGE_KEYS * (page + 1)))
            for layer in range(memory.pages.table.shape[0]):
                keys = memory.pages.view(layer, page).view(PAGE_KEYS, -1)[: positions.numel()]
                same(keys, expected.keys(layer, positions), positions, f"pages of {memory.session_id}, key layer {layer}")

    def _check_hot(self, memory: SessionMemory) -> None:
        """Every slot that holds a position holds its row, in every layer of its group."""
        expected, layout = self.expected_of(memory), self.layout
        if expected is None or layout is None or not isinstance(memory, OffloadSession):
            return
        for group, cache in enumerate(memory.hot):
            held = ((cache.position_of >= 0) & (cache.position_of < expected.length)).nonzero().flatten()
            positions = cache.position_of[held].long()
            for place, layer in enumerate(layout.groups[group]):
                where = f"hot slots of {memory.session_id}, layer {layer}"
                same(cache.slots[place, held], expected.rows(layer, positions), positions, where)


def same(found: Tensor, wanted: Tensor, positions: Tensor, where: str) -> None:
    """Assert equal bytes, uint8 [n, size] of int64 positions [n]; names the positions that differ."""
    if torch.equal(found, wanted):
        return
    wrong = positions[(found != wanted).any(1)].tolist()
    raise AssertionError(f"{where}: positions {wrong[:8]}{' and more' if len(wrong) > 8 else ''} have other bytes")


class WatchedPlacement:
    """A placement whose sessions are watched. See `memory.placement.Placement`."""

    def __init__(self, inner: Placement, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def needs(self, tokens_max: int) -> Needs:
        """See Placement."""
        return self._inner.needs(tokens_max)

    def open(self, session_id: str, tokens_max: int) -> SessionMemory:
        """See Placement."""
        memory = self._inner.open(session_id, tokens_max)
        self._watch.opened(memory)
        return memory

    def grow(self, session: SessionMemory, tokens_max: int, *, cut: int | None = None) -> bool:
        """See Placement."""
        return self._inner.grow(session, tokens_max, cut=cut)

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback
    ) -> SessionMemory:
        """See Placement."""
        memory = self._inner.fork(source, session_id, tokens_max, rows, compute=compute, copyback=copyback)
        self._watch.opened(memory)
        return memory

    def extra_bytes(self, session: SessionMemory) -> int:
        """See Placement."""
        return self._inner.extra_bytes(session)

    def shrink(self, session: SessionMemory) -> bool:
        """See Placement."""
        return self._inner.shrink(session)

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        return self._inner.rest(session)

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement."""
        return self._inner.shed(session, shared=shared)

    def statistics(self) -> PlacementStatistics:
        """See Placement."""
        return self._inner.statistics()

    def close(self) -> None:
        """See Placement."""
        self._inner.close()


def check_empty(placement: Placement, arena: Arena, pool: Pool, ledger: Ledger) -> None:
    """Close what sessions share, and assert that nothing is held by anybody."""
    arena.check_integrity()
    pool.check_integrity()
    placement.close()
    if isinstance(pool, PoisonedPool):
        pool.check_untouched()
    held = pool.statistics()
    assert (held.buffers, held.allocated_bytes, held.reserved_bytes) == (0, 0, 0), f"the pool still holds {held}"
    blocks = arena.statistics()
    assert (blocks.free, blocks.reserved, blocks.references) == (blocks.blocks, 0, 0), f"the arena still holds {blocks}"
    arena.close()
    for tier in ("host", "device"):
        assert ledger.statistics()[tier] == {}, f"the ledger still counts {ledger.statistics()}"


def check_stage(stage: Stage) -> None:
    """`check_empty` of a stage whose sessions are closed."""
    check_empty(stage.placement, stage.arena, stage.pool, stage.ledger)
