"""What sessions hold, by the ledger, the device's allocator, the driver and the kernel: bytes, and blocks that nobody shares.

Facts at one moment, for the JSON of a measurement. Call it while the sessions stand still.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.protocol import SessionId
from memory.host import available_bytes

__all__ = ["BlockProof", "Parts", "blocks_of_sessions", "device_bytes", "facts", "parts_of"]


@dataclass(frozen=True, slots=True)
class BlockProof:
    """Blocks of some sessions. `blocks` by session, `held` all of them, `distinct` without repetition, `shared` held by more than one."""

    blocks: tuple[int, ...]
    held: int
    distinct: int
    shared: int

    @property
    def apart(self) -> bool:
        """Whether no session holds a block of another one's."""
        return self.held == self.distinct and self.shared == 0


@dataclass(frozen=True, slots=True)
class Parts:
    """Device bytes of one session by what they are for. `rows`: packed rows in hot slots or, resident, in blocks."""

    rows: int
    maps: int  # slot maps and pins
    keys: int  # index-key pages
    ring: int
    tables: int  # block and page tables, state, hidden states


def blocks_of_sessions(engine: Engine, sessions: Sequence[SessionId]) -> BlockProof:
    """Whose blocks are whose: in RAM, or resident on the device."""
    counts, ids, shared = [], set(), 0
    for session in sessions:
        memory = engine.memories[session]
        allotment, store = memory.history.allotment, memory.history.store
        counts.append(len(allotment.ids))
        ids.update(allotment.ids)
        shared += sum(store.references(block) != 1 for block in allotment.ids)
    return BlockProof(tuple(counts), sum(counts), len(ids), shared)


def parts_of(engine: Engine, session: SessionId) -> Parts:
    """One session's device bytes."""
    memory, layout = engine.memories[session], engine.stage.layout
    held = memory.statistics()
    resident = 0 if memory.ring is not None else held.blocks * layout.block_bytes
    tensors = (memory.history.table, memory.pages.table, memory.state, memory.hidden)
    return Parts(
        rows=resident + sum(cache.row_bytes for cache in held.hot), maps=sum(cache.map_bytes for cache in held.hot),
        keys=held.pages * layout.key_layers * layout.key.page_bytes, ring=0 if memory.ring is None else memory.ring.buffer.numel(),
        tables=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )  # fmt: skip


def device_bytes(engine: Engine) -> dict[str, int]:
    """Allocated bytes of long-lived device buffers, by owner."""
    return {owner: holding.allocated_bytes for owner, holding in engine.stage.ledger.statistics()["device"].items()}


def facts(engine: Engine) -> dict[str, Any]:
    """Bytes of everything: the ledger by owner, arena and pool; on a device what its allocator and its driver count; the process in RAM."""
    stage = engine.stage
    ledger = {
        tier: {owner: asdict(holding) for owner, holding in owners.items()} for tier, owners in stage.ledger.statistics().items()
    }  # fmt: skip
    held = stage.placement.statistics()
    found: dict[str, Any] = {
        "ledger": ledger, "arena": asdict(held.arena), "pool": asdict(held.pool),
        "host": {"process": _process(), "available": _available()},
    }  # fmt: skip
    if stage.peer is not None:
        mirror = stage.peer.arena
        found["peer"] = {
            "arena": None if mirror is None else asdict(mirror.statistics()), "pool": asdict(stage.peer.pool.statistics())
        } | _device(stage.peer.device)  # fmt: skip
    return found | _device(stage.device)


def _device(device: torch.device) -> dict[str, Any]:
    """What a device's allocator and its driver count, as "device"; nothing for a CPU."""
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    counted = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    return {"device": {**counted, "driver_used": total - free, "driver_total": total}}


def _available() -> int | None:
    try:
        return available_bytes()
    except OSError:
        return None


def _process() -> dict[str, int]:
    """The kernel's own figures of this process, bytes: what is in RAM, and of it what nobody may move. Empty where it gives none."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines())
    wanted = {"VmRSS:": "resident", "VmHWM:": "resident_most", "VmLck:": "locked", "VmPin:": "pinned"}
    return {wanted[words[0]]: 1024 * int(words[1]) for words in lines if words and words[0] in wanted}
