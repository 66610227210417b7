"""Copies of blocks to RAM, and the counts they raise."""

import asyncio

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from kernels.layout import StateField
from memory import CopybackInFlight
from memory import copyback as copyback_module
from streams import CpuBackend, DependencyFailed
from tests.memory.memory_world import Stage, hold

pytestmark = pytest.mark.both_loops


def break_copy(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the copy of that number (from 0) fail, before it wrote anything."""
    real, made = copyback_module.copy_bytes, iter(range(1_000_000))

    def copy(target: Tensor, source: Tensor) -> None:
        if next(made) == number:
            raise OSError("the device reported an error")
        real(target, source)

    monkeypatch.setattr(copyback_module, "copy_bytes", copy)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 129, 300])
async def test_whole_committed_blocks_are_mirrored(backend: CpuBackend, rows: int) -> None:
    """After decoding n rows and waiting, 64 * (n // 64) rows are in RAM, byte for byte, and the rest is in the ring."""
    stage = Stage(backend)
    one = stage.converse()
    await one.decode(rows, each=7)
    await one.session.operations.settle()
    assert one.session.counts.mirrored == one.session.counts.submitted == 64 * (rows // 64)
    one.check()


async def test_submitted_is_not_completed(backend: CpuBackend) -> None:
    """While the copyback stream is held, submitted rises and mirrored, on host and device, does not."""
    stage = Stage(backend)
    one = stage.converse()
    release = hold(stage.copyback.stream)
    await one.decode(130)
    counts = one.session.counts
    assert (counts.committed, counts.submitted, counts.mirrored) == (130, 128, 0)
    assert int(one.session.state[StateField.MIRRORED]) == 0
    assert not one.session.mirror_block(0).any()
    release()
    await one.session.operations.settle()
    assert counts.mirrored == 128
    one.check()


async def test_the_host_never_counts_rows_that_the_device_does_not(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the copy succeeded but the device's write of MIRRORED failed, the host's count stays and the session is broken."""
    stage = Stage(backend)
    one = stage.converse()
    await one.decode(63)

    def fail(state: Tensor, field: int, value: int) -> None:
        assert (field, value) == (StateField.MIRRORED, 64)
        raise OSError("no write")

    monkeypatch.setattr(copyback_module, "write_state", fail)
    await one.decode(1)
    await one.session.operations.settle()
    one.check_block(one.session.mirror_block(0), 0, one.salts)
    assert one.session.counts.mirrored == 0
    assert int(one.session.state[StateField.MIRRORED]) == 0
    assert isinstance(one.session.operations.broken, OSError)


async def test_uncommitted_rows_are_not_copied(backend: CpuBackend) -> None:
    """Steps submitted but not followed submit no copy, however full their block is."""
    stage = Stage(backend)
    one = stage.converse()
    await one.decode(60)
    event = one.submit_step(10)
    await event
    await one.session.operations.settle()
    assert one.session.counts.submitted == 0
    assert not one.session.mirror_block(0).any()
    one.session.commit(3, stage.copyback, event)
    assert one.session.counts.submitted == 0
    one.session.commit(7, stage.copyback, event)
    await one.session.operations.settle()
    assert one.session.counts.mirrored == 64
    one.check()


async def test_rolled_back_rows_never_reach_ram(backend: CpuBackend) -> None:
    """Rows of a step that is rolled back while it is in flight are in no block of RAM; the rows that replace them are."""
    stage = Stage(backend)
    one = stage.converse()
    for rejected in (1, 3, 5):
        await one.decode(59)
        held = len(one.salts)
        one.submit_step(rejected + 5)  # past the end of the block
        await one.truncate(held)
    await one.decode(64 * 4 - len(one.salts))
    await one.session.operations.settle()
    assert one.session.counts.mirrored == 256
    one.check()


async def test_a_failed_copy_breaks_its_session_and_raises_nothing(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block whose copy failed and all later ones stay uncounted on host and device; the reason is kept and logged; others go on."""
    stage = Stage(backend)
    one, two = stage.converse(session_id="one"), stage.converse(session_id="two")
    await one.decode(64)
    await one.session.operations.settle()
    break_copy(monkeypatch, 0)
    with capture_logs() as logs:
        await one.decode(128)
        await one.session.operations.settle()
    counts = one.session.counts
    assert (counts.submitted, counts.mirrored) == (192, 64)
    assert int(one.session.state[StateField.MIRRORED]) == 64
    assert isinstance(one.session.operations.broken, OSError)
    failed = [entry for entry in logs if entry["event"] == "copyback.failed"]
    assert [(entry["session_id"], entry["rows"]) for entry in failed] == [("one", 128), ("one", 192)]
    assert "the device reported an error" in failed[0]["error"]
    await two.decode(128)
    await two.session.operations.settle()
    assert two.session.operations.broken is None
    two.check()
    one.session.close()
    two.session.close()
    stage.check()


async def test_the_raise_fails_with_the_copy(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of a block whose copy failed fails with DependencyFailed from the copy's own error."""
    stage = Stage(backend)
    one = stage.converse()
    await one.decode(63)
    break_copy(monkeypatch, 0)
    step = one.submit_step()
    await step
    one.session.counts.commit(1)
    with pytest.raises(DependencyFailed) as caught:
        await stage.copyback.submit_block(one.session, 0, [step])
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_cut_into_a_copy_in_flight_is_refused(backend: CpuBackend) -> None:
    """Below submitted rows truncation raises and changes nothing until the copies are done; a rollback above them passes at once."""
    stage = Stage(backend)
    one = stage.converse()
    release = hold(stage.copyback.stream)
    await one.decode(100)
    before = one.session.counts.snapshot()
    for rows in (0, 1, 63):
        with pytest.raises(CopybackInFlight, match="64 rows submitted, 0 mirrored"):
            one.session.truncate(rows, stage.compute)
    assert one.session.counts.snapshot() == before
    await one.truncate(64)
    assert one.session.counts.epoch == 0
    release()
    await one.session.operations.settle()
    one.check()
    await one.truncate(63)
    assert one.session.counts.epoch == 1
    await one.decode(70)
    await one.session.operations.settle()
    one.check()


async def test_a_cancelled_wait_leaves_the_copy(backend: CpuBackend) -> None:
    """Cancelling whoever awaits a copyback changes no count; the copy completes and raises them."""
    stage = Stage(backend)
    one = stage.converse()
    await one.decode(63)
    release = hold(stage.copyback.stream)
    await one.decode(1)
    wait = asyncio.ensure_future(one.session.operations.settle())
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert one.session.counts.mirrored == 0
    release()
    await one.session.operations.settle()
    assert one.session.counts.mirrored == 64
    one.check()


async def test_closing_waits_for_copies_in_flight(backend: CpuBackend) -> None:
    """A session closed with a copy in flight keeps block and buffers until it completed, then gives back everything."""
    stage = Stage(backend)
    before = stage.snapshot()
    one = stage.converse()
    release = hold(stage.copyback.stream)
    await one.decode(64)
    state = one.session.state
    one.session.close()
    assert stage.arena.statistics().free == 63
    assert stage.snapshot() != before
    release()
    await one.session.operations.settle()
    assert stage.snapshot() == before
    assert torch.equal(state[:2], torch.tensor([64, 64]))
    stage.check()
