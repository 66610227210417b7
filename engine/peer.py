"""The peer of a stage: a second device that has half of the heads, experts and index keys, and every row.

The owner leads. It alone makes rows, keys, query latents, choices of experts, norms, the residual state, logits and samples; the peer asks
with its own heads, attends over its own ring and hot caches, feeds its own experts, and gives partial sums, which travel in float32 and are
added owner first. So nothing that both would compute has to agree. The price is that a layer's two sums go to the peer and back instead of
meeting halfway; what each device reads of weights and rows is the same.

`PeerRows` brings rows and candidates of some query rows, `PeerStep` is the peer's part of a step's bucket. Hot caches are planned by each
device for itself: their sizes, and what each knows to be in RAM, may differ.

Invariants:
1. The peer never quantises: rows and keys are copied as the owner stored them, one by one, by address (`kernels/replicate`).
2. A buffer of the peer is written on the peer's streams, from the owner's memory; what comes back is fetched on the owner's. Only
   `kernels/replicate` touches both: any other operation on the other device's tensor would run on a stream that orders nothing.
Source: design, sections 4, 6, 10 and 13.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.split import PeerModel
from engine.rows import Destinations
from engine.stage_streams import StageStreams
from kernels.candidates import Candidates, own_candidates
from kernels.gather import Unwritten
from kernels.layout import BlockLayout, PageShare, TableLayout
from kernels.locate import locate_new
from kernels.replicate import copy_across, copy_keys, copy_rows
from kernels.round import RoundPlan, begin_round
from kernels.selection import Scratch
from kernels.step import follow_rows
from memory.arena import Arena
from memory.copyback import Copyback
from memory.pool import Pool
from memory.rounds import Picked, Query, Rounds

__all__ = ["OWNER_SHARE", "PEER_SHARE", "PeerRows", "PeerStage", "PeerStep"]

OWNER_SHARE, PEER_SHARE = PageShare(2, 0), PageShare(2, 1)


@dataclass(frozen=True, slots=True)
class PeerStage:
    """What the peer's part of steps and appends touches."""

    model: PeerModel
    layout: BlockLayout
    table_layout: TableLayout
    main_groups: tuple[tuple[int, ...], ...]
    streams: StageStreams
    pool: Pool
    arena: Arena | None  # its own, where there are two mirrors
    rounds: Rounds
    copyback: Copyback
    append_scratch: list[Tensor | None] = field(default_factory=lambda: [None, None])  # packed rows of two layers, of the open chunk

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.model.device


class PeerRows:
    """Brings the rows and keys that the owner wrote for `count` query rows, and chooses among the peer's keys. On the peer's streams."""

    def __init__(self, peer: PeerStage, count: int) -> None:
        self._peer = peer
        config, device = peer.model.config, peer.device
        self.place_of = torch.full((count,), -1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(count, dtype=torch.int64, device=device)
        self._rows, self._keys = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))  # where the owner's lie
        self._query = torch.zeros((count, config.index_heads, config.index_width), dtype=peer.model.dtype, device=device)
        self._head_weights = torch.zeros((count, config.index_heads), device=device)
        self.candidates = Candidates.empty(count, config.top_k, device)

    def follow(self, table: Tensor, place_of: Tensor, positions: Tensor, to: Destinations | None) -> None:
        """Take over where query rows are, and where the owner stores what they write, if they write; each [count], the owner's."""
        copy_across(self.place_of, place_of)
        copy_across(self.positions, positions)
        if to is None:
            return
        copy_across(self._rows, to.rows)
        copy_across(self._keys, to.keys)
        peer = self._peer
        self.targets = Destinations(*locate_new(table, peer.table_layout, peer.layout, self.place_of, self.positions, PEER_SHARE))

    def bring(self, local: int, key_layer: int | None, every: int = 1, copies: tuple[Tensor, int] | None = None) -> None:
        """Copy one layer's packed rows, and the keys of the layer that makes the selection, to ring (or block) and page.

        Args: every: 1: of all query rows; else of the first of each place's `every`. copies: addresses [count, n] in compact copies that
            were gathered before, 0: nowhere, and bytes from there: the rows go there too.
        """
        layout, offset = self._peer.layout, self._peer.layout.row_offset(local)
        rows = self._rows[::every]
        copy_rows(rows, self.targets.rows[::every], layout.row.row_bytes, offset, offset)
        if copies is not None:
            addresses, from_there = copies
            for each in range(addresses.shape[1]):
                copy_rows(rows, addresses[:, each], layout.row.row_bytes, offset, from_there)
        if key_layer is not None:
            at = key_layer * layout.key_layer_bytes
            copy_keys(self._keys[::every], self.targets.keys[::every], layout.key, at, at)
            copy_keys(self._keys[::every], self.targets.pages[key_layer, ::every], layout.key, at)

    def choose(
        self, table: Tensor, group: int, place_of: Tensor, positions: Tensor, query: Tensor, head_weights: Tensor, first: int,
        scratch: Scratch | None,
    ) -> None:  # fmt: skip
        """The peer's candidates; query and head weights are the owner's, of which `place_of` and `positions` are copies here."""
        copy_across(self._query, query)
        copy_across(self._head_weights, head_weights)
        own_candidates(
            table, group, place_of, positions, self._query, self._head_weights, self._peer.layout.key, first, PEER_SHARE, self.candidates,
            scratch,
        )  # fmt: skip


