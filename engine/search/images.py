"""Scenarios of sessions that are read out and loaded: what leaves has been mirrored, and what comes in is what left.

The bytes are taken and put by the host alone, between operations, as threads of an archive do; files are outside a virtual run.
"""

import random

import torch
from torch import Tensor

from engine.search.clients import rounds
from engine.search.ground import LAYOUT, Ground, Life, Written
from engine.search.scenario import Scenario, Scene
from engine.search.watch import same
from kernels.layout import BLOCK_ROWS
from memory.append import blocks_of
from memory.barrier import barrier, verify_mirror
from memory.errors import BarrierFailed
from memory.image import Loading, read_out
from streams import Fault, StreamError

__all__ = ["IMAGES"]

_TOKENS_MAX = 480


async def _live(life: Life) -> None:
    """Some turns, the last one of which may have been taken back a moment ago."""
    rng = life.rng
    for _ in range(rng.choice((1, 3))):
        await life.append(rng.choice((1, 63, 64, 65, 130)))
        await life.decode(rng.choice((0, 1, 5, 33)), each=rng.choice((2, 4, 16)))
        if rng.random() < 0.4 and life.session.room(len(life.salts), 4):
            life.submit_step(4)
            life.roll_back(life.session.counts.committed)
        if rng.random() < 0.3:
            await life.session.operations.settle()
            life.roll_back(rng.randrange(1, len(life.salts) + 1))


async def _taken(life: Life) -> list[Tensor]:
    """The blocks as an export takes them, each row and key compared with what was written."""
    image = await read_out(life.session, life.ground.copyback)
    assert image.rows == len(life.salts), f"{image.rows} rows read out of {len(life.salts)}"
    written = Written()
    written.salts = tuple(life.salts)
    taken = []
    for number in range(blocks_of(image.rows)):
        await rounds(life.rng.randrange(3))
        block = life.session.mirror_block(number).clone()
        positions = torch.arange(BLOCK_ROWS * number, min(BLOCK_ROWS * (number + 1), image.rows))
        for layer in range(LAYOUT.layers):
            found = block[LAYOUT.row_offset(layer) :][: LAYOUT.layer_bytes].view(BLOCK_ROWS, -1)[: positions.numel()]
            same(found, written.rows(layer, positions), positions, f"exported rows of layer {layer}")
        for layer in range(LAYOUT.key_layers):
            found = block[LAYOUT.key_offset(layer) :][: LAYOUT.key_layer_bytes].view(BLOCK_ROWS, -1)[: positions.numel()]
            same(found, written.keys(layer, positions), positions, f"exported keys of key layer {layer}")
        taken.append(block)
    return taken


async def _load(life: Life, source: Life, blocks: list[Tensor]) -> None:
    """Fill a fresh session with another one's blocks, window by window."""
    ground, rows, window = life.ground, len(source.salts), life.rng.choice((1, 2, 4))
    loading = Loading(life.session, LAYOUT, rows, tables=ground.compute, copies=ground.copyback.stream, window=window)
    life.written.salts = tuple(source.salts)
    for first in range(0, len(blocks), window):
        stop = min(first + window, len(blocks))
        for number in range(first, stop):
            loading.target(number).copy_(blocks[number])
        await loading.place(first, stop)
    assert life.session.counts.logical == 0, "rows are counted before they are all there"
    await loading.finish(torch.zeros_like(life.session.hidden), rows)
    life.salts = list(source.salts)


async def image(scene: Scene) -> None:
    """A session is read out while another one decodes, and is loaded beside itself or where rows are held otherwise; all of them go on."""
    rng = scene.rng
    ground = Ground(scene, resident=rng.random() < 0.4, hot_rows=rng.choice((4, 8, 24)))
    other = ground if rng.random() < 0.5 else Ground(scene, resident=rng.random() < 0.5)
    one, company = Life(ground, "one", _TOKENS_MAX), Life(ground, "company", _TOKENS_MAX)
    await _live(one)
    await company.decode_ahead(rng.choice((1, 30)), each=rng.choice((2, 16)))
    blocks = await _taken(one)
    copy = Life(other, "copy", _TOKENS_MAX)
    await _load(copy, one, blocks)
    for life in (one, copy, company):
        await life.decode(rng.choice((1, 40)), each=rng.choice((4, 16)))
        assert await barrier(life.session, life.ground.copyback) == len(life.salts)
        await life.session.operations.settle()
        life.check()
        verify_mirror(life.session, LAYOUT)
        life.session.close()


async def lost_image(scene: Scene) -> None:
    """An operation fails on the way: either all that leaves was mirrored, or nothing leaves; what was half loaded is let go of."""
    ground = Ground(scene, resident=scene.rng.random() < 0.3)
    one = Life(ground, "one", _TOKENS_MAX)
    copy: Life | None = None
    try:
        await _live(one)
        blocks = await _taken(one)
        copy = Life(ground, "copy", _TOKENS_MAX)
        await _load(copy, one, blocks)
        await copy.session.operations.settle()
        copy.check()
    except (StreamError, BarrierFailed):
        pass
    for life in (one, copy):
        if life is not None:
            await life.session.operations.settle()
            life.written.salts = ()  # which rows it has is not known any more
            life.session.close()


def _any_failure(rng: random.Random) -> tuple[Fault, ...]:
    labels = ("copyback", "mirrored", "barrier state", "image*", "image load", "append*", "tables")
    return (Fault(rng.choice(labels), rng.randrange(5), rng.choice(("fail", "fail", "delay"))),)


IMAGES = (Scenario("image", image), Scenario("image with failures", lost_image, _any_failure, weight=3))
