"""Drafting: what the MTP block guesses behind a step's accepted rows, for the next step to judge.

Holds the block's buffers for one bucket. Runs behind a step's `accept_rows`, on the compute stream; knows no requests and no counts.

1. Extend: every accepted row's state joined with the token behind it is an MTP row; they are written to their slots, so that drafted and
   accepted rows are as complete as rows decoded one by one. The last one, at slot LOGICAL, predicts the first draft.
2. Chain: each draft is joined with the block's own state (after its head norm) at the next position and predicts the one after.
   With `share_mtp_selection` the first row's selection serves the whole chain and no row of a draft is written; else each draft's row and
   key are written at its slot, where the next step's extend writes them again, and each selects anew.
3. Drafts are sampled with the request's own parameters, seed and position: the noise that will judge them. That raises acceptance, and
   cannot change a token: a draft only counts where it equals the sample.

Invariants:
1. Slots past LOGICAL are provisional: nothing but this round's chain reads them.
2. A place with one row (ROWS = 1) drafts nothing, and nothing past its last accepted row is written for it.
Source: model.md, section 3; design, sections 4 and 10.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.peer_drafts import PeerDrafts
from engine.rows import Destinations, store
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from engine.stage_streams import StageStreams
from kernels.layout import TableField
from kernels.locate import locate_new
from kernels.residual import add_norm
from kernels.round import RoundPlan, begin_round
from kernels.selection import Scratch, select_places
from kernels.sparse_mla import sparse_mla_packed
from kernels.verify import keep_drafts
from memory.rounds import Picked, Query
from memory.table import StepTable
from streams import Event

__all__ = ["Drafter", "Judged"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A step's buffers that drafting reads, once the step's drafts are judged. T = places * rows.

    positions  [T]         int64  device
    next_of    [T]         int32  device  place of rows whose follower gets an MTP row, else -1
    samples    [T]         int64  device  the token behind each row
    accepted   [places]    int64  device  rows that count
    mirrored   [places]    int64  device  the step's snapshot
    scratch    of the selection, at least `places` rows; None on the CPU
    """

    positions: Tensor
    next_of: Tensor
    samples: Tensor
    accepted: Tensor
    mirrored: Tensor
    scratch: Scratch | None


