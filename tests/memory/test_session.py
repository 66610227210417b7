"""Sessions of both placements: table rows, room, truncation, closing, whole lives."""

import random

import pytest
import torch

from kernels.layout import HIDDEN_ROWS, STATE_FIELDS, GroupField, StateField, TableField
from memory import RingOverrun, barrier
from memory.offload import OffloadSession
from streams import CpuBackend, Fault, Full, SeededOrder, TransferFailed, VirtualBackend
from tests.memory.memory_world import HIDDEN, LAYOUT, TABLE_LAYOUT, Stage, hold, live

both = pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])


@both
async def test_a_new_session_has_no_rows(backend: CpuBackend, resident: bool) -> None:
    """State is zero but BAD_LAYER -1, counts are 0, the ring is empty and no block is taken."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    state = torch.zeros(STATE_FIELDS, dtype=torch.int64)
    state[StateField.BAD_LAYER] = -1
    assert torch.equal(one.session.state, state)
    assert one.session.hidden.shape == (HIDDEN_ROWS, HIDDEN)
    assert one.session.hidden.dtype == torch.float32
    assert (one.session.statistics().blocks, one.session.statistics().pages) == (0, 0)
    one.check()


async def test_a_table_row_names_every_buffer(backend: CpuBackend) -> None:
    """An offloaded session's row has its addresses in layout order, its groups' hot caches included."""
    stage = Stage(backend)
    session = stage.converse(3000).session
    assert isinstance(session, OffloadSession)
    row = session.table_row(2)
    assert len(row) == TABLE_LAYOUT.fields
    assert row[: TableField.GROUPS] == [
        2,
        session.state.data_ptr(),
        session.ring.buffer.data_ptr() if session.ring else 0,
        session.history.table.data_ptr(),
        session.pages.table.data_ptr(),
        3,
        session.hidden.data_ptr(),
    ]
    for group, cache in enumerate(session.hot):
        assert row[TABLE_LAYOUT.group(group, GroupField.SLOTS)] == cache.slots.data_ptr()
        assert row[TABLE_LAYOUT.group(group, GroupField.SLOT_OF)] == cache.slot_of.data_ptr()
        assert row[TABLE_LAYOUT.group(group, GroupField.SLOTS_MAX)] == 8
        assert cache.slots.shape == (len(LAYOUT.groups[group]), 8, LAYOUT.row.row_bytes)
        assert cache.slot_of.shape == (3008,)


async def test_a_resident_row_has_no_ring_and_no_slots(backend: CpuBackend) -> None:
    """RING and all group fields of a resident session are 0."""
    row = Stage(backend, resident=True).converse().session.table_row(1)
    assert row[TableField.RING] == 0
    assert row[TableField.GROUPS :] == [0] * (TABLE_LAYOUT.fields - TableField.GROUPS)


@both
async def test_new_entries_are_written_in_stream_order(backend: CpuBackend, resident: bool) -> None:
    """`ensure_rows` writes when a block or page is new, says so, and its write waits for the steps submitted before it."""
    stage = Stage(backend, resident=resident)
    session = stage.converse(2000).session
    assert session.ensure_rows(1, stage.compute)
    assert not session.ensure_rows(64, stage.compute)
    await session.operations.settle()
    release = hold(stage.compute)
    assert session.ensure_rows(65, stage.compute)
    assert int(session.history.table[1]) == 0
    release()
    await session.operations.settle()
    assert session.history.table[:2].tolist() == session.history.addresses[:2].tolist()
    assert session.ensure_rows(1025, stage.compute)
    await session.operations.settle()
    assert session.statistics().pages == 2
    session.check_integrity()


async def test_room_ends_at_the_ring(backend: CpuBackend) -> None:
    """With no copy completed 256 rows fit and no more; each completed block gives 64 back; a step without room is RingOverrun."""
    stage = Stage(backend)
    one = stage.converse()
    release = hold(stage.copyback.stream)
    await one.decode(255, each=51)
    assert one.session.room(255, 1)
    assert not one.session.room(255, 2)
    await one.decode(1)
    assert not one.session.room(256, 1)
    with pytest.raises(RingOverrun, match="no room for 1 rows"):
        one.session.advance(1)
    assert one.session.counts.logical == 256
    release()
    await one.session.operations.settle()
    assert one.session.room(256, 256)
    one.check()


@both
async def test_room_ends_at_the_tokens_asked_for(backend: CpuBackend, resident: bool) -> None:
    """A step past `tokens_max` has no room, though the last block has."""
    one = Stage(backend, resident=resident).converse(100)
    await one.decode(99, each=33)
    assert one.session.room(99, 1)
    assert not one.session.room(99, 2)


@both
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 129, 199, 200])
async def test_truncation_anywhere_goes_on_with_new_rows(backend: CpuBackend, resident: bool, rows: int) -> None:
    """Cut to any length and decoded on past the old end, the session has the old rows up to the cut and new ones after it."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(200)
    await one.truncate(rows)
    await one.session.operations.settle()
    one.check()
    assert one.session.statistics().blocks == -(-rows // 64)
    await one.decode(150, each=50)
    await one.session.operations.settle()
    one.check()


@both
@pytest.mark.parametrize("rows", [0, 63, 64, 100, 130])
async def test_truncation_behind_a_barrier(backend: CpuBackend, resident: bool, rows: int) -> None:
    """Cut below rows that a barrier brought to RAM, partial block included: a new epoch, and later barriers mirror the new rows."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(131)
    assert await barrier(one.session, stage.copyback) == 131
    await one.truncate(rows)
    assert one.session.counts.mirrored == rows
    assert one.session.counts.epoch == 1
    await one.decode(70, each=35)
    assert await barrier(one.session, stage.copyback) == rows + 70
    one.check()


async def test_truncation_unmaps_hot_slots(backend: CpuBackend) -> None:
    """Slots that hold positions from the cut block on are unmapped, earlier ones stay."""
    stage = Stage(backend)
    one = stage.converse()
    await one.append(200)
    session = one.session
    assert isinstance(session, OffloadSession)
    for cache in session.hot:
        for slot, position in enumerate((5, 63, 64, 100, 191)):
            cache.slot_of[position] = slot
            cache.position_of[slot] = position
    await one.truncate(100)
    for cache in session.hot:
        assert cache.position_of.tolist() == [5, 63, -1, -1, -1, -1, -1, -1]
        assert (cache.slot_of >= 0).nonzero().flatten().tolist() == [5, 63]
    one.check()


async def test_rows_of_a_shared_block_are_not_replaced(backend: CpuBackend) -> None:
    """A cut into a block that another holder shares, or at its edge, leaves the shared bytes as they were."""
    stage = Stage(backend)
    one = stage.converse()
    await one.append(150)
    shared = one.session.history.share(2)
    kept = stage.arena.place(shared[1]).bytes.clone()
    await one.truncate(100)
    assert one.session.counts.mirrored == 64  # the block of its own has no row yet
    await one.decode(60)
    await one.session.operations.settle()
    one.check()
    await one.truncate(64)
    await one.decode(100)
    await one.session.operations.settle()
    assert torch.equal(stage.arena.place(shared[1]).bytes, kept)
    one.check()


@both
async def test_cut_blocks_are_freed_once_nothing_is_in_flight(backend: CpuBackend, resident: bool) -> None:
    """Blocks past a cut stay taken while the compute stream is held, and are free afterwards, still reserved for the session."""
    stage = Stage(backend, resident=resident)
    one = stage.converse(256)
    await one.append(200)
    free = stage.arena.statistics().free, stage.pool.statistics().allocated_bytes
    release = hold(stage.compute)
    event = one.session.truncate(10, stage.compute)
    assert (stage.arena.statistics().free, stage.pool.statistics().allocated_bytes) == free
    release()
    await event
    await one.session.operations.settle()
    assert one.session.statistics().blocks == 1
    if resident:
        assert stage.pool.statistics().allocated_bytes < free[1]
    else:
        assert stage.arena.statistics().free == free[0] + 3
        assert stage.arena.available == 64 - 4


async def test_copies_that_did_not_fit_the_queue_are_submitted_later(backend: CpuBackend) -> None:
    """When the copyback stream is full, commit raises Full with the rows committed, and a later commit submits what was left."""
    stage = Stage(backend)
    one = stage.converse()
    stage.copyback.stream = backend.stream("narrow", queue_max=2)
    release = hold(stage.copyback.stream)
    await one.decode(56)
    event = one.submit_step(8)
    await event
    with pytest.raises(Full):
        one.session.commit(8, stage.copyback, event)
    counts = one.session.counts
    assert (counts.committed, counts.submitted) == (64, 0)
    release()
    await stage.copyback.stream.idle()
    await one.decode(1)
    await one.session.operations.settle()
    assert counts.mirrored == 64
    one.check()


@both
async def test_a_closed_session_gives_back_everything(backend: CpuBackend, resident: bool) -> None:
    """After decode, append, barrier and a cut, closing leaves ledger, arena and pool as before the session."""
    stage = Stage(backend, resident=resident)
    before = stage.snapshot()
    one, two = stage.converse(session_id="one"), stage.converse(session_id="two")
    for conversation in (one, two):
        await conversation.append(150)
        await conversation.decode(20)
        await barrier(conversation.session, stage.copyback)
        await conversation.truncate(80)
    one.session.close()
    await one.session.operations.settle()
    two.check()
    two.session.close()
    await two.session.operations.settle()
    assert stage.snapshot() == before
    with pytest.raises(AssertionError, match="closed twice"):
        one.session.close()
    stage.placement.close()
    stage.arena.close()
    assert stage.ledger.total("host").allocated_bytes == stage.ledger.total("device").allocated_bytes == 0


@both
@pytest.mark.parametrize("seed", range(4))
async def test_two_random_lives_side_by_side(backend: CpuBackend, resident: bool, seed: int) -> None:
    """Whatever two sessions of one stage do in turns, every row of both is where a step reads it and every mirrored row is in RAM."""
    draw = random.Random(seed)
    stage = Stage(backend, resident=resident, blocks=24)
    before = stage.snapshot()
    pair = [stage.converse(600, session_id=str(number)) for number in range(2)]
    for _ in range(20):
        await live(draw.choice(pair), stage, draw)
    for conversation in pair:
        await conversation.session.operations.settle()
        conversation.check()
        await barrier(conversation.session, stage.copyback)
        conversation.check()
        stage.check()
    for conversation in pair:
        conversation.session.close()
        await conversation.session.operations.settle()
    assert stage.snapshot() == before


@both
async def test_a_table_write_that_fails_breaks_its_session(resident: bool) -> None:
    """Entries that were not written would be stale for ever: nobody steps on them, and another session is as before."""
    stage = Stage(VirtualBackend(SeededOrder(1, faults=(Fault("tables"),))), resident=resident)
    one, two = stage.converse(), stage.converse(session_id="two")
    one.session.ensure_rows(70, stage.compute)
    await one.session.operations.settle()
    assert isinstance(one.session.operations.broken, TransferFailed)
    await two.decode(70)
    assert two.session.operations.broken is None
    two.check()


@both
async def test_a_page_of_its_own_that_fails_breaks_who_cut(resident: bool) -> None:
    """The copy of a shared page that a cut goes through is lost: who cut is broken, and who shares the page has its keys."""
    stage = Stage(VirtualBackend(SeededOrder(1, faults=(Fault("own page"),))), resident=resident)
    one = stage.converse(1400)
    for _ in range(6):
        await one.append(200)
    two = stage.placement.fork(one.session, "two", 1400, 1100, compute=stage.compute, copyback=stage.copyback)
    await two.operations.settle()
    two.truncate(1000, stage.compute)
    await two.operations.settle()
    assert isinstance(two.operations.broken, TransferFailed)
    assert one.session.operations.broken is None
    one.check()
