"""A stage: consecutive layers on one device, with the memory and the streams they use.

One stage is a list of one; the peer is absent. Layer ids here are local; `first_layer` is where the stage starts in the model.
Holds weights, layout, streams, placement. Knows no sessions by name and no requests.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from engine.config import HOT_ROWS, EngineConfig
from engine.errors import BadSetting, NeverFits, NotAdmitted
from engine.forced import ForcedAcceptance, ForcedSelection
from engine.model.glm import Model
from engine.stage_calls import Follower
from kernels.layout import BlockLayout, TableLayout
from kernels.place import BULK_ROWS
from memory.arena import Arena
from memory.copyback import Copyback
from memory.errors import ArenaFull, DoesNotFit, RegistrationRefused
from memory.host import available_bytes
from memory.ledger import Ledger
from memory.placement import Offload, Placement, Resident
from memory.pool import Pool
from memory.registration import registration_for
from memory.rounds import OffloadRounds, ResidentRounds, Rounds
from memory.row import key_format, key_layout, row_layout
from streams import Backend, Event, Stream
from streams.capture import ClosureRecorder, GraphRecorder, Recorder

_ACTIVATIONS_SHARE = 0.06  # of a device's memory, kept from sessions: activations, scratch, graphs
_ACTIVATIONS_BYTES = 1 << 30  # and at least this

ArenaOf: TypeAlias = Callable[[BlockLayout, int, Ledger], Arena]
PoolOf: TypeAlias = Callable[[torch.device, int | None, Ledger], Pool]

__all__ = ["Stage", "StageStreams", "activations_bytes", "open_stage"]


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

    def fences(self) -> tuple[Event[None], ...]:
        """Events of the streams beside compute, done once everything submitted to those so far is, whether it failed or not.

        Compute alone says when a step that ended well is over. What is left of a failed one may still plan or fill slots there.
        """
        return tuple(stream.submit(_nothing, label="fence") for stream in (self.selection, self.prefetch))

    async def idle(self) -> None:
        """Wait until everything submitted so far is done."""
        for stream in (self.compute, self.selection, self.prefetch, self.copyback):
            await stream.idle()


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything the steps of one stage touch."""

    model: Model
    first_layer: int  # global id of local layer 0
    layout: BlockLayout
    table_layout: TableLayout
    main_groups: tuple[tuple[int, ...], ...]  # selection groups of the main layers, local ids
    backend: Backend  # whose streams these are
    streams: StageStreams
    arena: Arena
    pool: Pool
    device: torch.device
    ledger: Ledger
    placement: Placement
    rounds: Rounds
    copyback: Copyback
    append_rows: int  # rows of the longest append chunk
    recorder: Recorder | None = None  # makes steps replays; None: every step is issued anew
    forced: ForcedSelection | None = None  # for measuring: what decode steps select instead
    forced_acceptance: ForcedAcceptance | None = None  # for measuring: which drafts are accepted instead
    before: tuple[Follower, ...] = ()  # of the stage that samples: those whose states it goes on from, in order of layers

    def _missing(self, tokens_max: int) -> DoesNotFit | None:
        """What all memory there is, with nobody else in it, lacks for a session of `tokens_max` tokens."""
        needs, has = self.placement.needs(tokens_max), self.placement.statistics()
        host_missing = max(0, needs.host_bytes - has.arena.blocks * has.arena.block_bytes)
        budget = has.pool.budget_bytes
        device_missing = 0 if budget is None else max(0, needs.device_bytes + has.append_ring_bytes - budget)
        if not host_missing and not device_missing:
            return None
        return DoesNotFit(host_missing_bytes=host_missing, device_missing_bytes=device_missing)

    def tokens_fit(self, tokens_max: int) -> int:
        """The most tokens, at most `tokens_max`, of a session that all memory there is can hold with nobody else in it."""
        if self._missing(tokens_max) is None:
            return tokens_max
        return bisect.bisect_left(range(1, tokens_max), True, key=lambda tokens: self._missing(tokens) is not None)

    def check_size(self, tokens_max: int) -> None:
        """Raise NeverFits if all memory there is, with nobody else in it, is too little for a session of `tokens_max` tokens."""
        missing = self._missing(tokens_max)
        if missing is not None:
            raise NeverFits(f"a context of {tokens_max} tokens can never fit: {missing} with nobody else there; ask for fewer tokens")

    @property
    def mtp_layer(self) -> int:
        """Local layer of the MTP block's rows: the last, when the block is loaded."""
        assert self.model.mtp is not None, "no MTP block is loaded"
        return self.layout.layers - 1


