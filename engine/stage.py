"""A stage: consecutive layers on one device, or on an owner and its peer, with the memory and the streams they use.

One stage is a list of one; without a peer everything is the owner's. Layer ids here are local; `first_layer` is where the stage starts in
the model. Holds weights, layout, streams, placement. Knows no sessions by name and no requests.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from engine.config import EngineConfig
from engine.errors import BadSetting, NeverFits, NotAdmitted
from engine.forced import ForcedAcceptance, ForcedSelection
from engine.model.glm import Model
from engine.model.split import PeerModel
from engine.pair_graphs import pair_recorder
from engine.peer import OWNER_SHARE, PeerStage
from engine.peer_opening import open_peer
from engine.placing import activations_bytes, device_budget, placement_of, rounds_of
from engine.stage_calls import Follower
from engine.stage_streams import StageStreams
from kernels.layout import WHOLE, BlockLayout, PageShare, TableLayout
from kernels.place import BULK_ROWS
from memory.arena import Arena, ArenaStatistics
from memory.copyback import Copyback
from memory.errors import ArenaFull, DoesNotFit, RegistrationRefused
from memory.host import available_bytes
from memory.ledger import Ledger
from memory.placement import Placement
from memory.pool import Pool
from memory.registration import registration_for
from memory.rounds import Rounds
from memory.row import key_format, key_layout, row_layout
from streams import Backend, Event, Stream
from streams.capture import ClosureRecorder, GraphRecorder, Recorder

ArenaOf: TypeAlias = Callable[[BlockLayout, int, Ledger], Arena]
PoolOf: TypeAlias = Callable[[torch.device, int | None, Ledger], Pool]

__all__ = ["Stage", "StageStreams", "activations_bytes", "open_stage"]


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
    share: PageShare = WHOLE  # pages of index keys that are here; the others are the peer's
    peer: PeerStage | None = None  # a second device, which the first leads (`peer.py`)
    recorder: Recorder | None = None  # makes steps replays; None: every step is issued anew
    forced: ForcedSelection | None = None  # for measuring: what decode steps select instead
    forced_acceptance: ForcedAcceptance | None = None  # for measuring: which drafts are accepted instead
    before: tuple[Follower, ...] = ()  # of the stage that samples: those whose states it goes on from, in order of layers
    lanes: int = 1  # steps that may be in flight at once, of different sessions
    carry: Stream | None = None  # where one of several stages waits for the others; None: it is the only one

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Of the blocks of every stage, in order of layers."""
        return (*(stage.layout for stage in self.before), self.layout)

    @property
    def block_bytes(self) -> int:
        """Of 64 rows of every layer, on all stages."""
        return sum(layout.block_bytes for layout in self.layouts)

    @property
    def arenas(self) -> tuple[ArenaStatistics, ...]:
        """Of every stage, in order of layers."""
        return (*(stage.held.arena for stage in self.before), self.arena.statistics())

    def joined(self, events: Sequence[Event[Any]], *, label: str, session: str = "") -> Event[None]:
        """Done when all of `events` are, of this stage and of others; fails with the first that does."""
        assert self.carry is not None, "the only stage waits for no other"
        return self.carry.submit(lambda: None, label=label, session=session, after=events)

    async def idle(self) -> None:
        """Wait until everything submitted so far is done, on every stage."""
        for stage in self.before:
            await stage.idle()
        await self.streams.idle()
        if self.carry is not None:
            await self.carry.idle()

    def missing(self, tokens_max: int) -> DoesNotFit | None:
        """What all memory there is, with nobody else in it, lacks for a session of `tokens_max` tokens; of several stages the first's."""
        for stage in self.before:
            if (missing := stage.never_fits(tokens_max)) is not None:
                return missing
        needs, has = self.placement.needs(tokens_max), self.placement.statistics()
        host_missing = max(0, needs.host_bytes - has.arena.blocks * has.arena.block_bytes)
        budget = has.pool.budget_bytes
        device_missing = 0 if budget is None else max(0, needs.device_bytes + has.append_ring_bytes - budget)
        if not host_missing and not device_missing:
            return None
        return DoesNotFit(host_missing_bytes=host_missing, device_missing_bytes=device_missing)

    def tokens_fit(self, tokens_max: int) -> int:
        """The most tokens, at most `tokens_max`, of a session that all memory there is can hold with nobody else in it."""
        if self.missing(tokens_max) is None:
            return tokens_max
        return bisect.bisect_left(range(1, tokens_max), True, key=lambda tokens: self.missing(tokens) is not None)

    def check_size(self, tokens_max: int) -> None:
        """Raise NeverFits if all memory there is, with nobody else in it, is too little for a session of `tokens_max` tokens."""
        missing = self.missing(tokens_max)
        if missing is not None:
            raise NeverFits(f"a context of {tokens_max} tokens can never fit: {missing} with nobody else there; ask for fewer tokens")

    def close(self) -> None:
        """Let go of its memory. All sessions are closed by then."""
        self.placement.close()
        self.arena.close()
        if self.peer is not None and self.peer.arena is not None:
            self.peer.arena.close()

    @property
    def mtp_layer(self) -> int:
        """Local layer of the MTP block's rows: the last, when the block is loaded."""
        assert self.model.mtp is not None, "no MTP block is loaded"
        return self.layout.layers - 1


