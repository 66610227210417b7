"""The decode step: one row a session, written once as operations on streams.

Holds the step's buffers for one bucket of places. Knows no requests, no text and no host value that changes from step to step:
positions, tokens and counts come from the sessions' device state through the step table.

Invariants:
1. Operations of one step are chained: a failed one fails the rest of that step and nothing else.
2. A gather waits for its group's plan; a shared layer's gather waits for the prefetch of its misses.
3. Buffers of a step are reused by the next one only behind the compute stream's order.
Source: design, sections 6, 9 and 10.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.model.layer import LayerWeights
from engine.rows import Destinations, store
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from kernels.locate import locate_new
from kernels.quantize import unpack_rows
from kernels.round import RoundPlan, begin_round
from kernels.selection import select_places
from kernels.sparse_mla import sparse_mla
from kernels.step import advance, load_hidden, snapshot, store_hidden
from memory.table import StepTable
from streams import Event

__all__ = ["DecodeStep", "StepEvents", "StepOutput"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host reads of a step, by place."""

    tokens: list[int]
    bad_layer: list[int]
    logits: Tensor | None  # f32 [places, vocabulary], when asked for


@dataclass(frozen=True, slots=True)
class StepEvents:
    """`done`: rows written and state advanced. `output`: what the host follows."""

    done: Event[Any]
    output: Event[StepOutput]


