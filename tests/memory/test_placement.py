"""Admission: all or nothing, to the byte, and growing for a longer turn."""

import pytest

from kernels.layout import STATE_FIELDS
from memory import DoesNotFit, PoolExhausted
from memory import placement as placement_module
from memory.hot import HotCache
from memory.offload import OffloadSession
from memory.pool import allocated
from streams import CpuBackend
from tests.memory.memory_world import HIDDEN, LAYOUT, PICKS, Stage

both = pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])
BLOCK = LAYOUT.block_bytes


@both
@pytest.mark.parametrize("tokens_max", [1, 63, 64, 65, 1024, 1025, 3000])
async def test_needs_are_what_open_takes(backend: CpuBackend, resident: bool, tokens_max: int) -> None:
    """Bytes taken and reserved by `open` equal `needs` on both tiers, and so does everything once all rows exist."""
    stage = Stage(backend, resident=resident)
    held = stage.pool.statistics().allocated_bytes
    needs = stage.placement.needs(tokens_max)
    session = stage.converse(tokens_max).session
    pool, arena = stage.pool.statistics(), stage.arena.statistics()
    assert pool.allocated_bytes + pool.reserved_bytes - held == needs.device_bytes
    assert arena.reserved * BLOCK == needs.host_bytes
    session.ensure_rows(tokens_max, stage.compute)
    pool, arena = stage.pool.statistics(), stage.arena.statistics()
    assert (pool.allocated_bytes - held, pool.reserved_bytes) == (needs.device_bytes, 0)
    assert (arena.blocks - arena.free, arena.reserved) == (needs.host_bytes // BLOCK, 0)
    stage.check()


async def test_needs_add_up_from_the_parts(backend: CpuBackend) -> None:
    """An offloaded session of 100 rows needs two blocks of RAM, and on the device ring, caches, tables, pages, state and hidden states."""
    stage = Stage(backend, hot_rows=30)
    needs = stage.placement.needs(100)
    assert needs.host_bytes == 2 * BLOCK
    caches = sum(allocated(HotCache.bytes_needed(layers, 30, 128, LAYOUT.row.row_bytes)) for layers in (2, 1))
    pages = allocated(2 * 1024 * LAYOUT.key.key_bytes)
    small = allocated(2 * 8) + allocated(2 * 8) + allocated(8 * STATE_FIELDS) + allocated(4 * 16 * HIDDEN)
    assert needs.device_bytes == allocated(4 * BLOCK) + caches + pages + small


@both
async def test_an_exact_budget_admits_and_one_byte_less_does_not(backend: CpuBackend, resident: bool) -> None:
    """With exactly the needed device bytes `open` succeeds; with one byte less it names that byte and leaves nothing behind."""
    exact = Stage(backend, resident=resident)
    budget = exact.placement.needs(500).device_bytes + exact.pool.statistics().allocated_bytes
    Stage(backend, resident=resident, budget_bytes=budget).converse(500)
    short = Stage(backend, resident=resident, budget_bytes=budget - 1)
    before = short.snapshot()
    with pytest.raises(DoesNotFit) as caught:
        short.converse(500)
    assert (caught.value.host_missing_bytes, caught.value.device_missing_bytes) == (0, 1)
    assert short.snapshot() == before
    short.check()


async def test_both_tiers_are_named(backend: CpuBackend) -> None:
    """When RAM and device memory are short at once the error has the missing bytes of each, in numbers and words."""
    stage = Stage(backend, blocks=3)
    need = stage.placement.needs(64 * 8)
    short = Stage(backend, blocks=3, budget_bytes=stage.pool.statistics().allocated_bytes + need.device_bytes - 640)
    before = short.snapshot()
    with pytest.raises(DoesNotFit) as caught:
        short.converse(64 * 8)
    assert (caught.value.host_missing_bytes, caught.value.device_missing_bytes) == (5 * BLOCK, 640)
    assert str(caught.value) == f"{5 * BLOCK} bytes of host memory missing, 640 bytes of device memory missing"
    assert short.snapshot() == before


async def test_resident_needs_no_host_memory(backend: CpuBackend) -> None:
    """With an arena too small for a session a resident one opens all the same."""
    stage = Stage(backend, resident=True, blocks=1)
    stage.converse(1000)
    assert stage.arena.statistics().reserved == 0


@both
@pytest.mark.parametrize("takes", range(8))
async def test_an_open_that_fails_half_way_leaves_nothing(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, resident: bool, takes: int
) -> None:
    """Whichever take of `open` fails, ledger, arena and pool are exactly as before, and the next open succeeds."""
    stage = Stage(backend, resident=resident)
    before, real, made = stage.snapshot(), stage.pool.take, 0

    def take(size_bytes: int, owner: str, *, reserved: bool = False) -> object:
        nonlocal made
        made += 1
        if made > takes:
            raise PoolExhausted(size_bytes)
        return real(size_bytes, owner, reserved=reserved)

    monkeypatch.setattr(stage.pool, "take", take)
    taken = 4 if resident else 7  # two tables, state, hidden states; ring and two caches
    if takes < taken:
        with pytest.raises(PoolExhausted):
            stage.placement.open("one", 500)
        assert stage.snapshot() == before
    else:
        stage.placement.open("one", 500)
    monkeypatch.undo()
    stage.converse(500, session_id="two")
    stage.check()


@both
async def test_admitted_sessions_always_get_their_rows(backend: CpuBackend, resident: bool) -> None:
    """With the tiers full of reservations a further session is refused, and each admitted one reaches its last row."""
    stage = Stage(backend, blocks=16, resident=resident)
    budget = stage.pool.statistics().allocated_bytes + 2 * stage.placement.needs(500).device_bytes
    stage = Stage(backend, blocks=16, resident=resident, budget_bytes=budget)
    pair = [stage.converse(500, session_id=str(number)) for number in range(2)]
    with pytest.raises(DoesNotFit):
        stage.converse(1, session_id="late")
    for conversation in pair:
        for _ in range(5):
            await conversation.append(100)
        conversation.check()
    stage.check()


@pytest.mark.parametrize(("hot_rows", "tokens_max", "slots"), [(8, 1000, 8), (100, 64, 64), (100, 65, 100), (1, 1000, PICKS), (8, 1, 8)])
async def test_hot_slots_follow_the_setting_the_session_and_the_picks(
    backend: CpuBackend, hot_rows: int, tokens_max: int, slots: int
) -> None:
    """Slots are the setting, at most the session's positions in whole blocks, at least top-k."""
    session = Stage(backend, hot_rows=hot_rows).placement.open("one", tokens_max)
    assert isinstance(session, OffloadSession)
    assert [cache.statistics(0).slots for cache in session.hot] == [slots, slots]


@both
async def test_growing_keeps_rows_and_makes_room(backend: CpuBackend, resident: bool) -> None:
    """After a grow old rows are where the new tables say, the row of the step table has changed, and new rows follow to the new end."""
    stage = Stage(backend, resident=resident, hot_rows=200)
    before = stage.snapshot()
    one = stage.converse(130)
    await one.append(100)
    await one.decode(30)
    await one.session.operations.settle()
    row = one.session.table_row(1)
    assert not stage.placement.grow(one.session, 130)
    assert one.session.table_row(1) == row
    assert not one.session.room(130, 1)
    if isinstance(one.session, OffloadSession):
        cache = one.session.hot[0]
        cache.slot_of[3], cache.position_of[7], cache.hand[0] = 7, 3, 8
        cache.slots[:, 7] = 99
    assert stage.placement.grow(one.session, 1500)
    assert one.session.table_row(1) != row
    if isinstance(one.session, OffloadSession):
        cache = one.session.hot[0]
        assert (int(cache.slot_of[3]), int(cache.position_of[7]), int(cache.hand)) == (7, 3, 8)
        assert (cache.slots[:, 7] == 99).all()
        assert cache.slots.shape[1] == 200
    one.check()
    for _ in range(6):
        await one.append(200)
    await one.decode(170, each=34)
    await one.session.operations.settle()
    assert one.session.counts.logical == 1500
    one.check()
    stage.check()
    one.session.close()
    assert stage.snapshot() == before


@both
@pytest.mark.parametrize("takes", range(4))
async def test_a_grow_that_fails_changes_nothing(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, resident: bool, takes: int) -> None:
    """Refused at once for want of bytes, or failing at any take, a grow leaves session, ledger, arena and pool as before."""
    stage = Stage(backend, resident=resident, blocks=64)
    one = stage.converse(130)
    await one.append(100)
    await one.session.operations.settle()
    row, before, real, made = one.session.table_row(1), stage.snapshot(), stage.pool.take, 0
    if not resident:
        with pytest.raises(DoesNotFit) as caught:
            stage.placement.grow(one.session, 65 * 64)
        assert caught.value.host_missing_bytes == BLOCK
        assert stage.snapshot() == before

    def take(size_bytes: int, owner: str, *, reserved: bool = False) -> object:
        nonlocal made
        made += 1
        if made > takes:
            raise PoolExhausted(size_bytes)
        return real(size_bytes, owner, reserved=reserved)

    monkeypatch.setattr(stage.pool, "take", take)
    if takes < (2 if resident else 4):
        with pytest.raises(PoolExhausted):
            stage.placement.grow(one.session, 1500)
        assert stage.snapshot() == before
        assert one.session.table_row(1) == row
        assert not one.session.room(100, 31)
    else:
        assert stage.placement.grow(one.session, 1500)
    monkeypatch.undo()
    one.check()
    await one.decode(30)
    await one.session.operations.settle()
    one.check()


@both
async def test_growing_waits_for_nothing_so_nothing_may_be_in_flight(backend: CpuBackend, resident: bool) -> None:
    """A grow with a step in flight is a bug: its addresses would change under it."""
    stage = Stage(backend, resident=resident)
    one = stage.converse(100)
    event = one.submit_step()
    with pytest.raises(AssertionError, match="in flight"):
        stage.placement.grow(one.session, 200)
    await event


async def test_statistics_say_what_a_stage_holds(backend: CpuBackend) -> None:
    """The placement's name, the arena's blocks and the append ring's bytes are told."""
    offload, resident = Stage(backend).placement.statistics(), Stage(backend, resident=True).placement.statistics()
    assert (offload.placement, offload.arena.blocks, offload.append_ring_bytes) == ("offload", 64, allocated(5 * BLOCK))
    assert (resident.placement, resident.append_ring_bytes, resident.pool.buffers) == ("resident", 0, 0)
    assert placement_module.Needs(1, 2).device_bytes == 2