def open_stage(
    model: Model, config: EngineConfig, backend: Backend, *, name: str = "stage0", context_max: int, peer: PeerModel | None = None,
    arena_of: ArenaOf | None = None, pool_of: PoolOf = Pool, progress: Callable[[int, int], None] | None = None,
    ledger: Ledger | None = None, share: float = 1.0, alone: bool = True,
) -> Stage:  # fmt: skip
    """Lay out and allocate one stage on the device that holds the model's weights; registers its host memory, which takes a while.

    Args: peer: the second device's part of the weights; `model` then has the first one's. arena_of, pool_of: make its arena and pools;
        a search for bad interleavings watches them. progress: called with (blocks registered, blocks in all). ledger: of several stages
        in one process; None: its own. share: of the memory that `config` and the device give. alone: whether no other stage is before or
        behind it.
    Raises: NotAdmitted: the host cannot give the asked memory; the message has the numbers. BadSetting: the model cannot draft.
    """
    facts, device = model.config, model.device
    if device.type != "cpu" and config.decode_batch_limit > BULK_ROWS:
        raise BadSetting(f"decode_batch_limit {config.decode_batch_limit}: a device's step has at most {BULK_ROWS} rows")
    if config.draft_depth and model.mtp is None and model.is_last:
        raise BadSetting(f"draft_depth {config.draft_depth}: the model has no MTP block to draft with; use 0 or auto")
    keys = key_format(config.index_key_format, config.row_format)
    groups = model.groups
    main_groups = groups if model.mtp is None else groups[:-1]
    layout = BlockLayout(row_layout(config.row_format, facts.latent, facts.rope), key_layout(keys, facts.index_width), groups)
    ledger = ledger or Ledger()
    host_bytes = int(share * (config.host_memory_bytes or available_bytes() // 2)) // config.mirror_replicas
    least = layout.block_bytes
    if host_bytes < least:
        raise NotAdmitted(f"host memory of {host_bytes} bytes holds no block of {least} bytes; raise --host-memory")
    table_layout, streams = TableLayout(len(groups)), StageStreams.of(backend, name, peered=peer is not None)
    try:
        if arena_of is None:
            readers = () if peer is None or config.mirror_replicas == 2 else (peer.device,)  # of the one mirror
            arena = Arena(layout, host_bytes, ledger, registration=registration_for(device, *readers), progress=progress)
        else:
            arena = arena_of(layout, host_bytes, ledger)
        budget = device_budget(device)
        pool = pool_of(device, None if budget is None else int(share * budget), ledger)
        own = placement_of(config, facts, layout, arena, pool, WHOLE if peer is None else OWNER_SHARE)
        pair = None if peer is None else open_peer(peer, config, layout, streams, own, host_bytes, pool_of, share)
    except (ArenaFull, RegistrationRefused) as error:
        raise NotAdmitted(str(error)) from error
    return Stage(
        model=model, first_layer=model.first_layer, layout=layout, table_layout=table_layout, main_groups=main_groups, backend=backend,
        streams=streams, arena=arena, pool=pool, device=device, ledger=ledger,
        placement=own if pair is None else pair[1], rounds=rounds_of(config, layout, table_layout), copyback=Copyback(streams.copyback),
        share=WHOLE if pair is None else OWNER_SHARE, peer=None if pair is None else pair[0],
        append_rows=config.append_chunk_rows, recorder=_recorder(config, device, peer),
        forced=ForcedSelection(config.force_miss_rate, facts.top_k) if config.force_miss_rate else None,
        forced_acceptance=ForcedAcceptance(config.force_accept_rate, facts.vocabulary) if config.force_accept_rate else None,
        carry=None if alone else backend.stream(f"{name}.carry"),
    )  # fmt: skip


def _recorder(config: EngineConfig, device: torch.device, peer: PeerModel | None) -> Recorder | None:
    """What makes recordings of steps: graphs on a device unless they are off; only when asked for on the CPU, where they save nothing, and
    on a pair of cards, where they have not run."""
    if device.type == "cpu":
        return ClosureRecorder() if config.graphs == "on" else None
    if peer is not None:
        return pair_recorder(device, peer.device) if config.graphs == "on" else None
    return None if config.graphs == "off" else GraphRecorder(device)
