"""The consistency barrier: after it, everything a session is is in RAM, and that was checked.

Knows both placements through `SessionMemory` only. Awaited before export, archive, fork of a partial block and change of placement.

Invariants:
1. A submitted copy is not a completed copy: the barrier returns after the last raise completed, never before.
2. The partial block is copied whole, and frees no ring row.
3. Any failed copy, and any count that differs on host or device, raises.
"""

from typing import Any

import torch

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, BlockLayout, KeyLayout, StateField
from kernels.quantize import stored_keys
from memory.append import blocks_of
from memory.copyback import Copyback
from memory.errors import ArenaFull, BarrierFailed
from memory.session import SessionMemory
from memory.staging import behind_fills, landing
from streams import Event

__all__ = ["barrier", "verify_mirror"]


async def barrier(session: SessionMemory, copyback: Copyback) -> int:
    """Copy what is not in RAM, await every operation of the session on every device, check.

    The caller has stopped the session's steps: all rows are committed and none is submitted before this returned.
    Returns: mirrored rows, equal to the logical rows.
    Raises: BarrierFailed: a copy failed or the counts differ; ArenaFull: resident, no host memory for the copy.
    Cancel: the copies go on; until they are done `room` is False.
    """
    if session.peered is None:
        return await _pass(session, copyback)
    rows = await _pass(session.peered.owner, copyback)
    found = await _pass(session.peered.peer, session.peered.copyback, counts_rows=False)
    if found != rows:
        raise BarrierFailed(f"session {session.session_id}: {rows} rows at the owner, {found} at the peer")
    return rows


async def _pass(session: SessionMemory, copyback: Copyback, *, counts_rows: bool = True) -> int:
    """The barrier of one device. Args: counts_rows: whether LOGICAL is kept there; a peer is told at each step's beginning."""
    counts = session.counts
    assert counts.committed == counts.logical, f"{counts!r}: a step was not followed"
    # A step that was rolled back while in flight may still write beside the rows of the partial block.
    await session.operations.settle()
    try:
        if session.operations.broken is None:
            await _flush(session, copyback)
    except ArenaFull:
        await session.operations.settle()  # the copies that had room: without this the session would stay frozen for no one
        raise
    await session.operations.settle()
    broken = session.operations.broken
    if broken is not None:
        raise BarrierFailed(f"session {session.session_id}: a copy failed ({type(broken).__name__}: {broken})") from broken
    on_device = await _state(session, copyback)
    found = (counts.mirrored, on_device[StateField.MIRRORED], on_device[StateField.LOGICAL] if counts_rows else counts.logical)
    if set(found) != {counts.logical}:
        raise BarrierFailed(
            f"session {session.session_id}: {counts.logical} rows, mirrored {found[0]} on the host and {found[1]} on the device, "
            f"which has {found[2]} rows"
        )
    return counts.mirrored


async def _state(session: SessionMemory, copyback: Copyback) -> list[int]:
    """The session's state, read in order behind its copies."""
    found = landing(session.state)

    def read() -> None:
        behind_fills(session.state.device)
        found.copy_(session.state, non_blocking=True)

    await copyback.stream.submit(read, label="barrier state", session=session.session_id, writes=[found])
    values: list[int] = found.tolist()
    return values


async def _flush(session: SessionMemory, copyback: Copyback) -> None:
    """Submit a copy of every block with committed rows in no batch yet, and one raise behind them all."""
    counts = session.counts
    rows = counts.committed
    if counts.submitted == rows:
        return
    copies: list[Event[Any]] = []
    for block in range(counts.submitted // BLOCK_ROWS, blocks_of(rows)):
        await copyback.stream.wait_room()
        copies.append(copyback.submit_copy(session, block, session.device_block(block), freezes=True))
    await copyback.stream.wait_room()
    copyback.submit_raise(session, rows, copies)


def verify_mirror(session: SessionMemory, layout: BlockLayout) -> None:
    """Compare the mirrored rows and keys that the device still holds with RAM, byte for byte. For tests and requested checks.

    Resident: all of them. Offload: rows and keys of the ring's current blocks, and the keys of every page.
    Raises: BarrierFailed: names the first place that differs. Call it with nothing in flight; it waits for its copies from a device.
    """
    rows = session.counts.mirrored
    first = 0 if session.ring is None else rows // BLOCK_ROWS
    for block in range(first, blocks_of(rows)):
        within = min(BLOCK_ROWS, rows - BLOCK_ROWS * block)
        device, mirror = session.device_block(block).cpu(), session.mirror_block(block)
        for layer in range(layout.layers):
            start, size = layout.row_offset(layer), within * layout.row.row_bytes
            _compare(device[start : start + size], mirror[start : start + size], f"row of layer {layer}", block, layout.row.row_bytes)
        for key_layer in range(layout.key_layers):
            start = layout.key_offset(key_layer)
            here, there = device[start : start + layout.key_layer_bytes], mirror[start : start + layout.key_layer_bytes]
            _compare_keys(here, there, within, f"key {key_layer} in", block, layout.key)
    share = session.pages.store.share
    for block in range(blocks_of(rows)):
        within = min(BLOCK_ROWS, rows - BLOCK_ROWS * block)
        page, place = divmod(BLOCK_ROWS * block, PAGE_KEYS)
        if not share.has(page) or share.pages(page) >= session.pages.pages:
            continue  # another device's, or given up by an idle session
        page = share.pages(page)
        for key_layer in range(layout.key_layers):
            keys = session.pages.view(key_layer, page)[place * layout.key.key_bytes :][: layout.key_layer_bytes].cpu()
            start = layout.key_offset(key_layer)
            mirror = session.mirror_block(block)[start : start + layout.key_layer_bytes]
            _compare_keys(keys, mirror, within, f"page key of key layer {key_layer}", block, layout.key)


def _compare_keys(device: torch.Tensor, mirror: torch.Tensor, within: int, what: str, block: int, key: KeyLayout) -> None:
    """Compare the first `within` keys of two runs."""
    here, there = (stored_keys(run, key)[:within].flatten() for run in (device, mirror))
    _compare(here, there, what, block, key.key_bytes)


def _compare(device: torch.Tensor, mirror: torch.Tensor, what: str, block: int, unit_bytes: int) -> None:
    wrong = (device != mirror).nonzero()
    if wrong.numel():
        byte = int(wrong[0])
        position = BLOCK_ROWS * block + byte // unit_bytes
        raise BarrierFailed(f"{what}, position {position}, byte {byte % unit_bytes}: device {int(device[byte])}, RAM {int(mirror[byte])}")
