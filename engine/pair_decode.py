"""The decode step on two devices: the owner's operations, the peer's beside them, and what goes between.

Of a group: the owner writes key and row and makes the queries; the peer brings the row (on its selection stream) while both score their own
keys; the owner merges the candidates, and each plans and gathers for itself. Of a layer: the peer asks and attends with its heads while the
owner does with its own, and feeds its experts likewise; its partial sums are fetched, and added behind the owner's.

Invariants:
1. As `DecodeStep`'s; every operation of the peer comes after what it reads of the owner, by name, and the step's last after all of them.
2. Work of sessions on the peer's compute stream (tables, cuts) is ordered with steps that are replays as with those that are not.
3. A replay in which one device gave up waiting for the other says so in the first bad layer of every row (`pair_graphs.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.decode import DecodeStep
from engine.model.moe import MoeWeights
from engine.pair_graphs import mark_parted
from engine.peer import OWNER_SHARE, Chosen, PeerStep
from engine.peer_drafts import PeerDrafts
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from engine.stage_calls import Carried
from engine.stage_streams import StageStreams
from engine.step_output import StepEvents
from kernels.candidates import Candidates, merge_candidates, own_candidates
from kernels.replicate import copy_across
from kernels.residual import add_norm
from memory.session import SessionMemory
from memory.table import StepTable
from streams import Event
from streams.graphs import PairRecorder

__all__ = ["PairStep", "decode_step"]


def decode_step(stage: Stage, places: int, positions_max: int, rows: int, arrived: Carried | None) -> DecodeStep:
    """Steps of a bucket, on as many devices as the stage has. Args: arrived: see `DecodeStep`."""
    if stage.peer is None:
        return DecodeStep(stage, places, positions_max, rows, arrived)
    return PairStep(stage, places, positions_max, rows, arrived)


class PairStep(DecodeStep):
    """See DecodeStep."""

    def __init__(self, stage: Stage, places: int, positions_max: int, rows: int = 1, arrived: Carried | None = None) -> None:
        super().__init__(stage, places, positions_max, rows, arrived)
        assert stage.peer is not None, "a pair has a peer"
        config, device, count = stage.model.config, stage.device, places * rows
        self._peer = PeerStep(stage.peer, places, positions_max, rows)
        self._peer_table = StepTable(places, stage.table_layout, stage.peer.device)
        self._asked_keys = torch.zeros((count, config.index_heads, config.index_width), dtype=stage.model.dtype, device=device)
        self._asked_weights = torch.zeros((count, config.index_heads), device=device)
        self._own, self._arrived = (Candidates.empty(count, config.top_k, device) for _ in range(2))
        self._sum = torch.zeros((count, config.hidden), device=device)  # float32: the owner's part, then both
        self._fetched = torch.zeros((count, config.hidden), device=device)  # the peer's part
        self._chosen = Chosen.empty(config, count, device)
        drafter = None if self._end is None else self._end.drafter
        if drafter is not None:
            drafter.peer = PeerDrafts(
                stage.peer, self._peer_table, self._peer.scratch, places, count, device, stage.mtp_layer, len(stage.main_groups)
            )

    def submit(
        self, table: StepTable, sampling: SamplingTable, *, session: str, after: Sequence[Event[Any]], keep_logits: bool
    ) -> StepEvents:
        """See DecodeStep."""
        events = super().submit(table, sampling, session=session, after=self._behind_peer(after), keep_logits=keep_logits)
        self._before_peer(events.done)
        return events

    def hand_on(self, table: StepTable, *, session: str, after: Sequence[Event[Any]]) -> Carried:
        """See DecodeStep."""
        carried = super().hand_on(table, session=session, after=self._behind_peer(after))
        self._before_peer(carried.event)
        return carried

    def _behind_peer(self, after: Sequence[Event[Any]]) -> Sequence[Event[Any]]:
        """What a step follows: a replay also what was submitted to the peer's compute stream before."""
        peers = self._stage.streams.peer
        assert peers is not None, "a pair has the peer's streams"
        return (*after, peers.compute.submit(_nothing, label="fence")) if self.recorded else after

    def _before_peer(self, done: Event[Any]) -> None:
        """What is submitted to the peer's compute stream from now on follows a replay."""
        peers = self._stage.streams.peer
        assert peers is not None, "a pair has the peer's streams"
        if self.recorded:
            peers.compute.wait(done)

    def rewrite_peer(
        self, memories: Sequence[SessionMemory], rows: Sequence[int], *, after: Sequence[Event[Any]]
    ) -> tuple[Event[None], ...]:
        """See DecodeStep."""
        peers = self._stage.streams.peer
        assert peers is not None, "a pair has the peer's streams"
        places = [memory.peered.peer.table_row(own) for memory, own in zip(memories, rows, strict=True) if memory.peered is not None]
        return (peers.compute.submit(self._peer_table.rewrite(places), label="peer.table.rewrite", after=after),)

    def abort(self, table: StepTable, *, session: str) -> Event[None]:
        """See DecodeStep."""
        streams = self._stage.streams
        assert streams.peer is not None, "a pair has the peer's streams"
        fences = streams.fences()
        work = partial(self._peer.clear, self._peer_table.tensor)
        cleared = streams.peer.compute.submit(work, label="peer.step.abort", session=session, after=fences)
        streams.compute.wait(cleared)
        return super().abort(table, session=session)

    def _check(self, chain: Chain, streams: StageStreams) -> None:
        """As graphs, each device's waits for the other with a limit: rows of a step in which one was given up are marked."""
        peers, recorder = streams.peer, self._stage.recorder
        assert peers is not None, "a pair has the peer's streams"
        if not isinstance(recorder, PairRecorder):
            return
        over = chain.submit(peers.compute, _nothing, label="peer.step.end", after=chain.last(peers.selection, peers.prefetch))
        work = partial(mark_parted, recorder.crossing, self._bad_layer)
        after = (over, *chain.last(streams.selection, streams.prefetch))
        chain.submit(streams.compute, work, label="step.check", after=after, writes=(self._bad_layer,))

    def _begun(self, chain: Chain, streams: StageStreams, begun: Event[Any]) -> None:
        assert streams.peer is not None, "a pair has the peer's streams"
        rows = self._peer.rows
        self._peer_begun = chain.submit(
            streams.peer.compute, self._begin_peer, label="peer.begin", after=(begun,), reads=(self._place_of, self._positions),
            writes=(rows.place_of, rows.positions, self._peer.mirrored),
        )  # fmt: skip

    def _begin_peer(self) -> None:
        stage = self._stage
        mtp = None if stage.model.mtp is None else (stage.mtp_layer, len(stage.main_groups))
        self._peer.begin(self._peer_table.tensor, self._place_of, self._positions, self._destinations, mtp)

    def _issue_group(self, chain: Chain, streams: StageStreams, table: StepTable, group: int, layers: tuple[int, ...]) -> None:
        peers, peer = streams.peer, self._peer
        assert peers is not None, "a pair has the peer's streams"
        copies, full = self._stage.rounds.copies, layers[0]
        makes = self._stage.model.layers[full].full
        asked = (self._asked_keys, self._asked_weights) if makes else ()
        keyed = chain.submit(
            streams.compute, partial(self._key_both, full, group), label=f"group.{group}.key", reads=(self._u,), writes=(self._qr, *asked)
        )
        chain.submit(
            peers.selection, partial(peer.rows.bring, full, group if makes else None), label=f"group.{group}.replica",
            after=(keyed, self._peer_begun),
        )  # fmt: skip
        plan, its = self._plans[group], peer.plans[group]
        if makes:
            selected = self._issue_choice(chain, streams, table, group, keyed)
        else:
            assert self._begun_with is not None, "a group without its full layer began on the stage before"
            selected = chain.submit(
                streams.selection, partial(self._go_on, self._begun_with, table), label=f"group.{group}.plan", after=(keyed,),
                reads=(self._begun_with,), writes=(plan.selection, plan.slot, plan.fill, plan.miss, plan.source),
            )  # fmt: skip
        found = chain.submit(
            peers.selection, partial(self._plan_peer, group), label=f"group.{group}.peer.plan", after=(selected,), reads=(plan.selection,),
            writes=(its.selection, its.slot, its.fill, its.miss, its.source),
        )  # fmt: skip
        if copies:
            work = partial(self._gather, group, layers, table)
            writes = (*self._compact[: len(layers)], self._new_at)
            selected = chain.submit(streams.selection, work, label=f"group.{group}.gather", writes=writes)
            gather = partial(self._gather_peer, group, layers)
            writes = (*peer.compact[: len(layers)], peer.new_at)
            found = chain.submit(peers.selection, gather, label=f"group.{group}.peer.gather", writes=writes)
        for place, layer in enumerate(layers):
            behind = (selected, found) if place == 0 else ()
            self._issue_layer(chain, streams, table, group, place, layer, keyed, behind)

    def _issue_choice(self, chain: Chain, streams: StageStreams, table: StepTable, group: int, keyed: Event[Any]) -> Event[Any]:
        """Submit the selection, of both devices' keys, and the owner's plan of it; returns its event."""
        peers, peer, plan = streams.peer, self._peer, self._plans[group]
        assert peers is not None, "a pair has the peer's streams"
        asked = (self._asked_keys, self._asked_weights)
        chosen = chain.submit(
            peers.selection, partial(self._choose_peer, group), label=f"group.{group}.peer.choose", reads=asked,
            writes=peer.rows.candidates.buffers,
        )  # fmt: skip
        chain.submit(
            streams.selection, partial(self._choose, group, table), label=f"group.{group}.choose", after=(keyed,), reads=asked,
            writes=self._own.buffers,
        )  # fmt: skip
        return chain.submit(
            streams.selection, partial(self._merge, group, table), label=f"group.{group}.plan", after=(chosen,),
            reads=(*self._own.buffers, *peer.rows.candidates.buffers),
            writes=(*self._arrived.buffers, plan.selection, plan.slot, plan.fill, plan.miss, plan.source),
        )  # fmt: skip

    def _issue_layer(
        self, chain: Chain, streams: StageStreams, table: StepTable, group: int, place: int, layer: int, keyed: Event[Any],
        behind: tuple[Event[Any], ...],
    ) -> None:  # fmt: skip
        """Submit one layer. Args: behind: the gathers, of the group's first."""
        peers, peer, copies = streams.peer, self._peer, self._stage.rounds.copies
        assert peers is not None, "a pair has the peer's streams"
        adds = (self._compact[place],) if copies and place > 0 else ()
        writes = (self._query.latent, self._query.rope, *adds, *(() if place == 0 else (self._qr,)))
        reads = (self._u, self._qr) if place == 0 else (self._u,)
        asked = chain.submit(streams.compute, partial(self._ask, layer, place), label=f"layer.{layer}.query", reads=reads, writes=writes)
        adds = (peer.compact[place],) if copies and place > 0 else ()
        chain.submit(
            peers.compute, partial(self._ask_peer, layer, place), label=f"layer.{layer}.peer.query",
            after=(keyed if place == 0 else asked, self._peer_begun), reads=(self._qr,),
            writes=(peer.latent, peer.query.latent, peer.query.rope, *adds),
        )  # fmt: skip
        theirs = chain.submit(
            peers.compute, partial(self._attend_peer, group, place, layer), label=f"layer.{layer}.peer.attend", after=behind[1:],
            reads=(peer.compact[place],) if copies else (), writes=(peer.partial,) if copies else (peer.compact, peer.partial),
        )  # fmt: skip
        chain.submit(
            streams.compute, partial(self._attend_own, layer, group, place, table), label=f"layer.{layer}.attend", after=behind[:1],
            reads=(self._compact[place],) if copies else (), writes=(self._sum,) if copies else (self._compact, self._sum),
        )  # fmt: skip
        joined = chain.submit(
            streams.compute, partial(self._join, layer), label=f"layer.{layer}.join", after=(theirs,), reads=(peer.partial,),
            writes=(self._sum, self._fetched, self._x, self._y),
        )  # fmt: skip
        self._issue_mlp(chain, streams, layer, joined)

    def _issue_mlp(self, chain: Chain, streams: StageStreams, local: int, attended: Event[Any]) -> None:
        peers, peer = streams.peer, self._peer
        assert peers is not None, "a pair has the peer's streams"
        mlp = self._stage.model.layers[local].mlp
        shared: tuple[Event[Any], ...] = ()
        chosen = (self._chosen.expert_of, self._chosen.weight_of)
        if isinstance(mlp, MoeWeights):
            work = partial(self._feed_shared, local)
            reads, writes = (self._y,), (self._shared,)
            label = f"layer.{local}.shared"
            shared = (chain.submit(streams.selection, work, label=label, after=(attended,), reads=reads, writes=writes),)
            work = partial(self._route, mlp)
            attended = chain.submit(streams.compute, work, label=f"layer.{local}.route", reads=(self._y,), writes=chosen)
        theirs = chain.submit(
            peers.compute, partial(self._feed_peer, local), label=f"layer.{local}.peer.mlp", after=(attended,), reads=(self._y, *chosen),
            writes=(peer.state, peer.chosen.expert_of, peer.chosen.weight_of, peer.partial),
        )  # fmt: skip
        chain.submit(
            streams.compute, partial(self._feed_own, local), label=f"layer.{local}.mlp", reads=(self._y, *chosen), writes=(self._routed,)
        )
        chain.submit(
            streams.compute, partial(self._add_both, local), label=f"layer.{local}.add", after=(*shared, theirs),
            reads=(self._routed, self._shared, peer.partial), writes=(self._sum, self._fetched, self._x, self._u),
        )  # fmt: skip

    # the owner's work

    def _key_both(self, full: int, group: int) -> None:
        """Row and key written, and what both devices ask their keys with, where the layer makes a selection."""
        if not self._stage.model.layers[full].full:
            return self._write(full, 0, None)
        self._write(full, 0, group)
        assert self._head_weights is not None, f"layer {full} makes a selection"
        self._asked_keys.copy_(self._ask_keys(full))
        self._asked_weights.copy_(self._head_weights)
        return None

    def _choose(self, group: int, table: StepTable) -> None:
        own_candidates(
            table.tensor, group, self._place_of, self._positions, self._asked_keys, self._asked_weights, self._stage.layout.key, 0,
            OWNER_SHARE, self._own, self._scratch,
        )  # fmt: skip

    def _merge(self, group: int, table: StepTable) -> None:
        stage, plan, its = self._stage, self._plans[group], self._peer.rows.candidates
        for target, source in zip(self._arrived.buffers, its.buffers, strict=True):
            copy_across(target, source)
        merge_candidates(self._own, self._arrived, plan.selection)
        if stage.forced is not None:
            stage.forced.overwrite(self._positions, plan.selection)
        stage.rounds.plan(table.tensor, group, self._place_of, self._mirrored, plan)

    def _attend_own(self, local: int, group: int, place: int, table: StepTable) -> None:
        stage, layer = self._stage, self._stage.model.layers[local]
        compact = self._compact[place if stage.rounds.copies else 0]
        attended = stage.rounds.attend(self._picked(local, group, place, table), compact, self._asked)
        self._sum.copy_(layer.mla.project_output(attended))

    def _both(self) -> Tensor:
        """The owner's part and the peer's, added in float32 in that order, in the model's dtype."""
        copy_across(self._fetched, self._peer.partial)
        self._sum.add_(self._fetched)
        return self._sum.to(self._stage.model.dtype)

    def _join(self, local: int) -> None:
        """Attention of all heads, and the norm of what the MLP reads."""
        layer, number = self._stage.model.layers[local], self._stage.first_layer + local
        y = add_norm(self._x, self._both(), layer.output_norm, layer.norm_eps, self._bad_layer, number)
        self._y.copy_(y)
        self._fed = self._y

    def _route(self, mlp: MoeWeights) -> None:
        expert_of, weight_of = mlp.route(self._fed)
        self._chosen.expert_of.copy_(expert_of)
        self._chosen.weight_of.copy_(weight_of)

    def _feed_own(self, local: int) -> None:
        mlp = self._stage.model.layers[local].mlp
        chosen = (self._chosen.expert_of, self._chosen.weight_of)
        branch = mlp.feed_chosen(self._fed, *chosen) if isinstance(mlp, MoeWeights) else mlp.feed(self._fed)
        self._branch = self._keep(self._routed, branch)

    def _add_both(self, local: int) -> None:
        """Close the layer: all experts, the residual sum, and the norm of what reads it next."""
        model, number = self._stage.model, self._stage.first_layer + local
        self._sum.copy_(self._branch)
        if model.layers[local].shared_expert is not None:
            self._sum.add_(self._beside)
        weight, eps = model.norm_after(local)
        self._input = self._keep(self._u, add_norm(self._x, self._both(), weight, eps, self._bad_layer, number))

    # the peer's work

    def _choose_peer(self, group: int) -> None:
        self._peer.choose(self._peer_table.tensor, group, self._asked_keys, self._asked_weights)

    def _plan_peer(self, group: int) -> None:
        self._peer.plan(self._peer_table.tensor, group, self._plans[group].selection)

    def _gather_peer(self, group: int, layers: tuple[int, ...]) -> None:
        self._peer.gather(self._peer_table.tensor, group, layers)

    def _ask_peer(self, layer: int, place: int) -> None:
        self._peer.ask(layer, place, self._latent)

    def _attend_peer(self, group: int, place: int, layer: int) -> None:
        self._peer.attend(self._peer_table.tensor, group, place, layer)

    def _feed_peer(self, local: int) -> None:
        routed = isinstance(self._stage.model.layers[local].mlp, MoeWeights)
        self._peer.feed(local, self._fed, self._chosen if routed else None)


def _nothing() -> None:
    """Work that only marks a place in its stream's order."""
