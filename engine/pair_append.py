"""Appends on two devices: `AppendRun`'s operations on the owner, the peer's beside them (`peer_append.py`), and what goes between."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from engine.append import AppendRun
from engine.append_scratch import Scratch, tile_rows
from engine.chain import Chain
from engine.model.moe import MoeWeights
from engine.peer import OWNER_SHARE
from engine.peer_append import PeerAppend, choose_own
from engine.sampling_table import SamplingState
from engine.stage import Stage
from engine.stage_calls import Carried, FollowerAppend
from engine.synthetic import SyntheticRun
from kernels.residual import add_norm
from memory.append import AppendChunk
from memory.session import SessionMemory
from streams import Event

__all__ = ["PairAppend", "PairSyntheticRun", "append_run"]


class PairAppend(AppendRun):
    """See AppendRun."""

    def __init__(
        self, stage: Stage, memory: SessionMemory, tokens: Sequence[int], sampling: SamplingState | None, session: str,
        scratch: Scratch | None = None, before: Sequence[FollowerAppend] = (),
    ) -> None:  # fmt: skip
        super().__init__(stage, memory, tokens, sampling, session, scratch, before)
        assert stage.peer is not None, "a pair has a peer"
        assert memory.peered is not None, "a pair has two memories"
        self._peer = PeerAppend(stage.peer, memory.peered.peer.pages)
        self._behind: dict[int, Event[Any]] = {}  # gathers of older rows at the peer, by local layer

    @property
    def fetching(self) -> Event[Any] | None:
        """See AppendRun."""
        return super().fetching or self._peer.running

    def _open_chunk(self, tokens: Sequence[int], arrived: Carried | None, out: Carried | None) -> Event[Any]:
        self._behind.clear()
        begun = super()._open_chunk(tokens, arrived, out)
        assert self._chunk is not None, "opened above"
        self._peer.open(self._chain, self._chunk)
        return begun

    def _is_there(self, local: int) -> bool:
        return super()._is_there(local) and self._behind[local].done()

    def _submit_fetch(self, chunk: AppendChunk, local: int, free: Sequence[Event[Any]]) -> Event[Any]:
        self._behind[local] = self._peer.fetch(self._chain, local, self._end, free)
        return super()._submit_fetch(chunk, local, free)

    def _submit_write(self, chunk: AppendChunk, group: int, local: int) -> Event[Any]:
        self._written = super()._submit_write(chunk, group, local)
        key_layer = group if self._stage.model.layers[local].full else None
        self._peer.bring(self._chain, local, key_layer, self._written)
        self._last = self._written
        return self._written

    def _write(self, chunk: AppendChunk, local: int, group: int) -> None:
        super()._write(chunk, local, group)
        self._qr = self._qr.contiguous()  # what goes to the peer lies side by side
        if self._stage.model.layers[local].full:
            self._query, self._head_weights = self._query.contiguous(), self._head_weights.contiguous()

    def _submit_select(self, chunk: AppendChunk, group: int, local: int, first: int, end: int) -> Event[Any]:
        self._bring_older(chunk, local)
        each = tile_rows(chunk.first + chunk.rows)
        chosen = self._peer.choose(self._chain, group, first, end, each, lambda: (self._query, self._head_weights), self._written)
        self._submit(partial(self._select, chunk, group, first, end), f"append.{local}.select")
        self._last = self._submit(partial(self._merge, first, end, each), f"append.{local}.merge", chosen)
        return self._last

    def _select(self, chunk: AppendChunk, group: int, first: int, end: int) -> None:
        """The owner's own candidates."""
        query, head_weights, pages = self._query, self._head_weights, self._memory.pages.table[group]
        each, key, picks = tile_rows(chunk.first + chunk.rows), self._stage.layout.key, self._selection.shape[1]
        self._own = {}
        for start in range(first, end, each):
            stop = min(start + each, end)
            self._own[start] = choose_own(
                OWNER_SHARE, query[start:stop], head_weights[start:stop], pages, self._positions[start:stop], chunk.first + stop, key, picks
            )  # fmt: skip

    def _merge(self, first: int, end: int, each: int) -> None:
        for start in range(first, end, each):
            self._peer.merge(start, self._own.pop(start), self._selection[start : min(start + each, end)])

    def _submit_attend(self, chunk: AppendChunk, local: int, *after: Event[Any]) -> Event[Any]:
        behind = [self._last, *([self._behind[local]] if local in self._behind else [])]
        theirs = self._peer.attend(self._chain, local, lambda: (self._qr, self._selection), few=self._reads_few(chunk), after=behind)
        super()._submit_attend(chunk, local, *after)
        self._last = self._submit(partial(self._join, local), f"append.{local}.join", theirs)
        return self._last

    def _attend(self, chunk: AppendChunk, local: int) -> None:
        self._part = self._attended(chunk, local)

    def _join(self, local: int) -> None:
        """Attention of all heads, and the norm of what the MLP reads."""
        layer, number = self._stage.model.layers[local], self._stage.first_layer + local
        output = self._peer.added(self._part)
        self._y = add_norm(self._x, output, layer.output_norm, layer.norm_eps, self._bad_layer, number)

    def _submit_forward(self, local: int) -> Event[Any]:
        mlp = self._stage.model.layers[local].mlp
        if isinstance(mlp, MoeWeights):
            self._last = self._submit(partial(self._route, mlp), f"append.{local}.route")
        theirs = self._peer.feed(self._chain, local, partial(self._fed, routed=isinstance(mlp, MoeWeights)), self._last)
        self._submit(partial(self._feed, local), f"append.{local}.mlp")
        self._forwarded.append(self._submit(partial(self._forward, local), f"append.{local}.forward", theirs))
        return self._forwarded[-1]

    def _route(self, mlp: MoeWeights) -> None:
        expert_of, weight_of = mlp.route(self._y)
        self._chosen = expert_of.contiguous(), weight_of.contiguous()

    def _fed(self, *, routed: bool) -> tuple[Tensor, ...]:
        return (self._y, *self._chosen) if routed else (self._y,)

    def _feed(self, local: int) -> None:
        mlp = self._stage.model.layers[local].mlp
        if isinstance(mlp, MoeWeights):
            self._part = mlp.feed_chosen(self._y, self._chosen[0], self._chosen[1]) + mlp.shared.feed(self._y)
        else:
            self._part = mlp.feed(self._y)

    def _forward(self, local: int) -> None:
        self._close_layer(local, self._peer.added(self._part))

    def _end_chunk(self, done: Event[Any]) -> Event[Any]:
        stage = self._stage
        if stage.model.mtp is not None:
            done = self._peer.bring(self._chain, stage.mtp_layer, len(stage.main_groups), done)
        return super()._end_chunk(done)

    def everywhere(self, chain: Chain, chunk: AppendChunk, done: Event[Any]) -> Event[Any]:
        """See AppendRun."""
        self._peer.open(chain, chunk)
        return self._peer.bring_all(chain, done)


class PairSyntheticRun(SyntheticRun, PairAppend):
    """See SyntheticRun."""


def append_run(
    stage: Stage, memory: SessionMemory, tokens: Sequence[int], sampling: SamplingState | None, session: str,
    scratch: Scratch | None = None, before: Sequence[FollowerAppend] = (),
) -> AppendRun:  # fmt: skip
    """An append on as many devices as the stage has. Args: as `AppendRun`'s."""
    kind = AppendRun if stage.peer is None else PairAppend
    return kind(stage, memory, tokens, sampling, session, scratch, before)
