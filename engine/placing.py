"""What sessions get of each device of a stage: budgets, placements and how rows are read there. Knows no steps."""

from collections.abc import Callable

import torch

from engine.config import HOT_ROWS, EngineConfig
from engine.model.config import ModelConfig
from kernels.layout import WHOLE, BlockLayout, PageShare, TableLayout
from memory.arena import Arena
from memory.history import BlockStore
from memory.placement import Offload, Resident
from memory.pool import Pool
from memory.rounds import OffloadRounds, ResidentRounds, Rounds

__all__ = ["activations_bytes", "device_budget", "placement_of", "rounds_of"]

_ACTIVATIONS_SHARE = 0.06  # of a device's memory, kept from sessions: activations, scratch, graphs
_ACTIVATIONS_BYTES = 1 << 30  # and at least this


def device_budget(device: torch.device) -> int | None:
    """Bytes that sessions may take of the device's memory: what the weights left, less a share for activations. None: no limit."""
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - activations_bytes(total))


def activations_bytes(device_bytes: int) -> int:
    """What of a device's `device_bytes` is kept from sessions."""
    return max(_ACTIVATIONS_BYTES, int(_ACTIVATIONS_SHARE * device_bytes))


def placement_of(
    config: EngineConfig, facts: ModelConfig, layout: BlockLayout, arena: Arena, pool: Pool, share: PageShare = WHOLE,
    store_of: Callable[[], BlockStore] | None = None,
) -> Offload | Resident:  # fmt: skip
    """A device's placement of sessions. Args: share, store_of: see `Offload`; with a `store_of` the mirror is another device's."""
    if config.placement == "resident":
        return Resident(layout, arena, pool, hidden=facts.hidden, share=share, mirrors=store_of is None)
    return Offload(
        layout, arena, pool, hidden=facts.hidden, hot_rows=config.hot_rows or HOT_ROWS, picks=facts.top_k,
        chunk_rows=config.append_chunk_rows, elastic=config.hot_rows == 0, share=share, store_of=store_of,
    )  # fmt: skip


def rounds_of(config: EngineConfig, layout: BlockLayout, table_layout: TableLayout) -> Rounds:
    """How steps find and read selected rows."""
    rounds = OffloadRounds if config.placement == "offload" else ResidentRounds
    return rounds(layout, table_layout)
