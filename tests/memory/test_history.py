"""Block tables: addresses on the host and the device, over RAM and over device memory."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kernels.address import tensor_at
from memory.arena import Arena
from memory.errors import DoesNotFit, PoolExhausted
from memory.history import BlockStore, DeviceBlocks, History
from memory.ledger import Ledger
from memory.pool import Pool, allocated
from tests.memory.memory_world import LAYOUT

BLOCK = LAYOUT.block_bytes


def pool(budget_bytes: int | None = None) -> Pool:
    return Pool(torch.device("cpu"), budget_bytes, Ledger())


def in_ram(_: Pool) -> BlockStore:
    return Arena(LAYOUT, 8 * BLOCK, Ledger())


def on_device(buffers: Pool) -> BlockStore:
    return DeviceBlocks(LAYOUT, buffers)


stores = pytest.mark.parametrize("make", [in_ram, on_device])


@stores
def test_addresses_reach_the_blocks(make: Callable[[Pool], BlockStore]) -> None:
    """What is written through a block's view is read at its address, in the host's list and, after the write ran, in the device's table."""
    buffers = pool()
    history = History(make(buffers), 5, buffers)
    assert history.table.shape == (5,)
    write = history.ensure(3)
    assert write is not None
    for block in range(3):
        history.view(block).fill_(block + 1)
    assert not history.table.any()
    write()
    for block, address in enumerate(history.table[:3].tolist()):
        assert address == history.addresses[block]
        assert (tensor_at(address, (BLOCK,), torch.uint8) == block + 1).all()
    assert history.table[3:].tolist() == [0, 0]
    history.check_integrity()


@stores
def test_a_write_touches_new_entries_only(make: Callable[[Pool], BlockStore]) -> None:
    """Ensuring more blocks writes just their entries; ensuring what is there writes nothing."""
    buffers = pool()
    history = History(make(buffers), 5, buffers)
    first = history.ensure(2)
    second = history.ensure(4)
    assert first is not None
    assert second is not None
    assert second.entries.data_ptr() == history.table[2:].data_ptr()
    assert second.entries.shape == (2,)
    assert history.ensure(4) is None
    assert history.ensure(0) is None


@stores
def test_everything_goes_back(make: Callable[[Pool], BlockStore]) -> None:
    """After cut, trim and close the pool holds what it held before the history."""
    buffers = pool()
    store = make(buffers)
    before = buffers.statistics()
    history = History(store, 5, buffers)
    history.ensure(5)
    history.cut(2)
    assert not history.addresses[2:].any()
    history.check_integrity()
    history.trim()
    history.check_integrity()
    history.close()
    assert buffers.statistics() == before


def test_a_moved_table_keeps_its_entries() -> None:
    """After growing, old blocks keep their addresses in the larger table and new ones follow."""
    buffers = pool()
    history = History(on_device(buffers), 2, buffers)
    history.ensure(2)
    addresses = history.addresses.tolist()
    history.grow(4)
    buffers.give(history.move_table(buffers.take(32, "tables").view(torch.int64)))
    write = history.ensure(4)
    assert write is not None
    write()
    assert history.table[:2].tolist() == addresses
    assert history.table.tolist() == history.addresses.tolist()
    history.check_integrity()


def test_device_blocks_cost_their_size() -> None:
    """Each device block is one buffer of block bytes out of the reservation, and a budget short by a byte is refused at once."""
    buffers = pool(3 * allocated(BLOCK) + 64)
    history = History(on_device(buffers), 3, buffers)
    history.ensure(1)
    assert buffers.statistics().reserved_bytes == 2 * allocated(BLOCK)
    assert buffers.statistics().payload_bytes == BLOCK + 24
    with pytest.raises(PoolExhausted):
        buffers.take(1, "other")
    history.close()
    short = pool(3 * allocated(BLOCK) + 63)
    with pytest.raises(DoesNotFit):
        History(on_device(short), 3, short)
    assert short.statistics().allocated_bytes == short.statistics().reserved_bytes == 0


def test_shared_blocks_outlive_the_history() -> None:
    """Blocks shared from a history keep their bytes after it closed, until their holder releases them."""
    buffers = pool()
    store = DeviceBlocks(LAYOUT, buffers)
    history = History(store, 2, buffers)
    history.ensure(2)
    history.view(0).fill_(7)
    (block,) = history.share(1)
    history.close()
    store.check_integrity()
    assert (store.place(block).bytes == 7).all()
    assert store.references(block) == 1
    assert store.release(block)
    assert buffers.statistics().buffers == 0


class HistoryLife(RuleBasedStateMachine):
    """A history that grows, is cut, trimmed and given a larger table, its writes run late but in order, as a stream runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool()
        self.arena = Arena(LAYOUT, 12 * BLOCK, Ledger())
        self.history = History(self.arena, 4, self.pool)
        self.writes: list[Callable[[], None]] = []
        self.marks: list[int] = []  # what each block was filled with
        self.next_mark = 1

    @rule(blocks=st.integers(0, 10))
    def ensure(self, blocks: int) -> None:
        blocks = min(blocks, self.history.blocks_max)
        before = self.history.blocks
        write = self.history.ensure(blocks)
        assert (write is None) == (blocks <= before)
        if write is not None:
            self.writes.append(write)
        for block in range(before, self.history.blocks):
            self.history.view(block).fill_(self.next_mark % 251)
            self.marks.append(self.next_mark % 251)
            self.next_mark += 1

    @rule()
    def stream_runs(self) -> None:
        while self.writes:
            self.writes.pop(0)()
        blocks = self.history.blocks
        assert self.history.table[:blocks].tolist() == self.history.addresses[:blocks].tolist()

    @rule(part=st.floats(0, 1))
    def cut(self, part: float) -> None:
        kept = int(part * self.history.blocks)
        self.history.cut(kept)
        del self.marks[kept:]

    @rule()
    def trim(self) -> None:
        self.stream_runs()  # nothing may be in flight
        self.history.trim()

    @rule(more=st.integers(1, 3))
    @precondition(lambda self: self.history.blocks_max < 10)
    def grow(self, more: int) -> None:
        self.stream_runs()
        blocks_max = min(10, self.history.blocks_max + more)
        self.history.grow(blocks_max)
        self.pool.give(self.history.move_table(self.pool.take(8 * blocks_max, "tables").view(torch.int64)))
        assert self.history.table[: self.history.blocks].tolist() == self.history.addresses[: self.history.blocks].tolist()

    @invariant()
    def holds(self) -> None:
        self.history.check_integrity()
        self.arena.check_integrity()
        self.pool.check_integrity()
        assert self.history.blocks == len(self.marks)
        for block, mark in enumerate(self.marks):
            found = tensor_at(int(self.history.addresses[block]), (BLOCK,), torch.uint8)
            assert int(found[0]) == int(found[-1]) == mark, f"block {block} holds another's bytes"

    def teardown(self) -> None:
        self.history.close()
        statistics = self.arena.statistics()
        assert (statistics.references, statistics.reserved, statistics.free) == (0, 0, statistics.blocks)
        assert self.pool.statistics().buffers == 0


TestHistoryLife = HistoryLife.TestCase
TestHistoryLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