class Drafter:
    """Buffers and operations that draft up to `depth` tokens a place. One instance a bucket, used by its one step."""

    def __init__(self, stage: Stage, judged: Judged, hidden: Callable[[], Tensor], depth: int) -> None:
        """Args: hidden: the step's states after the final norm, [T, H], asked for inside its work."""
        assert stage.model.mtp is not None, "no MTP block is loaded"
        self._stage, self._judged, self._hidden, self._depth = stage, judged, hidden, depth
        self._block = stage.model.mtp
        self._group = len(stage.main_groups)
        config, device, dtype = stage.model.config, stage.device, stage.model.dtype
        places = judged.accepted.shape[0]
        self._shares = config.share_mtp_selection
        self._places = torch.arange(places, dtype=torch.int32, device=device)
        self._rows_before = torch.arange(places, device=device) * (judged.positions.shape[0] // places)
        self._ends = torch.tensor(config.eos_token_ids, dtype=torch.int64, device=device)
        self._place_of = torch.full((depth, places), -1, dtype=torch.int32, device=device)  # of places that draft so deep
        self._rows_below = torch.arange(1, depth + 1, device=device)[:, None]  # a place drafts so deep if it has more rows
        self._no_place = torch.full((), -1, dtype=torch.int32, device=device)
        self._position = torch.zeros(places, dtype=torch.int64, device=device)  # slot of the chain's row
        self._x = torch.zeros((places, config.hidden), dtype=dtype, device=device)
        self._plan = RoundPlan.empty(places, config.top_k, device)
        row_bytes = stage.layout.row.row_bytes
        copied = places if device.type == "cpu" or stage.rounds.copies else 0  # a resident device attends to rows where they lie
        self._compact = torch.zeros((copied, config.top_k, row_bytes), dtype=torch.uint8, device=device)
        self._unused = torch.full((places,), -1, dtype=torch.int64, device=device)  # a draft that is not finite is only a bad guess
        self._drafts = torch.zeros((places, depth), dtype=torch.int64, device=device)
        self.peer: PeerDrafts | None = None  # has its share of the block's keys

    def issue(self, chain: Chain, streams: StageStreams, table: StepTable, sampling: SamplingTable) -> Event[Any]:
        """Submit the whole round; returns its last event."""
        compute = streams.compute
        last: Event[Any] = chain.submit(
            compute, lambda: self._extend(table.tensor), label="draft.extend", writes=(self._x, self._position)
        )  # fmt: skip
        if self.peer is not None:
            self.peer.extend(chain, streams, last)
        for depth in range(self._depth):
            after: tuple[Event[Any], ...] = ()
            if self.peer is not None and self._selects(depth):
                asked = chain.submit(compute, partial(self._ask, depth, table.tensor), label=f"draft.{depth}.ask")
                after = (self.peer.choose(chain, streams, depth, asked),)
            work = partial(self._draft, depth, table.tensor, sampling)
            writes = (self._x, self._position, self._plan.selection, self._compact, self._drafts)
            last = chain.submit(compute, work, label=f"draft.{depth}", after=after, writes=writes)
        return last

    def _selects(self, depth: int) -> bool:
        """Whether the rows of that depth make a selection of their own."""
        return depth == 0 or not self._shares

    def clear(self, table: StepTable) -> None:
        """After a failed step: unmap the slots that the last plan assigned."""
        self._stage.rounds.clear(table.tensor, self._group, self._places, self._plan)

    def _extend(self, table: Tensor) -> None:
        """Write the MTP rows behind all accepted rows; the last one of each place begins the chain."""
        stage, judged = self._stage, self._judged
        torch.where(table[:, TableField.ROWS] > self._rows_below, self._places, self._no_place, out=self._place_of)
        x = stage.model.mtp_input(judged.samples, self._hidden())
        slots = judged.positions + 1
        to = self._store(table, x, judged.next_of, slots)
        if self.peer is not None:
            self.peer.extended = (judged.next_of, slots, to)
        last = self._rows_before + (judged.accepted - 1).clamp_min(0)
        torch.index_select(x, 0, last, out=self._x)
        torch.index_select(slots, 0, last, out=self._position)

    def _store(self, table: Tensor, x: Tensor, place_of: Tensor, slots: Tensor) -> Destinations:
        """Write rows and keys of MTP inputs x [n, H] to `slots`, int64 [n]; returns where that was."""
        stage, layer = self._stage, self._block.layer
        destinations = Destinations(*locate_new(table, stage.table_layout, stage.layout, place_of, slots, stage.share))
        store(layer, layer.attention_input(x), stage.model.rope(slots), stage.layout, stage.mtp_layer, self._group, destinations)
        return destinations

    def _ask(self, depth: int, table: Tensor) -> None:
        """Store the rows of the chain where they are stored, and make what they ask with."""
        stage, layer = self._stage, self._block.layer
        to: Destinations | None = None
        if depth > 0 and not self._shares:
            to = self._store(table, self._x, self._place_of[depth], self._position)
        u = layer.attention_input(self._x)
        latent = layer.mla.project_latent(u)
        cos, sin = stage.model.rope(self._position)
        self._query = Query(*layer.mla.project_query(latent, cos, sin), stage.model.config.scale)
        if self._selects(depth):
            self._asked = layer.full_indexer.index_query(u, latent, cos, sin)
            if self.peer is not None:
                self._asked = (self._asked[0].contiguous(), self._asked[1].contiguous())
                self.peer.written, self.peer.asked = (self._place_of[depth], self._position, to), self._asked

    def _draft(self, depth: int, table: Tensor, sampling: SamplingTable) -> None:
        """One draft a place from the chain's rows `_x` at slots `_position`, and the rows of the next."""
        model, block = self._stage.model, self._block
        if self.peer is None or not self._selects(depth):
            self._ask(depth, table)
        attended = self._attend(depth, table, self._place_of[depth])
        y = add_norm(
            self._x, block.layer.mla.project_output(attended), block.layer.output_norm, block.layer.norm_eps, self._unused, 0
        )  # fmt: skip
        state = add_norm(self._x, block.layer.feed_forward(y), block.head_norm, block.norm_eps, self._unused, 0)
        self._position.add_(1)
        drafts = sampling.draft(model.logits(state).float(), self._position, self._drafts[:, :depth])
        self._drafts[:, depth].copy_(drafts)
        if depth + 1 < self._depth:
            self._x.copy_(model.mtp_input(drafts, state))
        else:
            keep_drafts(table, self._drafts, self._ends)

    def _attend(self, depth: int, table: Tensor, place_of: Tensor) -> Tensor:
        """Attention of the chain's rows over the block's own selection, [places, heads, R]."""
        stage, plan, query = self._stage, self._plan, self._query
        if depth > 0 and self._shares and self._compact.numel():
            return sparse_mla_packed(query.latent, query.rope, self._compact, plan.selection, stage.layout.row, query.scale)
        if self._selects(depth):
            key, scratch, group = stage.layout.key, self._judged.scratch, self._group
            if self.peer is None:
                select_places(table, group, place_of, self._position, *self._asked, key, 1, plan.selection, scratch)
            else:
                self.peer.select(table, place_of, self._position, key, plan.selection, scratch)
            if depth > 0:
                begin_round(table)
            stage.rounds.plan(table, group, place_of, self._judged.mirrored, plan)
        picked = Picked(table, self._group, 0, stage.mtp_layer, place_of, plan)
        if stage.rounds.copies:
            stage.rounds.gather(picked, self._compact)
        return stage.rounds.attend(picked, self._compact, query)
