"""The barrier: flush, await, check; and the byte comparison behind it."""

import asyncio

import pytest

from kernels.layout import StateField
from memory import ArenaFull, BarrierFailed, CopybackInFlight, barrier, verify_mirror
from memory import copyback as copyback_module
from streams import CpuBackend
from tests.memory.memory_world import LAYOUT, Stage, hold, parts_of

both = pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])


@both
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 128, 200, 255, 256, 257])
async def test_behind_it_every_row_is_in_ram(backend: CpuBackend, resident: bool, rows: int) -> None:
    """For any length mirrored equals logical on host and device, every row and key is in RAM byte for byte, and decoding goes on."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.decode(rows, each=16)
    assert await barrier(one.session, stage.copyback) == rows
    assert one.session.counts.mirrored == rows
    one.check()
    verify_mirror(one.session, LAYOUT)
    await one.decode(64, each=16)
    assert await barrier(one.session, stage.copyback) == rows + 64
    one.check()
    verify_mirror(one.session, LAYOUT)


async def test_a_partial_flush_frees_no_ring_row(backend: CpuBackend) -> None:
    """After a barrier at 100 rows, room still counts from row 64, and the partial block is copied again when it is full."""
    stage = Stage(backend)
    one = stage.converse()
    await one.append(100)
    await barrier(one.session, stage.copyback)
    assert one.session.room(100, 220)
    assert not one.session.room(100, 221)
    await one.decode(28)
    await one.session.operations.settle()
    assert one.session.counts.mirrored == 128
    one.check()


@both
async def test_it_waits_for_the_copies(backend: CpuBackend, resident: bool) -> None:
    """With the copyback stream held the barrier is not passed; once released it is."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(70)
    release = hold(stage.copyback.stream)
    passed = asyncio.ensure_future(barrier(one.session, stage.copyback))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not passed.done()
    assert one.session.counts.mirrored < 70
    assert not one.session.room(70, 1), "a step may not write beside a block that is being flushed"
    with pytest.raises(CopybackInFlight):
        one.session.truncate(70, stage.compute)
    release()
    assert await passed == 70
    assert one.session.room(70, 1)


@both
async def test_a_cancelled_barrier_leaves_its_copies_running(backend: CpuBackend, resident: bool) -> None:
    """Cancelled while its copies are held, it raises no count by itself; they complete, room returns, and the next barrier passes."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(100)
    release = hold(stage.copyback.stream)
    passing = asyncio.ensure_future(barrier(one.session, stage.copyback))
    for _ in range(20):
        await asyncio.sleep(0)
    passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert one.session.operations.frozen
    assert not one.session.room(100, 1)
    release()
    await one.session.operations.settle()
    await one.decode(30)
    assert await barrier(one.session, stage.copyback) == 130
    one.check()


@both
async def test_a_failed_copy_fails_it(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, resident: bool) -> None:
    """A copy that fails in the barrier, and a session broken before, raise BarrierFailed naming the reason."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(100)

    def fail(target: object, source: object) -> None:
        raise OSError("the device reported an error")

    monkeypatch.setattr(copyback_module, "copy_bytes", fail)
    with pytest.raises(BarrierFailed, match="the device reported an error"):
        await barrier(one.session, stage.copyback)
    monkeypatch.undo()
    with pytest.raises(BarrierFailed, match="OSError"):
        await barrier(one.session, stage.copyback)
    assert one.session.counts.mirrored == (0 if resident else 64)


@pytest.mark.parametrize(("field", "value"), [(StateField.MIRRORED, 69), (StateField.LOGICAL, 71)])
async def test_a_device_that_disagrees_fails_it(backend: CpuBackend, field: int, value: int) -> None:
    """If the device's own counts differ from the host's, the barrier raises with all the numbers."""
    stage = Stage(backend)
    one = stage.converse()
    await one.append(70)
    await barrier(one.session, stage.copyback)
    one.session.state[field] = value
    with pytest.raises(BarrierFailed, match=rf"70 rows, mirrored 70 on the host and .*{value}"):
        await barrier(one.session, stage.copyback)


async def test_unfollowed_steps_are_a_bug(backend: CpuBackend) -> None:
    """A barrier with a step that was not committed is refused."""
    stage = Stage(backend)
    one = stage.converse()
    await one.submit_step()
    with pytest.raises(AssertionError, match="was not followed"):
        await barrier(one.session, stage.copyback)


async def test_resident_without_host_memory(backend: CpuBackend) -> None:
    """A resident barrier with too few arena blocks raises ArenaFull, counts stay, and it passes once blocks are free."""
    stage = Stage(backend, resident=True, blocks=3)
    one = stage.converse()
    await one.append(200)
    other = stage.arena.take()
    with pytest.raises(ArenaFull):
        await barrier(one.session, stage.copyback)
    assert (one.session.counts.submitted, one.session.counts.mirrored) == (0, 0)
    assert one.session.operations.outstanding == 0
    with pytest.raises(ArenaFull):
        await barrier(one.session, stage.copyback)
    stage.arena.release(other)
    await one.truncate(192)
    assert await barrier(one.session, stage.copyback) == 192
    one.check()
    one.session.close()
    assert stage.arena.statistics().free == 3


async def test_a_long_resident_history_passes_a_narrow_queue(backend: CpuBackend) -> None:
    """A barrier of more blocks than the stream may queue waits for room instead of failing."""
    stage = Stage(backend, resident=True)
    stage.copyback.stream = backend.stream("narrow", queue_max=2)
    one = stage.converse()
    await one.append(640)
    assert await barrier(one.session, stage.copyback) == 640
    one.check()


@both
@pytest.mark.parametrize("part", range(LAYOUT.layers + LAYOUT.key_layers))
async def test_the_comparison_finds_one_wrong_byte(backend: CpuBackend, resident: bool, part: int) -> None:
    """A single byte that differs in any layer's row or key is found and named by position; a byte past the rows is not compared."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(100)
    await barrier(one.session, stage.copyback)
    mirrored = parts_of(one.session.mirror_block(1))[part]
    mirrored[36, 0] ^= 255  # position 100: no row yet
    verify_mirror(one.session, LAYOUT)
    mirrored[35, 1] ^= 255
    with pytest.raises(BarrierFailed, match="position 99, byte 1"):
        verify_mirror(one.session, LAYOUT)


async def test_the_comparison_reaches_keys_of_old_blocks(backend: CpuBackend) -> None:
    """Keys of blocks that left the ring are compared with their pages."""
    stage = Stage(backend)
    one = stage.converse(2000)
    for _ in range(6):
        await one.append(200)
    await barrier(one.session, stage.copyback)
    verify_mirror(one.session, LAYOUT)
    one.session.pages.view(1, 1)[3] ^= 255
    with pytest.raises(BarrierFailed, match="key layer 1, position 1024, byte 3"):
        verify_mirror(one.session, LAYOUT)