class PeerStep:
    """The peer's buffers and work for steps of `places` sessions. One instance a bucket."""

    def __init__(self, peer: PeerStage, places: int, positions_max: int, rows: int) -> None:
        """Args: as `DecodeStep`'s."""
        self.peer, self._each = peer, rows
        config, device, dtype = peer.model.config, peer.device, peer.model.dtype
        count = places * rows
        self.rows = PeerRows(peer, count)
        self.mirrored = torch.zeros(places, dtype=torch.int64, device=device)
        self.scratch = None if device.type == "cpu" else Scratch.of(count, positions_max, device)
        self.plans = [RoundPlan.empty(count, config.top_k, device) for _ in peer.main_groups]
        copied = count if device.type == "cpu" or peer.rounds.copies else 0
        at_once = max(len(group) for group in peer.main_groups) if peer.rounds.copies else 1
        self.compact = torch.zeros((at_once, copied, config.top_k, peer.layout.row.row_bytes), dtype=torch.uint8, device=device)
        self.new_at = torch.zeros((count, rows), dtype=torch.int64, device=device)
        self._unwritten = Unwritten(self.rows.positions, rows)
        self.latent = torch.zeros((count, config.query_latent), dtype=dtype, device=device)
        heads = peer.model.heads
        shapes = ((count, heads, config.latent), (count, heads, config.rope))
        latent, rope = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.query = Query(latent, rope, config.scale)
        self.state = torch.zeros((count, config.hidden), dtype=dtype, device=device)  # normed, that the MLP reads
        self.chosen = Chosen.empty(config, count, device)
        self.partial = torch.zeros((count, config.hidden), device=device)  # float32

    def begin(self, table: Tensor, place_of: Tensor, positions: Tensor, to: Destinations, mtp: tuple[int, int] | None) -> None:
        """Behind the owner's. Args: mtp: local layer and key layer of the MTP rows that the owner wrote for each place's first row."""
        self.rows.follow(table, place_of, positions, to)
        follow_rows(table, self.rows.positions, self.mirrored)
        begin_round(table)
        self._cos, self._sin = self.peer.model.rope(self.rows.positions)
        if mtp is not None:
            self.rows.bring(*mtp, every=self._each)

    def choose(self, table: Tensor, group: int, query: Tensor, head_weights: Tensor) -> None:
        """Candidates of a group's rows among the peer's keys."""
        self.rows.choose(table, group, self.rows.place_of, self.rows.positions, query, head_weights, 0, self.scratch)

    def plan(self, table: Tensor, group: int, selection: Tensor) -> None:
        """Plan the round of the owner's selection here."""
        plan = self.plans[group]
        copy_across(plan.selection, selection)
        self.peer.rounds.plan(table, group, self.rows.place_of, self.mirrored, plan)

    def gather(self, table: Tensor, group: int, layers: tuple[int, ...]) -> None:
        """See `DecodeStep`."""
        picked = self._picked(table, group, 0, layers[0])
        self.peer.rounds.gather_group(picked, self.compact[: len(layers)], self._unwritten, self.new_at)

    def _picked(self, table: Tensor, group: int, place: int, local: int) -> Picked:
        return Picked(table, group, place, local, self.rows.place_of, self.plans[group])

    def ask(self, local: int, place: int, latent: Tensor) -> None:
        """The query of the peer's heads; behind the group's first layer also this layer's rows, which the owner has just written."""
        if place > 0:
            copies = (self.new_at, (place - 1) * self.compact[0].numel()) if self.peer.rounds.copies else None
            self.rows.bring(local, None, copies=copies)
        copy_across(self.latent, latent)
        asked = self.peer.model.layers[local].heads.project_query(self.latent, self._cos, self._sin)
        for target, value in zip((self.query.latent, self.query.rope), asked, strict=True):
            target.copy_(value)

    def attend(self, table: Tensor, group: int, place: int, local: int) -> None:
        """The heads' part of the attention's output."""
        compact = self.compact[place if self.peer.rounds.copies else 0]
        attended = self.peer.rounds.attend(self._picked(table, group, place, local), compact, self.query)
        self.partial.copy_(self.peer.model.layers[local].heads.project_output(attended))

    def feed(self, local: int, state: Tensor, chosen: "Chosen | None") -> None:
        """Its part of the MLP's output. Args: state: that the owner's MLP reads. chosen: the owner's; None: the layer is dense."""
        copy_across(self.state, state)
        if chosen is not None:
            copy_across(self.chosen.expert_of, chosen.expert_of)
            copy_across(self.chosen.weight_of, chosen.weight_of)
        pair = None if chosen is None else (self.chosen.expert_of, self.chosen.weight_of)
        self.partial.copy_(self.peer.model.layers[local].feed(self.state, pair))

    def clear(self, table: Tensor) -> None:
        """After a failed step: unmap every slot its plans assigned."""
        for group, plan in enumerate(self.plans):
            self.peer.rounds.clear(table, group, self.rows.place_of, plan)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Experts of some rows, on one device: int64 and float32 [T, slots]."""

    expert_of: Tensor
    weight_of: Tensor

    @staticmethod
    def empty(config: ModelConfig, count: int, device: torch.device) -> "Chosen":
        """Room for `count` rows."""
        shape = (count, config.experts_per_token)
        return Chosen(torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device))
