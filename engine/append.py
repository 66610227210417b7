"""Append: rows added in bulk, to a new or an existing history, in chunks cut into units: parts of a layer.

Holds the life of one append. Knows no text. The phase is a fact of the session: a chunk of any length,
one token included, goes this way and never the decode step's.

Invariants:
1. Counts move only when a whole chunk is finished: an append that fails or is cancelled leaves the rows of finished chunks.
2. A layer's older rows are brought by one gather over the block addresses, into scratch used by every second layer, while the layer
   before computes; transient memory is bounded by two layers. Where a chunk picks fewer rows than the history has, only those are read.
3. Every read of a row, the chunk's own included, is of packed bytes.
4. How a chunk is cut depends on its rows and its history alone, never on who else runs: its bits are the same in any company.
Source: design, sections 7 and 10.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.append_cost import AppendCost
from engine.append_rows import bring_rows, picked_rows
from engine.chain import Chain
from engine.model.layer import LayerWeights
from engine.rows import Destinations, store, store_input
from engine.sampling_table import SamplingState, SamplingTable
from engine.stage import Stage, activations_bytes
from engine.unit import Unit
from kernels.index_score import index_scores
from kernels.layout import HIDDEN_ROWS, PAGE_KEYS, StateField
from kernels.residual import add_norm
from kernels.select import select
from kernels.sparse_mla import sparse_mla_packed
from memory.append import AppendChunk
from memory.session import SessionMemory
from memory.staging import landing, pinned
from streams import Event

__all__ = ["AppendOutput", "AppendRun", "Scratch", "reserve_scratch"]

_QUERY_TILE = 64  # query rows scored at once, of long histories half as many: bounds the score scratch
_LONG_KEYS = 1 << 19
_SCORES_A_UNIT = _QUERY_TILE * _LONG_KEYS  # that one unit makes at most: of 32 rows over 1,048,576 keys
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


class Scratch:
    """Of whichever append has a chunk open: packed rows of two layers by position, uint8 [rows, row_bytes] each, and room for scores.

    Each is taken once for a whole append: a device's allocator keeps each size that was asked for, and stops the device to ask for more.
    """

    def __init__(self) -> None:
        self.held: list[Tensor | None] = [None, None]
        self._scores: Tensor | None = None

    def scores(self, rows: int, columns: int, end: int, device: torch.device) -> Tensor:
        """Float32 [rows, columns], used until the next call. Args: end: rows that the session has when the append is over."""
        if self._scores is None or self._scores.numel() < rows * columns:
            self._scores = torch.empty(max(rows * columns, _most_scores(end)), device=device)
        return self._scores[: rows * columns].view(rows, columns)


def reserve_scratch(stage: Stage, rows: int) -> tuple[Event[None], ...]:
    """Have a device's allocator ask the driver for the scratch of an append that ends at `rows` rows, and keep it: a later one finds it.

    Done on the streams that will use it, which is how an allocator sorts what it keeps. No more than half of what activations have.
    """
    row_bytes, device = stage.layout.row.row_bytes, stage.device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    while 2 * (2 * rows * row_bytes + 4 * _most_scores(rows)) > activations_bytes(total):
        rows //= 2

    def hold() -> None:
        held = [torch.empty((rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(2)]
        del held

    def score() -> None:
        torch.empty(_most_scores(rows), device=device)

    streams = stage.streams
    return streams.prefetch.submit(hold, label="append.reserve"), streams.compute.submit(score, label="append.reserve")


class AppendRun:
    """One append of `tokens` to a session. The caller takes its units one by one, and asks for the one behind a chunk's end when that is
    done."""

    def __init__(
        self, stage: Stage, memory: SessionMemory, tokens: Sequence[int], sampling: SamplingState | None, session: str,
        scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        """Args: scratch: shared with other appends, whose chunks are open at other times; None: its own."""
        assert tokens, "an append has at least one token"
        self._stage = stage
        self._memory = memory
        self._tokens = tokens
        self._sampling = sampling
        self._session = session
        self._scratch = scratch or Scratch()
        self._cost = AppendCost(stage)
        self._layers = [(group, local) for group, layers in enumerate(stage.main_groups) for local in layers]
        self._fetched: dict[int, Event[Any]] = {}  # by local layer, of the open chunk
        self._forwarded: list[Event[Any]] = []  # a layer each, likewise
        self._chunk: AppendChunk | None = None
        self._first = -1  # where its first chunk begins
        # A session cut or forked inside its history: what makes the MTP row of its next slot is gone, and that row is there already.
        self._mtp_row_there = memory.counts.hidden_from >= memory.counts.logical > 0
        self._end = 0  # where its last chunk ends
        self.done_rows = 0  # rows of finished chunks
        self.output = AppendOutput()

    @property
    def fetching(self) -> Event[Any] | None:
        """A gather of older rows that is in flight; who stops or leaves the append waits for it."""
        return next((event for event in self._fetched.values() if not event.done()), None)

    def units(self) -> Iterator[Unit]:
        """The append's units, in order. The last one of a chunk is done when every whole block is in RAM."""
        rows_max = self._stage.append_rows
        self._end = self._memory.counts.logical + len(self._tokens)
        for start in range(0, len(self._tokens), rows_max):
            last = start + rows_max >= len(self._tokens)
            yield from self._chunk_units(self._tokens[start : start + rows_max], last)
            self.done_rows = min(start + rows_max, len(self._tokens))

    def abandon(self) -> None:
        """Forget the chunk in progress; finished chunks stay. Call once no operation of it is outstanding."""
        if self._chunk is not None:
            self._chunk.abandon(())
            self._chunk = None

    def _chunk_units(self, tokens: Sequence[int], last: bool) -> Iterator[Unit]:
        rows, end, cost = len(tokens), self._memory.counts.logical + len(tokens), self._cost
        yield Unit(partial(self._open_chunk, tokens), cost.begin(rows))
        chunk = self._chunk
        assert chunk is not None, "a unit is asked for before the one before it was submitted"
        for group, local in self._layers:
            layer = self._stage.model.layers[local]
            leads = self._stage.main_groups[group][0] == local
            yield Unit(partial(self._submit_write, chunk, group, local), cost.write(layer, rows))
            for start, stop in _tiles(rows, end) if leads else ():
                yield Unit(partial(self._submit_select, chunk, group, local, start, stop), cost.select(stop - start, end))
            fetched = self._fetched.get(local)
            after = () if fetched is None else (fetched,)
            yield Unit(partial(self._submit_attend, chunk, local, *after), cost.attend(layer, rows, end), needs=fetched)
            yield Unit(partial(self._submit_forward, local), cost.forward(layer, rows), rests=True)
        yield Unit(partial(self._submit_end, chunk, last), cost.finish(rows, last), ends_chunk=True)

    def _submit(self, work: Callable[[], None], label: str, *after: Event[Any]) -> Event[Any]:
        return self._chain.submit(self._stage.streams.compute, work, label=label, after=after)

    def _open_chunk(self, tokens: Sequence[int]) -> Event[Any]:
        stage = self._stage
        self._fetched.clear()
        self._forwarded.clear()
        self._chunk = chunk = self._memory.begin_append(len(tokens), stage.streams.compute)
        self._first = chunk.first if self._first < 0 else self._first
        self._chain = Chain(self._session, (chunk.ready,))
        ids = pinned(torch.tensor(tokens, dtype=torch.int64), stage.device)
        return self._submit(partial(self._begin, chunk, ids), "append.begin")

    def _submit_write(self, chunk: AppendChunk, group: int, local: int) -> Event[Any]:
        """Also the gathers of this layer's older rows and, ahead, of the next one's: its scratch is free once the layer before is over."""
        for each in range(local, min(local + 2, len(self._layers))):
            if each not in self._fetched and not self._reads_few(chunk):
                free = self._forwarded[each - 2 : each - 1] if each >= 2 else []
                fetch, label = partial(self._fetch, chunk, each), f"append.{each}.fetch"
                self._fetched[each] = self._chain.submit(self._stage.streams.prefetch, fetch, label=label, after=free)
        return self._submit(partial(self._write, chunk, local, group), f"append.{local}.write")

    def _submit_select(self, chunk: AppendChunk, group: int, local: int, first: int, end: int) -> Event[Any]:
        return self._submit(partial(self._select, chunk, group, first, end), f"append.{local}.select")

    def _submit_attend(self, chunk: AppendChunk, local: int, *after: Event[Any]) -> Event[Any]:
        return self._submit(partial(self._attend, chunk, local), f"append.{local}.attend", *after)

    def _submit_forward(self, local: int) -> Event[Any]:
        self._forwarded.append(self._submit(partial(self._forward, local), f"append.{local}.forward"))
        return self._forwarded[-1]

    def _submit_end(self, chunk: AppendChunk, last: bool) -> Event[Any]:
        streams = self._stage.streams
        done = self._submit(partial(self._finish, chunk, last), "append.finish")
        finished = chunk.finish(streams.compute, self._stage.copyback, done)
        self._chunk = None  # it ends itself from here on, also when a copy fails: nothing is left to abandon
        return finished

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
        """Bring the layer's older rows [0, first) into scratch."""
        row_bytes = self._stage.layout.row.row_bytes
        end = chunk.first + chunk.rows
        held = self._scratch.held[local % 2]
        if held is None or held.shape[0] < end:
            self._scratch.held[local % 2] = held = torch.empty((self._end, row_bytes), dtype=torch.uint8, device=self._stage.device)
        bring_rows(chunk, self._stage.layout, local, 0, chunk.first, held)

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
            self._head_weights = head_weights
            self._query = layer.full_indexer.project_query(self._qr, self._cos, self._sin)

    def _select(self, chunk: AppendChunk, group: int, first: int, end: int) -> None:
        """Selections of the chunk's rows [first, end)."""
        query, head_weights = self._query, self._head_weights
        pages = self._memory.pages.table[group]
        columns = -(-(chunk.first + end) // PAGE_KEYS) * PAGE_KEYS
        each = _tile_rows(chunk.first + chunk.rows)
        scores = self._scratch.scores(min(each, end - first), columns, self._end, query.device)
        for start in range(first, end, each):
            stop = min(start + each, end)
            keys = chunk.first + stop
            tile = scores[: stop - start]
            asked = query[start:stop], head_weights[start:stop], pages[: -(-keys // PAGE_KEYS)], keys
            index_scores(*asked, self._stage.layout.key, tile, tile=True)
            last = self._positions[start:stop] + 1
            picks = self._selection.shape[1]
            select(tile, torch.zeros_like(last), last, picks, self._selection[start:stop])

    def _attend(self, chunk: AppendChunk, local: int) -> None:
        layer, number = self._stage.model.layers[local], self._stage.first_layer + local
        output = self._attended(chunk, local)
        self._y = add_norm(self._x, output, layer.output_norm, layer.norm_eps, self._bad_layer, number)

    def _attended(self, chunk: AppendChunk, local: int) -> Tensor:
        """Attention's output of the heads that are here, [rows, H]."""
        layer, layout = self._stage.model.layers[local], self._stage.layout
        if self._reads_few(chunk):
            rows = picked_rows(chunk, layout, local, self._selection)
        else:
            held = self._scratch.held[local % 2]
            assert held is not None, "the layer's history was fetched before"
            end = chunk.first + chunk.rows
            bring_rows(chunk, layout, local, chunk.first, end, held)
            rows = held[:end]
        query_latent, query_rope = layer.mla.project_query(self._qr, self._cos, self._sin)
        scale = self._stage.model.config.scale
        return layer.mla.project_output(sparse_mla_packed(query_latent, query_rope, rows, self._selection, layout.row, scale))

    def _forward(self, local: int) -> None:
        self._close_layer(local, self._stage.model.layers[local].feed_forward(self._y))

    def _close_layer(self, local: int, branch: Tensor) -> None:
        """The residual sum behind the MLP, [rows, H], and the norm of what reads it next."""
        weight, eps = self._stage.model.norm_after(local)
        number = self._stage.first_layer + local
        self._u = add_norm(self._x, branch, weight, eps, self._bad_layer, number)

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


def _tile_rows(keys: int) -> int:
    """Query rows scored at once over so many keys."""
    return _QUERY_TILE if keys <= _LONG_KEYS else _QUERY_TILE // 2


def _most_scores(end: int) -> int:
    """Of any tile of an append that ends at `end` rows."""
    return max(_tile_rows(keys) * -(-keys // PAGE_KEYS) * PAGE_KEYS for keys in (end, min(end, _LONG_KEYS)))


def _tiles(rows: int, keys: int) -> Iterator[tuple[int, int]]:
    """Rows that are scored by one unit: whole tiles, as many as bound the scores that it makes over `keys` keys, but at least one."""
    tile = _tile_rows(keys)
    each = max(1, _SCORES_A_UNIT // (tile * keys)) * tile
    return ((start, min(start + each, rows)) for start in range(0, rows, each))
