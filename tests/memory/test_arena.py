"""The arena: whole blocks in chunks, counted references."""

import mmap

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kernels.address import tensor_at
from kernels.layout import BlockLayout, KeyLayout, RowLayout
from memory.arena import Arena, BlockId
from memory.errors import ArenaFull
from memory.ledger import Holding, Ledger
from tests.memory.memory_world import LAYOUT
from tests.memory.test_host import Recorder

BLOCK = LAYOUT.block_bytes


@pytest.mark.parametrize("chunk_bytes", [1, BLOCK, 2 * BLOCK + BLOCK // 2, 1 << 30])
def test_blocks_never_straddle_chunks(chunk_bytes: int) -> None:
    """Every block is whole, 16-byte aligned, apart from all others, and address and view name the same bytes."""
    arena = Arena(LAYOUT, 7 * BLOCK + BLOCK - 1, Ledger(), chunk_bytes=chunk_bytes)
    blocks = [arena.take() for _ in range(7)]
    for block in blocks:
        place = arena.place(block)
        assert place.bytes.shape == (BLOCK,)
        assert place.address % 16 == 0
        place.bytes.fill_(block + 1)
    for block in blocks:
        assert (tensor_at(arena.place(block).address, (BLOCK,), torch.uint8) == block + 1).all()
    assert arena.statistics().chunks == -(-7 // max(1, chunk_bytes // BLOCK))
    arena.check_integrity()


def test_the_ledger_has_the_physical_bytes() -> None:
    """Payload is whole blocks, allocated is each chunk rounded up to pages, and closing credits both."""
    ledger = Ledger()
    arena = Arena(LAYOUT, 5 * BLOCK, ledger, chunk_bytes=2 * BLOCK)
    pages = [-(-blocks * BLOCK // mmap.PAGESIZE) * mmap.PAGESIZE for blocks in (2, 2, 1)]
    assert ledger.holding("host", "arena") == Holding(5 * BLOCK, sum(pages))
    assert arena.statistics().allocated_bytes == sum(pages)
    arena.close()
    assert ledger.total("host") == Holding()


def test_full_says_what_is_missing() -> None:
    """With every block taken or reserved, take and reserve raise with the missing bytes and change nothing."""
    arena = Arena(LAYOUT, 4 * BLOCK, Ledger())
    arena.take()
    arena.reserve(2)
    with pytest.raises(ArenaFull) as caught:
        arena.reserve(4)
    assert caught.value.missing_bytes == 3 * BLOCK
    arena.take()
    with pytest.raises(ArenaFull) as caught:
        arena.take()
    assert caught.value.missing_bytes == BLOCK
    assert arena.take(reserved=True) not in (0, 1)
    assert arena.statistics().reserved == 1
    arena.check_integrity()


def test_a_block_is_freed_by_its_last_reference() -> None:
    """Retained twice, a block is freed by the third release only, and a free block is not released again."""
    arena = Arena(LAYOUT, BLOCK, Ledger())
    block = arena.take()
    arena.retain(block)
    arena.retain(block)
    assert [arena.release(block) for _ in range(3)] == [False, False, True]
    with pytest.raises(AssertionError, match="is free"):
        arena.release(block)
    with pytest.raises(AssertionError, match="is free"):
        arena.retain(block)
    with pytest.raises(AssertionError, match="is free"):
        arena.place(block)


def test_thirty_sessions_of_a_million_rows_are_representable() -> None:
    """An arena of 30 x 1M rows costs a few bytes a block to describe and touches no memory of the rows."""
    arena = Arena(LAYOUT, 30 * 16_384 * BLOCK, Ledger())
    assert arena.statistics().blocks == 491_520
    arena.reserve(491_520)
    first, second = arena.take(reserved=True), arena.take(reserved=True)
    assert (first, second) == (0, 1)
    arena.release(first)
    assert arena.take() == first
    assert arena.statistics().free == 491_518


def test_a_refused_registration_leaves_nothing() -> None:
    """When a chunk's registration fails, earlier chunks are unregistered and nothing is charged."""
    ledger, recorder = Ledger(), Recorder()

    def refuse_from_now_on(blocks: int, of_blocks: int) -> None:
        assert (blocks, of_blocks) == (2, 4)
        recorder.refuse = True

    with pytest.raises(RuntimeError, match="the driver refuses"):
        Arena(LAYOUT, 4 * BLOCK, ledger, chunk_bytes=2 * BLOCK, registration=recorder, progress=refuse_from_now_on)
    assert recorder.registered == {}
    assert ledger.statistics() == Ledger().statistics()


def test_progress_reaches_all_blocks() -> None:
    """Progress is told after each chunk and ends with all blocks."""
    told: list[tuple[int, int]] = []
    Arena(LAYOUT, 5 * BLOCK, Ledger(), chunk_bytes=2 * BLOCK, progress=lambda blocks, of_blocks: told.append((blocks, of_blocks)))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_closing_with_a_held_block_is_a_bug() -> None:
    """Close refuses while a block is held or reserved."""
    arena = Arena(LAYOUT, 2 * BLOCK, Ledger())
    block = arena.take()
    with pytest.raises(AssertionError, match="still held"):
        arena.close()
    arena.release(block)
    arena.reserve(1)
    with pytest.raises(AssertionError, match="still reserved"):
        arena.close()


class ArenaLife(RuleBasedStateMachine):
    """Takes, retains, releases and reservations in any order against a plain dictionary of counts."""

    def __init__(self) -> None:
        super().__init__()
        layout = BlockLayout(RowLayout("f32", 4, 4), KeyLayout("f32", 4), ((0,),))
        self.arena = Arena(layout, 6 * layout.block_bytes, Ledger(), chunk_bytes=4 * layout.block_bytes)
        self.block_bytes = layout.block_bytes
        self.held: dict[BlockId, int] = {}
        self.reserved = 0

    @rule(reserved=st.booleans())
    def take(self, reserved: bool) -> None:
        if reserved and not self.reserved:
            return
        if not reserved and len(self.held) + self.reserved == 6:
            with pytest.raises(ArenaFull):
                self.arena.take()
            return
        block = self.arena.take(reserved=reserved)
        assert block not in self.held
        self.held[block] = 1
        self.reserved -= reserved

    @rule(blocks=st.integers(0, 7))
    def reserve(self, blocks: int) -> None:
        free = 6 - len(self.held) - self.reserved
        if blocks <= free:
            self.arena.reserve(blocks)
            self.reserved += blocks
        else:
            with pytest.raises(ArenaFull) as caught:
                self.arena.reserve(blocks)
            assert caught.value.missing_bytes == (blocks - free) * self.block_bytes

    @rule(part=st.floats(0, 1))
    def unreserve(self, part: float) -> None:
        blocks = int(part * self.reserved)
        self.arena.unreserve(blocks)
        self.reserved -= blocks

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 5))
    def retain(self, pick: int) -> None:
        block = sorted(self.held)[pick % len(self.held)]
        self.arena.retain(block)
        self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 5))
    def release(self, pick: int) -> None:
        block = sorted(self.held)[pick % len(self.held)]
        self.held[block] -= 1
        assert self.arena.release(block) == (self.held[block] == 0)
        if self.held[block] == 0:
            del self.held[block]

    @invariant()
    def counts_agree(self) -> None:
        self.arena.check_integrity()
        statistics = self.arena.statistics()
        assert statistics.free == 6 - len(self.held)
        assert statistics.reserved == self.reserved
        assert statistics.references == sum(self.held.values())
        assert all(self.arena.references(block) == count for block, count in self.held.items())
        assert self.arena.available == 6 - len(self.held) - self.reserved


def test_any_order_of_takes_and_releases_keeps_the_arena_whole() -> None:
    """After any sequence of operations counts, references and reservations equal the plain model's."""
    run_state_machine_as_test(ArenaLife, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
