"""A session read out behind its barrier and loaded into a fresh one, of either placement: every byte, every count, and it goes on."""

import pytest
import torch

from kernels.layout import BLOCK_ROWS, StateField
from memory import BarrierFailed, DoesNotFit, verify_mirror
from memory.append import blocks_of
from memory.image import Image, Loading, read_out
from streams import CpuBackend
from tests.memory.device_world import DeviceLife
from tests.memory.memory_world import LAYOUT, Conversation, Stage

LENGTHS = [1, 63, 64, 65, 128, 200, 257, 1023, 1024, 1025]
ways = pytest.mark.parametrize(("out", "into"), [(a, b) for a in (False, True) for b in (False, True)])


async def load(source: Conversation, image: Image, stage: Stage, *, window: int = 4, tokens_max: int = 2000) -> Conversation:
    """A fresh session of `stage` with the bytes of `source`, placed in windows from the last block to the first."""
    copy = Conversation(stage, "copy", tokens_max)
    loading = Loading(copy.session, LAYOUT, image.rows, tables=stage.compute, copies=stage.copyback.stream, window=window)
    blocks = blocks_of(image.rows)
    for first in reversed(range(0, blocks, window)):
        stop = min(first + window, blocks)
        for block in range(first, stop):
            rows = min(BLOCK_ROWS, image.rows - BLOCK_ROWS * block)
            target = loading.target(block)
            target.fill_(0xEE)  # what lies behind the rows is nobody's
            for layer in range(LAYOUT.layers):
                at, size = LAYOUT.row_offset(layer), rows * LAYOUT.row.row_bytes
                target[at : at + size] = source.session.mirror_block(block)[at : at + size]
            for layer in range(LAYOUT.key_layers):
                at, size = LAYOUT.key_offset(layer), rows * LAYOUT.key.key_bytes
                target[at : at + size] = source.session.mirror_block(block)[at : at + size]
        assert copy.session.counts.logical == 0, "rows are counted before they are placed"
        assert int(copy.session.state[StateField.LOGICAL]) == 0
        await loading.place(first, stop)
    await loading.finish(image.hidden, image.hidden_from)
    copy.salts = list(source.salts)
    return copy


@ways
@pytest.mark.parametrize("rows", LENGTHS)
async def test_a_loaded_session_is_the_one_that_was_read_out(backend: CpuBackend, out: bool, into: bool, rows: int) -> None:
    """Every row and key is where a session of the placement has it, and both sessions go on from there."""
    source_stage, stage = Stage(backend, resident=out), Stage(backend, resident=into)
    source = source_stage.converse(2000)
    await source.append(min(rows, 190))
    await source.decode(rows - len(source.salts), each=16)
    source.session.hidden.copy_(torch.arange(source.session.hidden.numel()).view(source.session.hidden.shape))
    image = await read_out(source.session, source_stage.copyback)
    assert image.rows == rows
    copy = await load(source, image, stage)
    copy.check()
    verify_mirror(copy.session, LAYOUT)
    assert torch.equal(copy.session.hidden, source.session.hidden)
    assert copy.session.counts.hidden_from == source.session.counts.hidden_from == max(0, rows - 16)
    assert copy.session.counts.mirrored == (0 if into else rows)
    for one, where in ((source, source_stage), (copy, stage)):
        await one.decode(70, each=8)
        await one.append(65)
        again = await read_out(one.session, where.copyback)
        assert again.rows == rows + 135
        one.check()
        verify_mirror(one.session, LAYOUT)
        one.session.close()
        where.check()


@pytest.mark.parametrize("into", [False, True], ids=["offload", "resident"])
async def test_a_load_given_up_leaves_nothing(backend: CpuBackend, into: bool) -> None:
    """Closed half loaded, a session leaves ledger, arena and pool as they were."""
    source_stage, stage = Stage(backend), Stage(backend, resident=into)
    source = source_stage.converse()
    await source.append(200)
    image = await read_out(source.session, source_stage.copyback)
    before = stage.snapshot()
    session = stage.placement.open("copy", 300)
    loading = Loading(session, LAYOUT, image.rows, tables=stage.compute, copies=stage.copyback.stream, window=2)
    for block in range(2):
        loading.target(block).copy_(source.session.mirror_block(block))
    await loading.place(0, 2)
    session.close()
    await session.operations.settle()
    assert stage.snapshot() == before


async def test_what_cannot_be_mirrored_is_not_read_out(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails in the barrier is the end of reading out."""
    stage = Stage(backend)
    one = stage.converse()
    await one.decode(70, each=10)
    await one.session.operations.settle()

    def fails(*_: object) -> None:
        raise OSError("the copy failed")

    monkeypatch.setattr("memory.copyback.copy_bytes", fails)
    with pytest.raises(BarrierFailed, match="the copy failed"):
        await read_out(one.session, stage.copyback)


async def test_a_resident_session_without_room_in_ram_is_not_read_out(backend: CpuBackend) -> None:
    """Where RAM lacks blocks for the copy, reading out says which bytes are missing, and the session goes on."""
    stage = Stage(backend, resident=True, blocks=2)
    one = stage.converse()
    await one.decode(150, each=30)
    with pytest.raises(DoesNotFit, match="host memory missing"):
        await read_out(one.session, stage.copyback)
    await one.decode(10)
    assert len(one.salts) == one.session.counts.logical == 160


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("resident", [False, True], ids=["offload", "resident"])
@pytest.mark.parametrize("seed", range(3))
async def test_on_any_device_what_was_loaded_goes_on(device: str, resident: bool, seed: int) -> None:
    """Read out in the middle of a random life and loaded into another session, which lives on: every read is what was written."""
    life = DeviceLife(torch.device(device, 0) if device == "cuda" else torch.device(device), resident=resident, tokens_max=700, seed=seed)
    await life.append(90)
    await life.play(10, 500)
    image = await read_out(life.session, life.copyback)
    assert image.rows == len(life.truth)
    copy, blocks = life.placement.open("copy", 700), blocks_of(image.rows)
    loading = Loading(copy, LAYOUT, image.rows, tables=life.compute, copies=life.copyback.stream, window=3)
    for first in range(0, blocks, 3):
        stop = min(first + 3, blocks)
        for block in range(first, stop):
            loading.target(block).copy_(life.session.mirror_block(block))
        await loading.place(first, stop)
    await loading.finish(image.hidden, image.hidden_from)
    assert torch.equal(copy.hidden.cpu(), life.session.hidden.cpu())
    life.session.close()
    life.session = copy
    await life.play(10, 700)
    await life.close()