class DecodeStep:
    """Buffers and operations of steps of `places` rows. One instance a bucket; steps on it are ordered by the compute stream."""

    def __init__(self, stage: Stage, places: int) -> None:
        self._stage = stage
        self._places = places
        config, layout = stage.model.config, stage.layout
        picks = config.top_k
        self._place_of = torch.arange(places, dtype=torch.int32)
        self._positions = torch.zeros(places, dtype=torch.int64)
        self._tokens = torch.zeros(places, dtype=torch.int64)
        self._mirrored = torch.zeros(places, dtype=torch.int64)
        self._bad_layer = torch.full((places,), -1, dtype=torch.int64)
        self._hidden_before = torch.zeros((places, config.hidden))
        self._x = torch.zeros((places, config.hidden))
        self._u = torch.zeros_like(self._x)
        self._qr = torch.zeros((places, config.query_latent))
        self._query_latent = torch.zeros((places, config.heads, config.latent))
        self._query_rope = torch.zeros((places, config.heads, config.rope))
        self._plans = [RoundPlan.empty(places, picks) for _ in stage.main_groups]
        self._compact = torch.zeros((places, picks, layout.row.row_bytes), dtype=torch.uint8)
        longest = max(len(group) for group in stage.main_groups)
        self._scratch = [torch.zeros((places * picks, layout.row.row_bytes), dtype=torch.uint8) for _ in range(longest - 1)]
        self._logits = torch.zeros((places, config.vocabulary))
        self._tokens_out = torch.zeros(places, dtype=torch.int64)

    def submit(
        self, table: StepTable, sampling: SamplingTable, *, session: str, after: Sequence[Event[Any]], keep_logits: bool
    ) -> StepEvents:
        """Submit one step over the places of `table`; returns at once."""
        chain = Chain(session, after)
        streams = self._stage.streams
        chain.submit(
            streams.compute,
            lambda: self._begin(table),
            label="step.begin",
            writes=(self._positions, self._tokens, self._mirrored, self._hidden_before, self._x),
        )
        gathered: Event[Any] | None = None
        for group, layers in enumerate(self._stage.main_groups):
            gathered = self._submit_group(chain, table, group, layers, gathered)
        done = chain.submit(
            streams.compute, lambda: self._finish(table, sampling), label="step.finish", writes=(self._logits, self._tokens_out)
        )
        output = chain.submit(streams.compute, lambda: self._read(keep_logits), label="step.read", reads=(self._tokens_out,))
        return StepEvents(done, output)

    def abort(self, table: StepTable, *, session: str) -> Event[None]:
        """After a failed step: unmap every slot its plans assigned, so that no slot claims a row it may not hold."""

        def clear() -> None:
            for group in range(len(self._stage.main_groups)):
                self._stage.rounds.clear(table.tensor, group, self._place_of, self._plans[group])

        return self._stage.streams.compute.submit(clear, label="step.abort", session=session)

    def _submit_group(
        self, chain: Chain, table: StepTable, group: int, layers: tuple[int, ...], scratch_free: Event[Any] | None
    ) -> Event[Any]:
        """Submit the layers of one selection group; returns the event of its last layer."""
        streams, plan = self._stage.streams, self._plans[group]
        selected: Event[Any] | None = None
        fetched: Event[Any] | None = None
        last: Event[Any] | None = None
        for place, layer in enumerate(layers):
            written = chain.submit(
                streams.compute,
                lambda layer=layer: self._write(layer, group, table),  # type: ignore[misc]
                label=f"layer.{layer}.write",
                writes=(self._u, self._qr),
            )
            if selected is None:
                selected = chain.submit(
                    streams.selection,
                    lambda: self._select(group, layers[0], table),
                    label=f"group.{group}.plan",
                    after=(written,),
                    reads=(self._u, self._qr),
                    writes=(plan.selection, plan.slot, plan.fill, plan.miss, plan.source),
                )
                if len(layers) > 1 and self._stage.rounds.prefetches:
                    waits = (selected,) if scratch_free is None else (selected, scratch_free)
                    fetched = chain.submit(
                        streams.prefetch,
                        lambda: self._fetch(group, layers),
                        label=f"group.{group}.prefetch",
                        after=waits,
                        writes=tuple(self._scratch[: len(layers) - 1]),
                    )
            chain.submit(
                streams.compute,
                lambda layer=layer: self._query(layer),  # type: ignore[misc]
                label=f"layer.{layer}.query",
                reads=(self._qr,),
                writes=(self._query_latent, self._query_rope),
            )
            waits = (selected,) if fetched is None or place == 0 else (selected, fetched)
            last = chain.submit(
                streams.compute,
                lambda layer=layer, place=place: self._attend(layer, group, place, table),  # type: ignore[misc]
                label=f"layer.{layer}.attend",
                after=waits,
                reads=() if fetched is None or place == 0 else (self._scratch[place - 1],),
                writes=(self._compact, self._x),
            )
        assert last is not None, "a selection group has at least one layer"
        return last

    def _begin(self, table: StepTable) -> None:
        stage, model = self._stage, self._stage.model
        snapshot(table.tensor, self._place_of, self._positions, self._tokens, self._mirrored)
        begin_round(table.tensor)
        self._bad_layer.fill_(-1)
        self._x.copy_(model.embed(self._tokens))
        self._cos, self._sin = model.rope(self._positions)
        self._destinations = Destinations(*locate_new(table.tensor, stage.table_layout, stage.layout, self._place_of, self._positions))
        load_hidden(table.tensor, self._place_of, self._positions, self._hidden_before)
        if model.mtp is not None:
            x = model.mtp_input(self._tokens, self._hidden_before)
            present = (self._positions > 0)[:, None]
            block = model.mtp.layer
            self._store(block, block.attention_input(x), stage.mtp_layer, len(stage.main_groups), present)

    def _store(self, layer: LayerWeights, u: Tensor, local: int, key_layer: int | None, present: Tensor | None = None) -> None:
        store(layer, u, (self._cos, self._sin), self._stage.layout, local, key_layer, self._destinations, present)

    def _write(self, local: int, group: int, table: StepTable) -> None:
        layer = self._stage.model.layers[local]
        self._u.copy_(layer.attention_input(self._x))
        self._qr.copy_(layer.mla.project_latent(self._u))
        full = self._stage.main_groups[group][0] == local
        self._store(layer, self._u, local, group if full else None)

    def _select(self, group: int, full: int, table: StepTable) -> None:
        stage, plan = self._stage, self._plans[group]
        query, head_weights = stage.model.layers[full].full_indexer.index_query(self._u, self._qr, self._cos, self._sin)
        select_places(table.tensor, group, self._place_of, self._positions, query, head_weights, stage.layout.key, 0, plan.selection)
        if stage.forced is not None:
            stage.forced.overwrite(self._positions, plan.selection)
        stage.rounds.plan(table.tensor, group, self._place_of, self._mirrored, plan)

    def _fetch(self, group: int, layers: tuple[int, ...]) -> None:
        for scratch, layer in zip(self._scratch, layers[1:], strict=False):
            self._stage.rounds.fetch(self._plans[group], layer, scratch)

    def _query(self, local: int) -> None:
        latent, rope = self._stage.model.layers[local].mla.project_query(self._qr, self._cos, self._sin)
        self._query_latent.copy_(latent)
        self._query_rope.copy_(rope)

    def _attend(self, local: int, group: int, place: int, table: StepTable) -> None:
        stage, plan = self._stage, self._plans[group]
        layer = stage.model.layers[local]
        scratch = self._scratch[place - 1] if place > 0 and stage.rounds.prefetches else None
        stage.rounds.gather(table.tensor, group, place, local, self._place_of, plan, scratch, self._compact)
        latent, rope = unpack_rows(self._compact, stage.layout.row)
        attended = sparse_mla(self._query_latent, self._query_rope, latent, rope, plan.selection, stage.model.config.scale)
        self._x.add_(layer.mla.project_output(attended))
        self._x.add_(layer.feed_forward(self._x))
        bad = ~torch.isfinite(self._x).all(-1)
        self._bad_layer.copy_(torch.where(bad & (self._bad_layer < 0), stage.first_layer + local, self._bad_layer))

    def _finish(self, table: StepTable, sampling: SamplingTable) -> None:
        model = self._stage.model
        hidden = model.final_norm(self._x)
        store_hidden(table.tensor, self._place_of, self._positions, hidden)
        self._logits.copy_(model.logits(hidden))
        bad = ~torch.isfinite(self._logits).all(-1)
        self._bad_layer.copy_(torch.where(bad & (self._bad_layer < 0), model.config.layers, self._bad_layer))
        sampling.sample(self._logits, self._positions + 1, self._tokens_out)
        advance(table.tensor, self._place_of, self._tokens_out, self._bad_layer)

    def _read(self, keep_logits: bool) -> StepOutput:
        return StepOutput(self._tokens_out.tolist(), self._bad_layer.tolist(), self._logits.clone() if keep_logits else None)
