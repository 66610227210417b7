"""A stage: consecutive layers on one device, with the memory and the streams they use.

One stage is a list of one; the peer is absent. Layer ids here are local; `first_layer` is where the stage starts in the model.
Holds weights, layout, streams, placement. Knows no sessions by name and no requests.
"""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import NotAdmitted
from engine.model.glm import Model
from kernels.layout import BLOCK_ROWS, BlockLayout, TableLayout
from memory.arena import Arena
from memory.copyback import Copyback
from memory.host import available_bytes
from memory.ledger import Ledger
from memory.placement import Offload, Placement, Resident
from memory.pool import Pool
from memory.row import key_layout, row_layout
from streams import Backend, Stream

__all__ = ["Stage", "StageStreams", "open_stage"]


@dataclass(frozen=True, slots=True)
class StageStreams:
    """The streams of one device."""

    compute: Stream
    selection: Stream
    prefetch: Stream
    copyback: Stream

    @staticmethod
    def of(backend: Backend, name: str) -> "StageStreams":
        return StageStreams(*(backend.stream(f"{name}.{part}") for part in ("compute", "selection", "prefetch", "copyback")))


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything the steps of one stage touch."""

    model: Model
    first_layer: int  # global id of local layer 0
    layout: BlockLayout
    table_layout: TableLayout
    main_groups: tuple[tuple[int, ...], ...]  # selection groups of the main layers, local ids
    streams: StageStreams
    arena: Arena
    pool: Pool
    ledger: Ledger
    placement: Placement
    copyback: Copyback

    @property
    def mtp_layer(self) -> int:
        """Local layer of the MTP block's rows: the last, when the block is loaded."""
        assert self.model.mtp is not None, "no MTP block is loaded"
        return self.layout.layers - 1


def open_stage(model: Model, config: EngineConfig, backend: Backend, *, name: str = "stage0", context_max: int) -> Stage:
    """Lay out and allocate one stage.

    Raises: NotAdmitted: the host cannot give the asked memory; the message has the numbers.
    """
    facts = model.config
    keys = config.index_key_format
    if keys == "auto":
        keys = "f32" if config.row_format == "f32" else "bf16"
    groups = model.groups
    main_groups = groups if model.mtp is None else groups[:-1]
    layout = BlockLayout(row_layout(config.row_format, facts.latent, facts.rope), key_layout(keys, facts.index_width), groups)
    ledger = Ledger()
    host_bytes = config.host_memory_bytes or available_bytes() // 2
    least = layout.block_bytes
    if host_bytes < least:
        raise NotAdmitted(f"host memory of {host_bytes} bytes holds no block of {least} bytes; raise --host-memory")
    arena = Arena(layout, host_bytes, ledger)
    pool = Pool(torch.device("cpu"), None, ledger)
    streams = StageStreams.of(backend, name)
    copyback = Copyback(streams.copyback)
    shared = {
        "layout": layout, "arena": arena, "pool": pool, "hidden": facts.hidden,
        "append_rows": config.append_chunk_rows, "context_max": context_max,
    }  # fmt: skip
    if config.placement == "offload":
        hot_rows = max(config.hot_rows or 32_768, facts.top_k)
        placement: Placement = Offload(hot_rows=min(hot_rows, -(-context_max // BLOCK_ROWS) * BLOCK_ROWS), **shared)
    else:
        placement = Resident(**shared)
    return Stage(
        model, model.first_layer, layout, TableLayout(len(groups)), main_groups, streams, arena, pool, ledger, placement, copyback
    )  # fmt: skip
