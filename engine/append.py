"""Append: rows added in bulk, to a new or an existing history, in chunks cut into units of one layer.

Holds the scratch of one stage and the life of one append. Knows no text. The phase is a fact of the session: a chunk of any length,
one token included, goes this way and never the decode step's.

Invariants:
1. Counts move only when a whole chunk is finished: an append that fails or is cancelled leaves the rows of finished chunks.
2. A layer's older rows are brought by one gather over the block addresses, into scratch used by every second layer, while the layer
   before computes; transient memory is bounded by two layers. Where a chunk picks fewer rows than the history has, only those are read.
3. Every read of a row, the chunk's own included, is of packed bytes.
Source: design, sections 7 and 10.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.model.layer import LayerWeights
from engine.rows import Destinations, store, store_input
from engine.sampling_table import SamplingState, SamplingTable
from engine.stage import Stage
from kernels.gather import gather_blocks, gather_rows
from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, PAGE_KEYS, StateField
from kernels.residual import add_norm
from kernels.select import select
from kernels.sparse_mla import sparse_mla_packed
from memory.append import AppendChunk
from memory.session import SessionMemory
from memory.staging import landing, pinned
from streams import Event

__all__ = ["AppendOutput", "AppendRun"]

_QUERY_TILE = 64  # query rows scored at once: bounds the score scratch to 64 x history
_SCRATCH_ROWS = 4096  # scratch grows by so many rows: histories of one prompt's chunks rarely need a new one
_NO_LAYER = 1 << 40


class AppendOutput:
    """What the host reads after the last chunk, once its event is done."""

    def __init__(self) -> None:
        self.logits: Tensor | None = None  # f32 [vocabulary], CPU
        self.landed = torch.full((2,), -1, dtype=torch.int64)  # token, first bad layer

    @property
    def token(self) -> int:
        return int(self.landed[0])

    @property
    def bad_layer(self) -> int:
        return int(self.landed[1])


class AppendRun:
    """One append of `tokens` to a session. `units()` yields an event a unit; the caller awaits it before asking for the next."""

    def __init__(self, stage: Stage, memory: SessionMemory, tokens: list[int], sampling: SamplingState | None, session: str) -> None:
        assert tokens, "an append has at least one token"
        self._stage = stage
        self._memory = memory
        self._tokens = tokens
        self._sampling = sampling
        self._session = session
        self._scratch: list[Tensor | None] = [None, None]  # packed rows by position, uint8 [rows, row_bytes]
        self._chunk: AppendChunk | None = None
        self._first = -1  # where its first chunk begins
        # A session cut or forked inside its history: what makes the MTP row of its next slot is gone, and that row is there already.
        self._mtp_row_there = memory.counts.hidden_from >= memory.counts.logical > 0
        self.done_rows = 0  # rows of finished chunks
        self.output = AppendOutput()

    def units(self) -> Iterator[Event[Any]]:
        """Submit the append's operations a unit at a time; the last unit's event completes when every whole block is in RAM."""
        rows_max = self._stage.append_rows
        for start in range(0, len(self._tokens), rows_max):
            last = start + rows_max >= len(self._tokens)
            yield from self._chunk_units(self._tokens[start : start + rows_max], last)
            self.done_rows = min(start + rows_max, len(self._tokens))

    def abandon(self) -> None:
        """Forget the chunk in progress; finished chunks stay. Call once no operation of it is outstanding."""
        if self._chunk is not None:
            self._chunk.abandon(())
            self._chunk = None

    def _chunk_units(self, tokens: list[int], last: bool) -> Iterator[Event[Any]]:
        stage, streams = self._stage, self._stage.streams
        chunk = self._memory.begin_append(len(tokens), streams.compute)
        self._chunk = chunk
        self._first = chunk.first if self._first < 0 else self._first
        chain = Chain(self._session, (chunk.ready,))
        ids = pinned(torch.tensor(tokens, dtype=torch.int64), stage.device)
        yield chain.submit(streams.compute, lambda: self._begin(chunk, ids), label="append.begin")
        attended: list[Event[Any]] = []
        for group, layers in enumerate(stage.main_groups):
            for local in layers:
                free = (attended[-2],) if len(attended) >= 2 else ()
                fetched = chain.submit(
                    streams.prefetch, lambda local=local: self._fetch(chunk, local), label=f"append.{local}.fetch", after=free  # type: ignore[misc]
                )  # fmt: skip
                written = chain.submit(
                    streams.compute,
                    lambda local=local, group=group: self._write(chunk, local, group),  # type: ignore[misc]
                    label=f"append.{local}.write",
                )
                attended.append(
                    chain.submit(
                        streams.compute,
                        lambda local=local: self._attend(chunk, local),  # type: ignore[misc]
                        label=f"append.{local}.attend",
                        after=(fetched, written),
                    )
                )
                yield attended[-1]
        done = chain.submit(streams.compute, lambda: self._finish(chunk, last), label="append.finish")
        finished = chunk.finish(streams.compute, stage.copyback, done)
        self._chunk = None  # it ends itself from here on, also when a copy fails: nothing is left to abandon
        yield finished

    def _begin(self, chunk: AppendChunk, ids: Tensor) -> None:
        model, device = self._stage.model, self._stage.device
        self._ids = ids.to(device, non_blocking=True)
        self._positions = torch.arange(chunk.first, chunk.first + chunk.rows, device=device)
        self._cos, self._sin = model.rope(self._positions)
        self._x = model.embed(self._ids)
        self._u = model.layers[0].attention_input(self._x)
        self._selection = torch.full((chunk.rows, model.config.top_k), -1, dtype=torch.int32, device=device)
        self._bad_layer = torch.full((chunk.rows,), -1, dtype=torch.int64, device=device)
        if chunk.first == self._first:
            self._outcome = torch.full((2,), -1, dtype=torch.int64, device=device)

    def _reads_few(self, chunk: AppendChunk) -> bool:
        """Whether the chunk's picks are fewer than the rows before it."""
        return chunk.rows * self._stage.model.config.top_k < chunk.first

    def _fetch(self, chunk: AppendChunk, local: int) -> None:
        """Bring the layer's older rows [0, first) into scratch, unless only picked ones will be read."""
        if self._reads_few(chunk):
            return
        row_bytes = self._stage.layout.row.row_bytes
        end = chunk.first + chunk.rows
        held = self._scratch[local % 2]
        if held is None or held.shape[0] < end:
            capacity = -(-end // _SCRATCH_ROWS) * _SCRATCH_ROWS
            self._scratch[local % 2] = held = torch.empty((capacity, row_bytes), dtype=torch.uint8, device=self._stage.device)
        self._bring(chunk, local, 0, chunk.first, held)

    def _bring(self, chunk: AppendChunk, local: int, first: int, end: int, held: Tensor) -> None:
        """Gather rows [first, end) of one layer, in whole blocks from the one that holds `first`."""
        if first < end:
            layout, start = self._stage.layout, first // BLOCK_ROWS
            target = held[start * BLOCK_ROWS :]
            rows = end - start * BLOCK_ROWS
            gather_blocks(chunk.block_addresses[start:], layout.row_offset(local), rows, layout.row.row_bytes, target)

    def _store(self, chunk: AppendChunk, layer: LayerWeights, u: Tensor, local: int, key_layer: int | None, skips: Tensor | None) -> None:
        destinations = Destinations(chunk.row_destinations, chunk.key_destinations, chunk.page_destinations)
        store(layer, u, (self._cos, self._sin), self._stage.layout, local, key_layer, destinations, skips)

    def _write(self, chunk: AppendChunk, local: int, group: int) -> None:
        layer = self._stage.model.layers[local]
        made = layer.project_input(self._u)
        to = Destinations(chunk.row_destinations, chunk.key_destinations, chunk.page_destinations)
        key_layer = group if self._stage.main_groups[group][0] == local else None
        self._qr, head_weights = store_input(layer, made, (self._cos, self._sin), self._stage.layout, local, key_layer, to)
        if head_weights is not None:
            self._select(chunk, group, layer, head_weights)

    def _select(self, chunk: AppendChunk, group: int, layer: LayerWeights, head_weights: Tensor) -> None:
        query = layer.full_indexer.project_query(self._qr, self._cos, self._sin)
        pages = self._memory.pages.table[group]
        end = chunk.first + chunk.rows
        scores = torch.empty((min(_QUERY_TILE, chunk.rows), -(-end // PAGE_KEYS) * PAGE_KEYS), device=query.device)
        for start in range(0, chunk.rows, _QUERY_TILE):
            stop = min(start + _QUERY_TILE, chunk.rows)
            keys = chunk.first + stop
            tile = scores[: stop - start]
            index_scores(query[start:stop], head_weights[start:stop], pages[: -(-keys // PAGE_KEYS)], keys, self._stage.layout.key, tile)
            last = self._positions[start:stop] + 1
            picks = self._selection.shape[1]
            select(tile, torch.zeros_like(last), last, picks, self._selection[start:stop])

    def _attend(self, chunk: AppendChunk, local: int) -> None:
        stage, model = self._stage, self._stage.model
        layer, row, number = model.layers[local], stage.layout.row, stage.first_layer + local
        if self._reads_few(chunk):
            rows = self._picked(chunk, local)
        else:
            held = self._scratch[local % 2]
            assert held is not None, "the layer's history was fetched before"
            end = chunk.first + chunk.rows
            self._bring(chunk, local, chunk.first, end, held)
            rows = held[:end]
        query_latent, query_rope = layer.mla.project_query(self._qr, self._cos, self._sin)
        attended = sparse_mla_packed(query_latent, query_rope, rows, self._selection, row, model.config.scale)
        y = add_norm(self._x, layer.mla.project_output(attended), layer.output_norm, layer.norm_eps, self._bad_layer, number)
        weight, eps = model.norm_after(local)
        self._u = add_norm(self._x, layer.feed_forward(y), weight, eps, self._bad_layer, number)

    def _picked(self, chunk: AppendChunk, local: int) -> Tensor:
        """The chunk's picked rows of one layer, uint8 [rows, k, row_bytes]; zeros where a pick is unused."""
        layout = self._stage.layout
        row_bytes = layout.row.row_bytes
        position = self._selection.long().clamp_min(0)
        address = chunk.block_addresses[position // BLOCK_ROWS] + position % BLOCK_ROWS * row_bytes + layout.row_offset(local)
        rows = torch.empty((*position.shape, row_bytes), dtype=torch.uint8, device=position.device)
        gather_rows(torch.where(self._selection >= 0, address, 0).flatten(), row_bytes, rows.view(-1, row_bytes))
        return rows

    def _finish(self, chunk: AppendChunk, last: bool) -> None:
        """MTP rows of the chunk, the hidden states to keep, and after the last chunk the first token."""
        stage, model = self._stage, self._stage.model
        hidden = self._u  # the norm behind the last layer is the final one
        kept = self._memory.hidden
        before = kept[(chunk.first - 1) % HIDDEN_ROWS] if chunk.first > 0 else torch.zeros_like(kept[0])
        if model.mtp is not None:
            x = model.mtp_input(self._ids, torch.cat([before.to(hidden.dtype)[None], hidden[:-1]]))
            block = model.mtp.layer
            if self._mtp_row_there and chunk.first == self._first:
                chunk = _without_first(chunk)
            self._store(chunk, block, block.attention_input(x), stage.mtp_layer, len(stage.main_groups), self._positions)
        kept[self._positions[-HIDDEN_ROWS:] % HIDDEN_ROWS] = hidden[-HIDDEN_ROWS:].float()
        bad = torch.where(self._bad_layer >= 0, self._bad_layer, _NO_LAYER).amin()
        self._outcome[1] = torch.where((self._outcome[1] < 0) & (bad < _NO_LAYER), bad, self._outcome[1])
        if last:
            self._memory.state[StateField.DRAFT_COUNT] = 0  # they were guessed behind other tokens
            if self._sampling is not None:
                self._sample(hidden[-1:], self._sampling, chunk.first + chunk.rows)
            self.output.landed = landing(self._outcome)
            self.output.landed.copy_(self._outcome, non_blocking=True)

    def _sample(self, hidden: Tensor, sampling: SamplingState, position: int) -> None:
        """The first token of the generation, into state and outcome, from the last row's state [1, H]."""
        model, device = self._stage.model, self._stage.device
        logits = model.logits(hidden).float()
        broken = (self._outcome[1] < 0) & ~torch.isfinite(logits).all()
        self._outcome[1] = torch.where(broken, model.config.layers, self._outcome[1])
        table = SamplingTable(1, device)
        table.rewrite([sampling])
        table.sample_last(logits, torch.full((1,), position, dtype=torch.int64, device=device), self._outcome[:1])
        self._memory.state[StateField.TOKEN] = self._outcome[0]
        self.output.logits = landing(logits[0])
        self.output.logits.copy_(logits[0], non_blocking=True)


def _without_first(chunk: AppendChunk) -> AppendChunk:
    """The same chunk, but that its first row and key go nowhere."""
    destinations = (chunk.row_destinations.clone(), chunk.key_destinations.clone(), chunk.page_destinations.clone())
    for each in destinations:
        each[..., 0] = 0
    rows, keys, pages = destinations
    return replace(chunk, row_destinations=rows, key_destinations=keys, page_destinations=pages)
