"""Chunks of an append: addresses, copies, counts, and every way to fail."""

import pytest
from structlog.testing import capture_logs
from torch import Tensor

from kernels.layout import StateField
from memory import RingOverrun
from memory import copyback as copyback_module
from streams import CpuBackend, DependencyFailed
from tests.memory.memory_world import Stage, hold

both = pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])


@both
@pytest.mark.parametrize("first", [0, 1, 63, 64, 65, 128])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 200])
async def test_a_chunk_of_any_length_lands_anywhere(backend: CpuBackend, resident: bool, first: int, rows: int) -> None:
    """After decoding `first` rows and appending `rows`, every row is where steps read it, and whole blocks are in RAM (offload)."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.decode(first, each=64)
    await one.append(rows)
    counts = one.session.counts
    assert counts.logical == first + rows
    assert counts.mirrored == (0 if resident else 64 * ((first + rows) // 64))
    one.check()
    await one.decode(70, each=35)
    await one.session.operations.settle()
    one.check()


@both
async def test_chunks_follow_chunks(backend: CpuBackend, resident: bool) -> None:
    """Chunks of uneven lengths, each reading all rows before it at the addresses it was given, make one history."""
    stage = Stage(backend, resident=resident)
    one = stage.converse(2000)
    for rows in (7, 64, 1, 200, 65, 128, 1, 199, 500 - 65):
        for part in range(0, rows, 200):
            await one.append(min(200, rows - part))
    one.check()


async def test_unmirrored_blocks_are_read_from_the_ring(backend: CpuBackend) -> None:
    """A chunk begun while decoded blocks are still being copied gets their ring addresses; the tail waits for those copies."""
    stage = Stage(backend)
    one = stage.converse()
    release = hold(stage.copyback.stream)
    await one.decode(250, each=50)
    assert one.session.counts.mirrored == 0
    chunk, written, salts = one.submit_chunk(200)  # ends in block 7, whose ring place still holds block 3
    await written
    for block in range(3):
        assert int(chunk.block_addresses[block]) == one.session.device_block(block).data_ptr()
    finished = chunk.finish(stage.compute, stage.copyback, written)
    one.check_block(one.session.device_block(3), 3, one.salts)
    release()
    await finished
    one.salts += salts
    one.check()


@both
async def test_counts_rise_at_the_end_only(backend: CpuBackend, resident: bool) -> None:
    """Until the finish event completed, counts and state are as before the chunk; when it is done both have moved."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(70)
    before = one.session.counts.snapshot()
    release = hold(stage.compute if resident else stage.copyback.stream)
    chunk, written, salts = one.submit_chunk(100)
    finished = chunk.finish(stage.compute, stage.copyback, written)
    assert one.session.counts.snapshot() == before
    assert int(one.session.state[StateField.LOGICAL]) == 70
    seen = []
    finished.on_done(lambda _: seen.append(one.session.counts.logical))
    release()
    await finished
    assert seen == [170]
    one.salts += salts
    one.check()