def open_stage(
    model: Model, config: EngineConfig, backend: Backend, *, name: str = "stage0", context_max: int,
    arena_of: ArenaOf | None = None, pool_of: PoolOf = Pool, progress: Callable[[int, int], None] | None = None,
) -> Stage:  # fmt: skip
    """Lay out and allocate one stage on the device that holds the model's weights; registers its host memory, which takes a while.

    Args: arena_of, pool_of: what makes its arena and pool; a search for bad interleavings watches both. progress: called with (blocks
        registered, blocks in all).
    Raises: NotAdmitted: the host cannot give the asked memory; the message has the numbers. BadSetting: the model cannot draft.
    """
    facts, device = model.config, model.device
    if device.type != "cpu" and config.decode_batch_limit > BULK_ROWS:
        raise BadSetting(f"decode_batch_limit {config.decode_batch_limit}: a device's step has at most {BULK_ROWS} rows")
    if config.draft_depth and model.mtp is None:
        raise BadSetting(f"draft_depth {config.draft_depth}: the model has no MTP block to draft with; use 0 or auto")
    keys = key_format(config.index_key_format, config.row_format)
    groups = model.groups
    main_groups = groups if model.mtp is None else groups[:-1]
    layout = BlockLayout(row_layout(config.row_format, facts.latent, facts.rope), key_layout(keys, facts.index_width), groups)
    ledger = Ledger()
    host_bytes = config.host_memory_bytes or available_bytes() // 2
    least = layout.block_bytes
    if host_bytes < least:
        raise NotAdmitted(f"host memory of {host_bytes} bytes holds no block of {least} bytes; raise --host-memory")
    try:
        if arena_of is None:
            arena = Arena(layout, host_bytes, ledger, registration=registration_for(device), progress=progress)
        else:
            arena = arena_of(layout, host_bytes, ledger)
    except (ArenaFull, RegistrationRefused) as error:
        raise NotAdmitted(str(error)) from error
    pool = pool_of(device, _device_budget(device), ledger)
    streams = StageStreams.of(backend, name)
    copyback = Copyback(streams.copyback)
    table_layout = TableLayout(len(groups))
    placement: Placement
    rounds: Rounds
    if config.placement == "offload":
        hot_rows = config.hot_rows or HOT_ROWS
        placement = Offload(
            layout, arena, pool, hidden=facts.hidden, hot_rows=hot_rows, picks=facts.top_k, chunk_rows=config.append_chunk_rows,
            elastic=config.hot_rows == 0,
        )  # fmt: skip
        rounds = OffloadRounds(layout, table_layout)
    else:
        placement = Resident(layout, arena, pool, hidden=facts.hidden)
        rounds = ResidentRounds(layout, table_layout)
    return Stage(
        model=model, first_layer=model.first_layer, layout=layout, table_layout=table_layout, main_groups=main_groups, backend=backend,
        streams=streams, arena=arena, pool=pool, device=device, ledger=ledger, placement=placement, rounds=rounds, copyback=copyback,
        append_rows=config.append_chunk_rows, recorder=_recorder(config, device),
        forced=ForcedSelection(config.force_miss_rate, facts.top_k) if config.force_miss_rate else None,
        forced_acceptance=ForcedAcceptance(config.force_accept_rate, facts.vocabulary) if config.force_accept_rate else None,
    )  # fmt: skip


def _nothing() -> None:
    pass


def _device_budget(device: torch.device) -> int | None:
    """Bytes that sessions may take of the device's memory: what the weights left, less a share for activations. None: no limit."""
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - activations_bytes(total))


def activations_bytes(device_bytes: int) -> int:
    """What of a device's `device_bytes` is kept from sessions."""
    return max(_ACTIVATIONS_BYTES, int(_ACTIVATIONS_SHARE * device_bytes))


def _recorder(config: EngineConfig, device: torch.device) -> Recorder | None:
    """What makes recordings of steps: graphs on a device unless they are off; on the CPU only when asked for, since they save nothing."""
    if device.type == "cpu":
        return ClosureRecorder() if config.graphs == "on" else None
    return None if config.graphs == "off" else GraphRecorder(device)
