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
from engine.append_scratch import LONG_KEYS, QUERY_TILE, Scratch, tile_rows
from engine.chain import Chain
from engine.model.layer import LayerWeights
from engine.rows import Destinations, store, store_input
from engine.sampling_table import SamplingState, SamplingTable
from engine.stage import Stage
from engine.stage_calls import Carried, FollowerAppend
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

__all__ = ["AppendOutput", "AppendRun", "query_tiles"]

_SCORES_A_UNIT = QUERY_TILE * LONG_KEYS  # that one unit makes at most: of 32 rows over 1,048,576 keys
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
    """One append of `tokens` to a session. The caller takes its units one by one, and asks for the one behind a chunk's end when that is
    done."""

    def __init__(
        self, stage: Stage, memory: SessionMemory, tokens: Sequence[int], sampling: SamplingState | None, session: str,
        scratch: Scratch | None = None, before: Sequence[FollowerAppend] = (),
    ) -> None:  # fmt: skip
        """Args: scratch: shared with other appends, whose chunks are open at other times; None: its own. before: the same append's parts
        on the stages before, in order."""
        self._stage, self._before = stage, before
        self._memory = memory
        self._tokens = tokens
        self._sampling = sampling
        self._session = session
        self._scratch = scratch or Scratch()
        self._cost = AppendCost(stage)
        self._layers = [(group, local) for group, layers in enumerate(stage.main_groups) for local in layers]
        self._fetched: dict[int, Event[Any]] = {}  # by local layer, of the open chunk
        self._forwarded: list[Event[Any]] = []  # a layer each, likewise
        self._at = -1  # the local layer whose units are submitted, of the open chunk
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
        there = (part.fetching for part in self._before)
        return next((event for event in (*self._fetched.values(), *there) if event is not None and not event.done()), None)

    def units(self) -> Iterator[Unit]:
        """The append's units, in order. The last one of a chunk is done when every whole block is in RAM."""
        assert self._tokens, "an append has at least one token"
        rows_max = self._stage.append_rows
        self._end = self._memory.counts.logical + len(self._tokens)
        for start in range(0, len(self._tokens), rows_max):
            last = start + rows_max >= len(self._tokens)
            yield from self._chunk_units(self._tokens[start : start + rows_max], last)
            self.done_rows = min(start + rows_max, len(self._tokens))

    def everywhere(self, chain: Chain, chunk: AppendChunk, done: Event[Any]) -> Event[Any]:
        """Bring what was filled into a chunk that no layer made to wherever else the session's rows are. Returns what it ends behind."""
        del chain, chunk
        return done

    def expect(self, rows: int) -> None:
        """So many rows are to be appended in all, where `units` is not what yields them."""
        self._end = self._memory.counts.logical + rows

    def abandon(self) -> None:
        """Forget the chunk in progress; finished chunks stay.

        Order: at any time. What of it is in flight, on whatever stream, the session holds from here on: nothing is let go before.
        """
        if self._chunk is not None:
            self._chunk.abandon(self._chain.ends)
            self._chunk = None
        for part in self._before:
            part.abandon()

    def _chunk_units(self, tokens: Sequence[int], last: bool) -> Iterator[Unit]:
        arrived: Carried | None = None
        for part in self._before:
            yield from part.units(tokens, arrived)
            arrived = part.carried
        yield from self.layer_units(tokens, arrived)
        yield Unit(partial(self._submit_end, last), self._cost.finish(len(tokens), last), ends_chunk=True)

    def layer_units(self, tokens: Sequence[int], arrived: Carried | None, out: Carried | None = None) -> Iterator[Unit]:
        """Of a chunk the units of this stage, all but its end.

        Args: arrived: from the stage before. out: where to leave what goes to the next stage, of as many rows; its event is nobody's.
        """
        rows, end, cost = len(tokens), self._memory.counts.logical + len(tokens), self._cost
        yield Unit(partial(self._open_chunk, tokens, arrived, out), cost.begin(rows))
        chunk = self._chunk
        assert chunk is not None, "a unit is asked for before the one before it was submitted"
        for group, local in self._layers:
            layer = self._stage.model.layers[local]
            leads = layer.full
            yield Unit(partial(self._submit_write, chunk, group, local), cost.write(layer, rows))
            for start, stop in query_tiles(rows, end) if leads else ():
                yield Unit(partial(self._submit_select, chunk, group, local, start, stop), cost.select(stop - start, end))
            fetched = self._fetched.get(local)
            after = () if fetched is None else (fetched,)
            yield Unit(partial(self._submit_attend, chunk, local, *after), cost.attend(layer, rows, end), needs=fetched)
            yield Unit(partial(self._submit_forward, local), cost.forward(layer, rows), rests=True)

    def _submit(self, work: Callable[[], None], label: str, *after: Event[Any]) -> Event[Any]:
        return self._chain.submit(self._stage.streams.compute, work, label=label, after=after)

    def _open_chunk(self, tokens: Sequence[int], arrived: Carried | None, out: Carried | None) -> Event[Any]:
        stage = self._stage
        self._fetched.clear()
        self._forwarded.clear()
        self._at = -1
        self._chunk = chunk = self._memory.begin_append(len(tokens), stage.streams.compute)
        self._first = chunk.first if self._first < 0 else self._first
        self._chain = Chain(self._session, (chunk.ready,) if arrived is None else (chunk.ready, arrived.event))
        ids = pinned(torch.tensor(tokens, dtype=torch.int64), stage.device)
        begin = partial(self._begin, chunk, ids, arrived, out)
        return self._chain.submit(stage.streams.compute, begin, label="append.begin", reads=_tensors(arrived), writes=_tensors(out))

    def _bring_older(self, chunk: AppendChunk, local: int, *, now: bool = False) -> None:
        """Submit the gather of the layer's older rows and, once that is over or `now`, the next layer's: it needs the layer before to be
        over. Streams share a device's queues, so that a gather behind another may hold up the steps that come after it."""
        self._at = local
        if not self._reads_few(chunk):
            for each in range(local, min(local + 2, len(self._layers))):
                if each not in self._fetched and (each == local or now or self._is_there(local)):
                    self._fetched[each] = self._submit_fetch(chunk, each, self._forwarded[each - 2 : each - 1] if each >= 2 else [])

    def bring_ahead(self) -> None:
        """Submit the gather that comes next if the one before is over, in turns too that have no room for a unit: the bus would rest."""
        if self._chunk is not None and self._at >= 0:
            self._bring_older(self._chunk, self._at)

    def _is_there(self, local: int) -> bool:
        """Whether the gather of a layer's older rows, which was submitted, is over."""
        return self._fetched[local].done()

    def _submit_fetch(self, chunk: AppendChunk, local: int, free: Sequence[Event[Any]]) -> Event[Any]:
        fetch = partial(self._fetch, chunk, local)
        return self._chain.submit(self._stage.streams.prefetch, fetch, label=f"append.{local}.fetch", after=free)

    def _submit_write(self, chunk: AppendChunk, group: int, local: int) -> Event[Any]:
        self._bring_older(chunk, local)
        return self._submit(partial(self._write, chunk, local, group), f"append.{local}.write")

    def _submit_select(self, chunk: AppendChunk, group: int, local: int, first: int, end: int) -> Event[Any]:
        self._bring_older(chunk, local)
        return self._submit(partial(self._select, chunk, group, first, end), f"append.{local}.select")

    def _submit_attend(self, chunk: AppendChunk, local: int, *after: Event[Any]) -> Event[Any]:
        self._bring_older(chunk, local, now=True)
        return self._submit(partial(self._attend, chunk, local), f"append.{local}.attend", *after)

    def _submit_forward(self, local: int) -> Event[Any]:
        self._forwarded.append(self._submit(partial(self._forward, local), f"append.{local}.forward"))
        return self._forwarded[-1]

    @property
    def forwarded(self) -> Event[Any]:
        """Done when the layers of the open chunk are, all of whose units were submitted."""
        return self._forwarded[-1]

    def end_part(self, after: Event[Any], last: bool) -> Event[Any]:
        """Finish the open chunk on a stage that is not the last. Args: after: the last work of the chunk on all stages."""
        return self._end_chunk(self._submit(partial(self._end_rows, last), "append.finish", after))

    def _submit_end(self, last: bool) -> Event[Any]:
        assert self._chunk is not None, "a chunk that was not opened ends"
        done = self._submit(partial(self._finish, self._chunk, last), "append.finish")
        ends = [self._end_chunk(done), *(part.finish(done, last=last) for part in self._before)]
        if last and self._sampling is not None:
            token = self._memory.state[StateField.TOKEN : StateField.TOKEN + 1]
            ends += [part.stand(token, done) for part in self._before]
        return ends[0] if len(ends) == 1 else self._stage.joined(ends, label="append.ends", session=self._session)

    def _end_chunk(self, done: Event[Any]) -> Event[Any]:
        assert self._chunk is not None, "a chunk that was not opened ends"
        for event in self._chain.ends:  # once one has failed the end does not wait for the others
            self._memory.operations.hold(event)
        finished = self._chunk.finish(self._stage.streams.compute, self._stage.copyback, done)
        self._chunk = None  # it ends itself from here on, also when a copy fails: nothing is left to abandon
        return finished

    def _begin(self, chunk: AppendChunk, ids: Tensor, arrived: Carried | None, out: Carried | None) -> None:
        model, device, picks = self._stage.model, self._stage.device, self._stage.model.config.top_k
        self._ids = ids.to(device, non_blocking=True)
        self._positions = torch.arange(chunk.first, chunk.first + chunk.rows, device=device)
        self._cos, self._sin = model.rope(self._positions)
        self._x = model.embed(self._ids) if arrived is None else arrived.states.clone()
        self._bad_layer = torch.full((chunk.rows,), -1, dtype=torch.int64, device=device) if arrived is None else arrived.bad_layer.clone()
        if out is not None:
            self._x, self._bad_layer = out.states.copy_(self._x), out.bad_layer.copy_(self._bad_layer)
        chosen = None if arrived is None else arrived.selection
        made = torch.full((chunk.rows, picks), -1, dtype=torch.int32, device=device) if chosen is None else chosen.clone()
        self._selection = made if out is None or out.selection is None else out.selection.copy_(made)
        self._u = model.layers[0].attention_input(self._x)
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
        key_layer = group if layer.full else None
        self._qr, head_weights = store_input(layer, made, (self._cos, self._sin), self._stage.layout, local, key_layer, to)
        if head_weights is not None:
            self._head_weights = head_weights
            self._query = layer.full_indexer.project_query(self._qr, self._cos, self._sin)

    def _select(self, chunk: AppendChunk, group: int, first: int, end: int) -> None:
        """Selections of the chunk's rows [first, end)."""
        query, head_weights = self._query, self._head_weights
        pages = self._memory.pages.table[group]
        columns = -(-(chunk.first + end) // PAGE_KEYS) * PAGE_KEYS
        each = tile_rows(chunk.first + chunk.rows)
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

    def _end_rows(self, last: bool) -> None:
        """What a stage that is not the last does behind the last layer of all."""
        if last:
            self._memory.state[StateField.DRAFT_COUNT] = 0  # as `_finish`

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


def _tensors(carried: Carried | None) -> tuple[Tensor, ...]:
    if carried is None:
        return ()
    return (carried.states, carried.bad_layer, *(() if carried.selection is None else (carried.selection,)))


def query_tiles(rows: int, keys: int) -> Iterator[tuple[int, int]]:
    """Rows that are scored by one unit: whole tiles, as many as bound the scores that it makes over `keys` keys, but at least one."""
    tile = tile_rows(keys)
    each = max(1, _SCORES_A_UNIT // (tile * keys)) * tile
    return ((start, min(start + each, rows)) for start in range(0, rows, each))