@both
async def test_an_abandoned_chunk_leaves_no_trace(backend: CpuBackend, resident: bool) -> None:
    """Counts, blocks, pages and memory are as before, rows before the chunk are intact, and the next chunk writes its own rows."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(100)
    before, held = stage.snapshot(), one.session.statistics()
    chunk, written, _ = one.submit_chunk(200)
    chunk.abandon([written])
    await one.session.operations.settle()
    assert one.session.statistics() == held
    assert stage.snapshot() == before
    one.check()
    await one.append(200)
    one.check()


@both
async def test_a_chunk_whose_work_fails_leaves_no_trace(backend: CpuBackend, resident: bool) -> None:
    """When the chunk's own work failed, finish fails with its cause, counts and memory are as before, and the session goes on."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    await one.append(100)
    before, held = stage.snapshot(), one.session.statistics()

    def fail() -> None:
        raise ValueError("a layer is not finite")

    chunk, written, _ = one.submit_chunk(200, fail)
    with pytest.raises(DependencyFailed) as caught:
        await chunk.finish(stage.compute, stage.copyback, written)
    assert isinstance(caught.value.__cause__, ValueError)
    await one.session.operations.settle()
    assert one.session.operations.broken is None
    assert (one.session.statistics(), stage.snapshot()) == (held, before)
    one.check()
    await one.append(65)
    await one.decode(64)
    await one.session.operations.settle()
    one.check()


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_chunk_whose_copy_fails_breaks_the_session_only(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whichever copy of a chunk fails, counts stay, the session is broken, and another session may append at once."""
    stage = Stage(backend)
    one, two = stage.converse(session_id="one"), stage.converse(session_id="two")
    await one.append(100)
    before = one.session.counts.snapshot()
    real, made = copyback_module.copy_bytes, iter(range(100))

    def copy(target: Tensor, source: Tensor) -> None:
        if next(made) == number:
            raise OSError("the device reported an error")
        real(target, source)

    monkeypatch.setattr(copyback_module, "copy_bytes", copy)
    monkeypatch.setattr("memory.offload.copy_bytes", copy)
    chunk, written, _ = one.submit_chunk(120)  # two whole blocks and a tail
    with capture_logs() as logs, pytest.raises(DependencyFailed):
        await chunk.finish(stage.compute, stage.copyback, written)
    assert [(entry["event"], entry["session_id"], entry["rows"]) for entry in logs] == [("copyback.failed", "one", 220)]
    assert one.session.counts.snapshot() == before
    assert isinstance(one.session.operations.broken, OSError)
    await two.append(200)
    two.check()
    one.session.close()
    two.session.close()
    stage.check()
    assert stage.arena.statistics().free == 64


async def test_a_chunk_does_not_jump_over_a_failed_copy(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a decoded block's copy fails under an open chunk, the chunk raises nothing: mirrored stays before the lost block."""
    stage = Stage(backend)
    one = stage.converse()
    real, made = copyback_module.copy_bytes, iter(range(100))

    def copy(target: Tensor, source: Tensor) -> None:
        if next(made) == 0:
            raise OSError("the device reported an error")
        real(target, source)

    monkeypatch.setattr(copyback_module, "copy_bytes", copy)
    release = hold(stage.copyback.stream)
    await one.decode(64)
    chunk, written, _ = one.submit_chunk(128)
    await written
    finished = chunk.finish(stage.compute, stage.copyback, written)
    release()
    with pytest.raises(DependencyFailed):
        await finished
    counts = one.session.counts
    assert (counts.logical, counts.submitted, counts.mirrored) == (64, 64, 0)
    assert one.session.state[: StateField.MIRRORED + 1].tolist() == [64, 0]
    assert isinstance(one.session.operations.broken, OSError)


async def test_the_append_ring_is_not_reused_under_a_copy(backend: CpuBackend) -> None:
    """A second session's chunk, submitted while the first one's copies are held, does not write before they are done."""
    stage = Stage(backend)
    one, two = stage.converse(session_id="one"), stage.converse(session_id="two")
    release = hold(stage.copyback.stream)
    chunk, written, salts = one.submit_chunk(200)
    finished = chunk.finish(stage.compute, stage.copyback, written)
    await written
    other, other_written, other_salts = two.submit_chunk(200)
    assert not other_written.done()
    release()
    await finished
    one.salts += salts
    await other.finish(stage.compute, stage.copyback, other_written)
    two.salts += other_salts
    one.check()
    two.check()


async def test_a_stage_appends_one_chunk_at_a_time(backend: CpuBackend) -> None:
    """While one session's chunk is open another's is refused and changes nothing; so is a chunk longer than the ring."""
    stage = Stage(backend, chunk_rows=100)
    one, two = stage.converse(session_id="one"), stage.converse(session_id="two")
    chunk, written, _ = one.submit_chunk(100)
    before = two.session.statistics()
    with pytest.raises(RingOverrun, match="session one"):
        two.session.begin_append(1, stage.compute)
    assert two.session.statistics() == before
    chunk.abandon([written])
    with pytest.raises(RingOverrun, match="1 to 100"):
        two.session.begin_append(101, stage.compute)
    await two.append(100)
    two.check()


@both
async def test_a_chunk_ends_once(backend: CpuBackend, resident: bool) -> None:
    """A chunk that was abandoned or finished can be neither again, and a session has one chunk open at most."""
    stage = Stage(backend, resident=resident)
    one = stage.converse()
    chunk, written, _ = one.submit_chunk(10)
    with pytest.raises(AssertionError, match="open chunk"):
        one.session.begin_append(1, stage.compute)
    with pytest.raises(AssertionError, match="open chunk"):
        one.session.truncate(0, stage.compute)
    with pytest.raises(AssertionError, match="open chunk"):
        one.session.advance(1)
    chunk.abandon([written])
    with pytest.raises(AssertionError, match="no open chunk"):
        chunk.abandon([written])


@both
async def test_a_chunk_needs_followed_steps(backend: CpuBackend, resident: bool) -> None:
    """With a step not yet committed, or past the tokens a session may hold, a chunk is refused before anything is taken."""
    stage = Stage(backend, resident=resident)
    one = stage.converse(100)
    before = stage.snapshot()
    with pytest.raises(AssertionError, match="to row 101 in a session of 100"):
        one.session.begin_append(101, stage.compute)
    assert stage.snapshot() == before
    event = one.submit_step()
    with pytest.raises(AssertionError, match="a step is in flight"):
        one.session.begin_append(1, stage.compute)
    await event
