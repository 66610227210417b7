"""Append: rows added in bulk, to a new or an existing history, in chunks cut into units of one layer.

Holds the scratch of one stage and the life of one append. Knows no text. The phase is a fact of the session: a chunk of any length,
one token included, goes this way and never the decode step's.

Invariants:
1. Counts move only when a whole chunk is finished: an append that fails or is cancelled leaves the rows of finished chunks.
2. A layer's older rows are brought by one gather over the block addresses, into scratch used by every second layer, while the layer
   before computes; transient memory is bounded by two layers.
3. Every read of a row, the chunk's own included, is of packed bytes.
Source: design, sections 7 and 10.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.model.layer import LayerWeights
from engine.rows import Destinations, store
from engine.sampling_table import SamplingState, SamplingTable
from engine.stage import Stage
from kernels.gather import gather_blocks
from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, PAGE_KEYS, StateField
from kernels.quantize import unpack_rows
from kernels.select import select
from kernels.sparse_mla import sparse_mla_indexed
from memory.append import AppendChunk
from memory.session import SessionMemory
from streams import Event

__all__ = ["AppendOutput", "AppendRun"]

_QUERY_TILE = 64  # query rows scored at once: bounds the score scratch to 64 x history


class AppendOutput:
    """What the host reads after the last chunk."""

    def __init__(self) -> None:
        self.token = -1
        self.bad_layer = -1
        self.logits: Tensor | None = None


class AppendRun:
    """One append of `tokens` to a session. `units()` yields an event a unit; the caller awaits it before asking for the next."""

    def __init__(self, stage: Stage, memory: SessionMemory, tokens: list[int], sampling: SamplingState | None, session: str) -> None:
        assert tokens, "an append has at least one token"
        self._stage = stage
        self._memory = memory
        self._tokens = tokens
        self._sampling = sampling
        self._session = session
        self._scratch: list[tuple[Tensor, Tensor] | None] = [None, None]
        self._chunk: AppendChunk | None = None
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
        chain = Chain(self._session, (chunk.ready,))
        ids = torch.tensor(tokens, dtype=torch.int64)
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
        done = chain.submit(streams.compute, lambda: self._finish(chunk, ids, last), label="append.finish")
        finished = chunk.finish(streams.compute, stage.copyback, done)
        self._chunk = None  # it ends itself from here on, also when a copy fails: nothing is left to abandon
        yield finished

    def _begin(self, chunk: AppendChunk, ids: Tensor) -> None:
        model = self._stage.model
        self._positions = torch.arange(chunk.first, chunk.first + chunk.rows)
        self._cos, self._sin = model.rope(self._positions)
        self._x = model.embed(ids)
        self._selection = torch.full((chunk.rows, model.config.top_k), -1, dtype=torch.int32)

    def _fetch(self, chunk: AppendChunk, local: int) -> None:
        """Bring the layer's older rows [0, first) into scratch, unpacked."""
        row = self._stage.layout.row
        end = chunk.first + chunk.rows
        held = self._scratch[local % 2]
        if held is None or held[0].shape[0] < end:
            capacity = -(-end // 4096) * 4096
            held = (torch.empty((capacity, row.latent)), torch.empty((capacity, row.rope)))
            self._scratch[local % 2] = held
        self._bring(chunk, local, 0, chunk.first, held)

    def _bring(self, chunk: AppendChunk, local: int, first: int, end: int, held: tuple[Tensor, Tensor]) -> None:
        """Gather and unpack rows [first, end) of one layer; gathers whole blocks from the one that holds `first`."""
        if first >= end:
            return
        layout = self._stage.layout
        block = first // BLOCK_ROWS
        rows = end - block * BLOCK_ROWS
        packed = torch.empty((rows, layout.row.row_bytes), dtype=torch.uint8)
        gather_blocks(chunk.block_addresses[block:], layout.row_offset(local), rows, layout.row.row_bytes, packed)
        latent, rope = unpack_rows(packed[first - block * BLOCK_ROWS :], layout.row)
        held[0][first:end] = latent
        held[1][first:end] = rope

    def _store(self, chunk: AppendChunk, layer: LayerWeights, u: Tensor, local: int, key_layer: int | None, present: Tensor | None) -> None:
        destinations = Destinations(chunk.row_destinations, chunk.key_destinations, chunk.page_destinations)
        store(layer, u, (self._cos, self._sin), self._stage.layout, local, key_layer, destinations, present)

    def _write(self, chunk: AppendChunk, local: int, group: int) -> None:
        layer = self._stage.model.layers[local]
        u = layer.attention_input(self._x)
        self._qr = layer.mla.project_latent(u)
        full = self._stage.main_groups[group][0] == local
        self._store(chunk, layer, u, local, group if full else None, None)
        if full:
            self._select(chunk, group, layer, u)

    def _select(self, chunk: AppendChunk, group: int, layer: LayerWeights, u: Tensor) -> None:
        query, head_weights = layer.full_indexer.index_query(u, self._qr, self._cos, self._sin)
        pages = self._memory.pages.table[group]
        end = chunk.first + chunk.rows
        scores = torch.empty((min(_QUERY_TILE, chunk.rows), -(-end // PAGE_KEYS) * PAGE_KEYS))
        for start in range(0, chunk.rows, _QUERY_TILE):
            stop = min(start + _QUERY_TILE, chunk.rows)
            keys = chunk.first + stop
            tile = scores[: stop - start]
            index_scores(query[start:stop], head_weights[start:stop], pages[: -(-keys // PAGE_KEYS)], keys, self._stage.layout.key, tile)
            last = self._positions[start:stop] + 1
            picks = self._selection.shape[1]
            select(tile, torch.zeros_like(last), last, picks, self._selection[start:stop])

    def _attend(self, chunk: AppendChunk, local: int) -> None:
        stage = self._stage
        layer = stage.model.layers[local]
        held = self._scratch[local % 2]
        assert held is not None, "the layer's history was fetched before"
        end = chunk.first + chunk.rows
        self._bring(chunk, local, chunk.first, end, held)
        query_latent, query_rope = layer.mla.project_query(self._qr, self._cos, self._sin)
        attended = sparse_mla_indexed(query_latent, query_rope, held[0][:end], held[1][:end], self._selection, stage.model.config.scale)
        self._x = self._x + layer.mla.project_output(attended)
        self._x = self._x + layer.feed_forward(self._x)
        if self.output.bad_layer < 0 and not bool(torch.isfinite(self._x).all()):
            self.output.bad_layer = stage.first_layer + local

    def _finish(self, chunk: AppendChunk, ids: Tensor, last: bool) -> None:
        """MTP rows of the chunk, the hidden states to keep, and after the last chunk the first token."""
        stage, model, memory = self._stage, self._stage.model, self._memory
        hidden = model.final_norm(self._x)
        kept = memory.hidden
        before = kept[(chunk.first - 1) % HIDDEN_ROWS] if chunk.first > 0 else torch.zeros_like(hidden[0])
        if model.mtp is not None:
            x = model.mtp_input(ids, torch.cat([before[None], hidden[:-1]]))
            present = (self._positions > 0)[:, None]
            block = model.mtp.layer
            self._store(chunk, block, block.attention_input(x), stage.mtp_layer, len(stage.main_groups), present)
        for row in range(max(0, chunk.rows - HIDDEN_ROWS), chunk.rows):
            kept[(chunk.first + row) % HIDDEN_ROWS] = hidden[row]
        if last and self._sampling is not None:
            logits = model.logits(hidden[-1:])
            if self.output.bad_layer < 0 and not bool(torch.isfinite(logits).all()):
                self.output.bad_layer = model.config.layers
            table = SamplingTable(1)
            table.rewrite([self._sampling])
            token = torch.zeros(1, dtype=torch.int64)
            table.sample(logits, torch.tensor([chunk.first + chunk.rows]), token)
            memory.state[StateField.TOKEN] = token[0]
            self.output.token, self.output.logits = int(token[0]), logits[0]
