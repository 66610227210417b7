"""The decode step: one row a session and one a draft to be judged, written once as operations on streams.

Holds the step's buffers for one bucket of places and rows. Knows no requests, no text and no host value that changes from step to step:
positions, tokens and counts come from the sessions' device state through the step table.

Invariants:
1. Operations of one step are chained: a failed one fails the rest of that step and nothing else.
2. Rows of a group's layers are gathered as soon as its plan is there, behind it on the selection stream; the group's first attention waits
   for that. A shared layer adds the step's own rows to its copy when it writes them. Copies of the group before are free by then: the plan
   waited for this group's key.
3. Buffers of a step are reused by the next one only behind the compute stream's order.
4. A refused row leaves only bytes at positions past LOGICAL, which the next step writes again (`step_end.py`), and a row's bits do not
   depend on how many rows its step has.
5. The MTP row at LOGICAL is written when its step begins, those behind accepted rows when it ends: rows below LOGICAL always have theirs.
6. A stage that is not the first begins with what arrived, one that is not the last ends by handing its states on; see `stage_calls.py`.
Source: design, sections 6, 9, 10 and 13.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.mtp_row import write_first
from engine.rows import Copies, Destinations, store_input
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from engine.stage_calls import Carried, Standing
from engine.stage_streams import StageStreams
from engine.step_end import StepEnd, StepRows
from engine.step_output import StepEvents, StepOutput
from kernels.gather import Unwritten
from kernels.locate import locate_new
from kernels.residual import add_norm
from kernels.round import RoundPlan, begin_round
from kernels.selection import Scratch, select_places
from kernels.verify import spread_rows
from memory.rounds import Picked, Query
from memory.session import SessionMemory
from memory.table import StepTable
from streams import Event
from streams.capture import Recorder

__all__ = ["DecodeStep"]


class DecodeStep:
    """Buffers and operations of steps of `places` sessions. One instance a bucket; steps on it are ordered by the compute stream."""

    def __init__(self, stage: Stage, places: int, positions_max: int, rows: int = 1, arrived: Carried | None = None) -> None:
        """One bucket.

        Args: positions_max: no session of these steps has more positions; bounds the scores' scratch, and so a launch.
            rows: query rows a place: one, and one for each draft; above 1 the step also drafts for the next, on the last stage.
            arrived: where every step finds what the stage before hands on; None: steps begin with tokens.
        """
        self._stage, self._before = stage, arrived
        self._arriving: tuple[Tensor, ...] = () if arrived is None else (arrived.states, arrived.bad_layer)
        self._begun_with = None if arrived is None else arrived.selection  # of the first group, where it began on the stage before
        assert (self._begun_with is None) == stage.model.layers[0].full, "a selection comes where a stage begins inside a group"
        assert arrived is None or arrived.states.dtype == stage.model.dtype, f"{stage.model.dtype} is not the dtype of what arrives"
        self._places, self._rows = places, rows
        self._replay: Callable[[], None] | None = None
        config, layout, device = stage.model.config, stage.layout, stage.device
        picks, count = config.top_k, places * rows

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def states(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=stage.model.dtype, device=device)

        made = StepRows.of(places, rows, device)
        self._place_of, self._positions, self._tokens, self._mirrored = made.place_of, made.positions, made.tokens, made.mirrored
        self._outcome, self._judged, self._bad_layer = made.outcome, made.judged, made.bad_layer
        self._hidden_before = states(places, config.hidden)
        self._x, self._u = states(count, config.hidden), states(count, config.hidden)
        self._qr = states(count, config.query_latent)
        heads = stage.model.layers[0].mla.key_up.shape[0]  # a peer has the others
        self._query = Query(states(count, heads, config.latent), states(count, heads, config.rope), config.scale)
        self._y, self._routed, self._shared = (states(count, config.hidden) for _ in range(3))
        self._input, self._latent, self._asked = self._u, self._qr, self._query  # see _keep
        self._fed, self._branch, self._beside = self._y, self._routed, self._shared
        self._plans = [RoundPlan.empty(count, picks, device) for _ in stage.main_groups]
        copied = count if device.type == "cpu" or stage.rounds.copies else 0  # a resident device attends to rows where they lie
        at_once = max(len(group) for group in stage.main_groups) if stage.rounds.copies else 1
        self._compact = torch.zeros((at_once, copied, picks, layout.row.row_bytes), dtype=torch.uint8, device=device)
        self._unwritten = Unwritten(self._positions, rows)
        self._new_at = integers(count, rows)  # of the step's own rows in the copy of a group's second layer; others lie behind it
        self._scratch = None if device.type == "cpu" else Scratch.of(count, positions_max, device)
        self._end = StepEnd(stage, made, self._scratch, lambda: self._input) if stage.model.is_last else None
        self._index_query: Tensor | None = None  # on a device made ahead of the selection: beside the layer's query is no room for it
        self._steps = 0

    def submit(
        self, table: StepTable, sampling: SamplingTable, *, session: str, after: Sequence[Event[Any]], keep_logits: bool
    ) -> StepEvents:
        """Submit one step over the places of `table`, always the same one; returns at once."""
        compute, end = self._stage.streams.compute, self._sampling_end
        landed = end.next_landing()
        self._steps += 1
        if self._replay is not None:
            work = partial(self._run, self._replay, landed, keep_logits)
            writes = (self._outcome, end.logits, end.standing, landed)
            step = compute.submit(work, label="step", session=session, after=after, reads=self._arriving, writes=writes)
            return StepEvents(step, step)
        chain = Chain(session, after)
        done = self._issue(chain, self._stage.streams, table, sampling)
        read = partial(end.read, landed, keep_logits)
        return StepEvents(done, chain.submit(compute, read, label="step.read", reads=(self._outcome,), writes=(landed,)))

    def hand_on(self, table: StepTable, *, session: str, after: Sequence[Event[Any]]) -> Carried:
        """Submit one step of a stage that is not the last; returns what it hands on, in the same tensors every time."""
        self._steps += 1
        selection = self._plans[-1].selection if self._stage.model.cuts_group else None
        writes = (self._x, self._bad_layer, *(() if selection is None else (selection,)))
        if self._replay is not None:
            compute = self._stage.streams.compute
            done: Event[Any] = compute.submit(self._replay, label="step", session=session, after=after, reads=self._arriving, writes=writes)
        else:
            done = self._issue(Chain(session, after), self._stage.streams, table, None)
        return Carried(done, self._x, self._bad_layer, selection)

    def standing(self, done: Event[Any]) -> Standing:
        """Where the sessions of a step stand behind it, `done`; the same tensor every time."""
        return Standing(done, self._sampling_end.standing)

    @property
    def _sampling_end(self) -> StepEnd:
        assert self._end is not None, "this stage does not sample"
        return self._end

    @property
    def recorded(self) -> bool:
        """Whether steps are replays."""
        return self._replay is not None

    @property
    def ran(self) -> bool:
        """Whether a step was submitted, so that every kernel is compiled for these shapes."""
        return self._steps > 0

    def record(self, recorder: Recorder, table: StepTable, sampling: SamplingTable | None) -> None:
        """Make later steps replays of one recording. Call it between steps, after an eager one."""
        name = self._stage.streams.compute.name

        def issue(stream_of: Callable[[str], Any]) -> None:
            chain, streams = Chain("", ()), self._stage.streams.renewed(stream_of)
            self._issue(chain, streams, table, sampling)
            self._check(chain, streams)

        self._replay = recorder.record(issue, name)

    def _issue(self, chain: Chain, streams: StageStreams, table: StepTable, sampling: SamplingTable | None) -> Event[Any]:
        """Submit everything a step does on the device; returns its last event."""
        begun = chain.submit(
            streams.compute,
            lambda: self._begin(table),
            label="step.begin",
            reads=self._arriving,
            writes=(self._place_of, self._positions, self._tokens, self._mirrored, self._hidden_before, self._x, self._u),
        )
        self._begun(chain, streams, begun)
        for group, layers in enumerate(self._stage.main_groups):
            self._issue_group(chain, streams, table, group, layers)
        if sampling is None:
            return chain.submit(streams.compute, lambda: None, label="step.hand_on")  # all of it lies where it is read
        return self._sampling_end.issue(chain, streams, table, sampling)

    def _check(self, chain: Chain, streams: StageStreams) -> None:
        """A recording ends here: what it must say of itself when it is replayed."""

    def _begun(self, chain: Chain, streams: StageStreams, begun: Event[Any]) -> None:
        """The step has begun here: what of it begins on another device."""

    def rewrite_peer(
        self, memories: Sequence[SessionMemory], rows: Sequence[int], *, after: Sequence[Event[Any]]
    ) -> tuple[Event[None], ...]:  # fmt: skip
        """Before another table is in force: name the same places at the peer, if there is one. Returns what the owner's rewrite follows."""
        del memories, rows, after
        return ()

    def abort(self, table: StepTable, *, session: str) -> Event[None]:
        """After a failed step: unmap every slot its plans assigned, so that no slot claims a row it may not hold."""

        def clear() -> None:
            for group in range(len(self._stage.main_groups)):
                self._stage.rounds.clear(table.tensor, group, self._place_of, self._plans[group])
            if self._end is not None:
                self._end.clear(table)

        streams = self._stage.streams
        return streams.compute.submit(clear, label="step.abort", session=session, after=streams.fences())

    def _issue_group(self, chain: Chain, streams: StageStreams, table: StepTable, group: int, layers: tuple[int, ...]) -> None:
        """Submit the layers of one selection group, which follow one another."""
        plan, copies = self._plans[group], self._stage.rounds.copies
        keyed = chain.submit(
            streams.compute, lambda: self._key(layers[0], group), label=f"group.{group}.key", reads=(self._u,), writes=(self._qr,)
        )
        chosen = self._begun_with if group == 0 else None
        selected = chain.submit(
            streams.selection,
            (lambda: self._select(group, layers[0], table)) if chosen is None else partial(self._go_on, chosen, table),
            label=f"group.{group}.plan",
            after=(keyed,),
            reads=(self._u, self._qr) if chosen is None else (self._u, self._qr, chosen),
            writes=(plan.selection, plan.slot, plan.fill, plan.miss, plan.source),
        )
        if copies:
            selected = chain.submit(
                streams.selection,
                partial(self._gather, group, layers, table),
                label=f"group.{group}.gather",
                writes=(*self._compact[: len(layers)], self._new_at),
            )
        for place, layer in enumerate(layers):
            adds = (self._compact[place],) if copies and place > 0 else ()  # rows of this step, to what was gathered without them
            writes = (self._query.latent, self._query.rope, *adds)
            chain.submit(
                streams.compute,
                partial(self._ask, layer, place),
                label=f"layer.{layer}.query",
                reads=(self._u, self._qr) if place == 0 else (self._u,),
                writes=writes if place == 0 else (self._qr, *writes),
            )
            attended = chain.submit(
                streams.compute,
                partial(self._attend, layer, group, place, table),
                label=f"layer.{layer}.attend",
                after=(selected,) if place == 0 else (),  # the layers behind it are behind it
                reads=(self._compact[place],) if copies else (),
                writes=(self._x, self._y) if copies else (self._compact, self._x, self._y),
            )
            self._issue_mlp(chain, streams, layer, attended)

    def _issue_mlp(self, chain: Chain, streams: StageStreams, local: int, attended: Event[Any]) -> None:
        """Submit the MLP of a layer; a shared expert runs on the selection stream, beside the router's small launches."""
        shared: tuple[Event[Any], ...] = ()
        if self._stage.model.layers[local].shared_expert is not None:
            work = partial(self._feed_shared, local)
            shared = (
                chain.submit(
                    streams.selection, work, label=f"layer.{local}.shared", after=(attended,), reads=(self._y,), writes=(self._shared,)
                ),
            )
        chain.submit(streams.compute, partial(self._feed, local), label=f"layer.{local}.mlp", reads=(self._y,), writes=(self._routed,))
        chain.submit(
            streams.compute,
            partial(self._add, local),
            label=f"layer.{local}.add",
            after=shared,
            reads=(self._routed, self._shared),
            writes=(self._x, self._u),
        )

    def _begin(self, table: StepTable) -> None:
        stage, model = self._stage, self._stage.model
        spread_rows(
            table.tensor, self._place_of, self._positions, self._tokens, self._mirrored, self._judged, self._bad_layer
        )  # fmt: skip
        begin_round(table.tensor)
        if self._before is None:
            model.embed(self._tokens, out=self._x)
        else:
            self._x.copy_(self._before.states)
            self._bad_layer.copy_(self._before.bad_layer)
        self._input = self._keep(self._u, model.layers[0].attention_input(self._x))
        self._cos, self._sin = model.rope(self._positions)
        self._destinations = Destinations(
            *locate_new(table.tensor, stage.table_layout, stage.layout, self._place_of, self._positions, stage.share)
        )  # fmt: skip
        if model.mtp is not None:
            each = slice(None, None, self._rows)
            embedded = self._x[each] if self._before is None else model.embed(self._tokens[each])
            rope, positions = (self._cos[each], self._sin[each]), self._positions[each]
            write_first(stage, table.tensor, self._place_of[each], positions, embedded, rope, self._destinations, self._hidden_before)

    def _keep(self, buffer: Tensor, value: Tensor) -> Tensor:
        """Where later operations of the step find `value`: on the CPU in the buffer they declare, which is watched there; a device spares
        the copy, since whoever reads it on another stream is done before compute lets go of it."""
        if self._stage.device.type != "cpu":
            return value
        buffer.copy_(value)
        return buffer

    def _write(self, local: int, place: int, key_layer: int | None) -> None:
        """One product of the layer's input and what follows it: row, key, query latent, head weights. Of a full layer it is all that the
        selection needs: scoring, choosing and the plan run beside what comes after."""
        layer, to = self._stage.model.layers[local], self._destinations
        made = layer.project_input(self._input)
        copies = None
        if place > 0 and self._stage.rounds.copies:
            copies = Copies(self._new_at, (place - 1) * self._compact[0].numel())
        latent, self._head_weights = store_input(layer, made, (self._cos, self._sin), self._stage.layout, local, key_layer, to, copies)
        self._latent = self._keep(self._qr, latent)

    def _key(self, full: int, group: int) -> None:
        """What the selection needs of compute: key and row written, on a device also the index query."""
        makes = self._stage.model.layers[full].full
        self._write(full, 0, group if makes else None)
        if self._scratch is not None and makes:
            self._index_query = self._ask_keys(full)

    def _ask_keys(self, full: int) -> Tensor:
        """The index query; the scratch's counts are zero behind it."""
        indexer = self._stage.model.layers[full].full_indexer
        return indexer.project_query(self._latent, self._cos, self._sin, None if self._scratch is None else self._scratch.counts)

    def _select(self, group: int, full: int, table: StepTable) -> None:
        stage, plan, head_weights = self._stage, self._plans[group], self._head_weights
        assert head_weights is not None, f"layer {full} makes a selection"
        query = self._ask_keys(full) if self._index_query is None else self._index_query
        select_places(
            table.tensor, group, self._place_of, self._positions, query, head_weights, stage.layout.key, 0, plan.selection,
            self._scratch, self._scratch is not None,
        )  # fmt: skip
        if stage.forced is not None:
            stage.forced.overwrite(self._positions, plan.selection)
        stage.rounds.plan(table.tensor, group, self._place_of, self._mirrored, plan)

    def _go_on(self, chosen: Tensor, table: StepTable) -> None:
        """The first group began on the stage before: its selection, planned anew for what is hot here."""
        plan = self._plans[0]
        plan.selection.copy_(chosen)
        self._stage.rounds.plan(table.tensor, 0, self._place_of, self._mirrored, plan)

    def _picked(self, local: int, group: int, place: int, table: StepTable) -> Picked:
        return Picked(table.tensor, group, place, local, self._place_of, self._plans[group])

    def _gather(self, group: int, layers: tuple[int, ...], table: StepTable) -> None:
        picked = self._picked(layers[0], group, 0, table)
        self._stage.rounds.gather_group(picked, self._compact[: len(layers)], self._unwritten, self._new_at)

    def _ask(self, local: int, place: int) -> None:
        """The layer's absorbed query, and behind the group's first its row."""
        layer = self._stage.model.layers[local]
        if place > 0:
            self._write(local, place, None)
        latent, rope = layer.mla.project_query(self._latent, self._cos, self._sin)
        self._asked = Query(self._keep(self._query.latent, latent), self._keep(self._query.rope, rope), self._query.scale)

    def _attend(self, local: int, group: int, place: int, table: StepTable) -> None:
        """The layer behind its selection: attention, and the norm of what the MLP reads."""
        stage, layer = self._stage, self._stage.model.layers[local]
        compact = self._compact[place if stage.rounds.copies else 0]
        attended = stage.rounds.attend(self._picked(local, group, place, table), compact, self._asked)
        number = stage.first_layer + local
        y = add_norm(self._x, layer.mla.project_output(attended), layer.output_norm, layer.norm_eps, self._bad_layer, number)
        self._fed = self._keep(self._y, y)

    def _feed_shared(self, local: int) -> None:
        expert = self._stage.model.layers[local].shared_expert
        assert expert is not None, "asked for where there is one"
        self._beside = self._keep(self._shared, expert.feed(self._fed))

    def _feed(self, local: int) -> None:
        self._branch = self._keep(self._routed, self._stage.model.layers[local].mlp.feed_routed(self._fed))

    def _add(self, local: int) -> None:
        """Close the layer: the residual sum, and the norm of what reads it next."""
        model = self._stage.model
        branch = self._branch if model.layers[local].shared_expert is None else self._branch + self._beside
        weight, eps = model.norm_after(local)
        number = self._stage.first_layer + local
        self._input = self._keep(self._u, add_norm(self._x, branch, weight, eps, self._bad_layer, number))

    def _run(self, replay: Callable[[], None], landed: Tensor, keep_logits: bool) -> StepOutput:
        """A whole step in one operation: what the loop pays for a submission, it pays once a step."""
        replay()
        return self._sampling_end.read(landed, keep_logits)
