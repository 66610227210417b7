"""The recent ring, its room rule, and the append ring."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kernels.layout import BLOCK_ROWS
from memory.errors import RingOverrun
from memory.ledger import Ledger
from memory.pool import Pool, allocated
from memory.ring import AppendRing, Ring, room
from streams import CpuBackend
from tests.memory.memory_world import LAYOUT, hold


def pool() -> Pool:
    return Pool(torch.device("cpu"), None, Ledger())


@pytest.mark.parametrize(("position", "place"), [(0, 0), (63, 0), (64, 1), (255, 3), (256, 0), (1_048_575, 3)])
def test_places_follow_positions_round_the_ring(position: int, place: int) -> None:
    """Position p lies in place (p // 64) % 4, and the block's view is that place."""
    ring = Ring(LAYOUT, pool())
    assert Ring.place_of(position) == place
    view = ring.block_view(position // 64)
    assert view.data_ptr() == ring.buffer.data_ptr() + place * LAYOUT.block_bytes
    assert view.shape == (LAYOUT.block_bytes,)


@pytest.mark.parametrize(
    ("upper", "rows", "mirrored", "fits"),
    [
        (0, 256, 0, True),
        (0, 257, 0, False),
        (255, 1, 0, True),
        (256, 1, 0, False),
        (256, 1, 63, False),  # a partial flush frees no row
        (256, 1, 64, True),
        (319, 1, 127, True),
        (320, 1, 127, False),
        (320, 1, 128, True),
        (256, 0, 0, True),
    ],
)
def test_room_counts_whole_mirrored_blocks(upper: int, rows: int, mirrored: int, fits: bool) -> None:
    """A step fits only if its last row's place holds a block that is wholly mirrored."""
    assert room(upper, rows, mirrored) == fits


class RingLife(RuleBasedStateMachine):
    """Rows are written where the rule allows it and mirrored in any portions; each writing leaves its own mark."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(LAYOUT, pool())
        self.marks: list[int] = []
        self.mirrored = 0
        self.writings = 0

    @rule(rows=st.integers(1, 100))
    def write(self, rows: int) -> None:
        if not room(len(self.marks), rows, self.mirrored):
            return
        for position in range(len(self.marks), len(self.marks) + rows):
            self.writings = self.writings % 250 + 1
            self.ring.block_view(position // BLOCK_ROWS)[position % BLOCK_ROWS] = self.writings
            self.marks.append(self.writings)

    @rule(part=st.floats(0, 1))
    def mirror(self, part: float) -> None:
        self.mirrored += int(part * (len(self.marks) - self.mirrored))

    @rule(part=st.floats(0, 1))
    def roll_back(self, part: float) -> None:
        del self.marks[self.mirrored + int(part * (len(self.marks) - self.mirrored)) :]

    @invariant()
    def unmirrored_blocks_are_whole(self) -> None:
        self.ring.check_integrity(len(self.marks), self.mirrored)
        for position in range(BLOCK_ROWS * (self.mirrored // BLOCK_ROWS), len(self.marks)):
            assert int(self.ring.block_view(position // BLOCK_ROWS)[position % BLOCK_ROWS]) == self.marks[position]


def test_no_row_of_an_unmirrored_block_is_ever_overwritten() -> None:
    """Under the room rule every row of the blocks that are not wholly mirrored keeps its mark."""
    run_state_machine_as_test(RingLife, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


def test_the_integrity_check_notices_an_overrun() -> None:
    """257 rows without a mirrored block fail the check."""
    with pytest.raises(AssertionError, match="overrun"):
        Ring(LAYOUT, pool()).check_integrity(257, 63)


@pytest.mark.parametrize(("chunk_rows", "blocks"), [(1, 2), (63, 2), (64, 3), (65, 3), (512, 10)])
def test_an_append_ring_holds_any_chunk(chunk_rows: int, blocks: int) -> None:
    """It has chunk / 64 + 2 blocks, enough for a chunk that begins in a block's last row."""
    buffers = pool()
    ring = AppendRing(LAYOUT, chunk_rows, buffers)
    assert ring.blocks == blocks
    assert (63 + chunk_rows - 1) // 64 < blocks
    assert ring.buffer.numel() == blocks * LAYOUT.block_bytes
    assert buffers.statistics().allocated_bytes == allocated(blocks * LAYOUT.block_bytes)
    ring.close()
    assert buffers.statistics().buffers == 0


async def test_one_chunk_at_a_time(backend: CpuBackend) -> None:
    """While a chunk is open another is refused by name, as is one too long; after its release the next may open."""
    ring = AppendRing(LAYOUT, 100, pool())
    stream = backend.stream("compute")
    for rows in (0, 101):
        with pytest.raises(RingOverrun, match="1 to 100"):
            ring.open("one", rows, stream)
    ring.open("one", 100, stream)
    with pytest.raises(RingOverrun, match="session one"):
        ring.open("two", 1, stream)
    with pytest.raises(AssertionError, match="is open"):
        ring.close()
    ring.release(())
    ring.open("two", 1, stream)
    ring.release(())
    ring.close()


async def test_the_next_chunk_is_written_behind_the_last_copies(backend: CpuBackend) -> None:
    """Work submitted after `open` starts only when the operations of the released chunk are done, even if one of them failed."""
    ring = AppendRing(LAYOUT, 64, pool())
    compute, copyback = backend.stream("compute"), backend.stream("copyback")
    release = hold(copyback)
    seen: list[str] = []

    def fail() -> None:
        seen.append("copied")
        raise RuntimeError("lost")

    copy = copyback.submit(fail, label="copy")
    ring.open("one", 1, compute)
    ring.release([copy])
    ring.open("two", 1, compute)
    write = compute.submit(lambda: seen.append("written"), label="write")
    assert not write.done()
    release()
    await write
    assert seen == ["copied", "written"]
    assert isinstance(copy.error(), RuntimeError)
    ring.release(())
