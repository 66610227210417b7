"""The peer's part of an append: every row and key as the owner stored it, half of the heads and experts, and a share of the scoring.

One a run of `AppendRun`, which submits the owner's operations beside these. All but the gathers of older rows run on the peer's compute
stream, in order, each behind what it reads of the owner.

Invariants:
1. As `peer.py`'s: rows and keys are copies; partial sums are float32, added owner first.
2. What the owner reads here stays until the owner's operation behind it: the next of the peer that makes anew comes after that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.append_rows import bring_rows, picked_rows
from engine.chain import Chain
from engine.peer import PEER_SHARE, PeerStage
from kernels.candidates import Candidates, local_positions, merge_candidates, share_first
from kernels.candidates.reference import to_positions
from kernels.index_score import index_scores
from kernels.layout import PAGE_KEYS, KeyLayout, PageShare
from kernels.replicate import copy_across, copy_keys, copy_rows
from kernels.select import select
from kernels.sparse_mla import sparse_mla_packed
from memory.append import AppendChunk, pages_of
from memory.keys import PageTable
from streams import Event

__all__ = ["PeerAppend", "choose_own"]

Asked = Callable[[], Sequence[Tensor]]  # the owner's tensors, when the work runs


def choose_own(
    share: PageShare, query: Tensor, head_weights: Tensor, pages: Tensor, positions: Tensor, keys: int, layout: KeyLayout, picks: int
) -> Candidates:  # fmt: skip
    """Candidates of a tile of rows of one session among the keys of a share.

    pages      [pages of the share]  int64    addresses
    positions  [rows]                int64
    Args: keys: positions below it have a key.
    """
    rows, held = query.shape[0], pages_of(keys, share)
    found = Candidates.empty(rows, picks, query.device)
    if held == 0:
        return found
    last = local_positions(positions, share) + 1
    most = int(local_positions(torch.tensor(keys - 1), share)) + 1  # of the host's numbers: nobody waits
    scores = torch.empty((rows, held * PAGE_KEYS), device=query.device)
    index_scores(query, head_weights, pages[:held], most, layout, scores, tile=True)
    select(scores, torch.full_like(last, share_first(0, share)), last, picks, found.positions)
    torch.gather(scores, 1, found.positions.clamp_min(0).long(), out=found.scores)
    to_positions(found.positions, share)
    return found


class PeerAppend:
    """The peer's part of one append."""

    def __init__(self, peer: PeerStage, pages: PageTable) -> None:
        """Args: pages: the session's at the peer."""
        self._peer, self._pages = peer, pages
        self._chosen: dict[int, Candidates] = {}  # by first row of a tile
        self._events: list[Event[Any]] = []  # of the open chunk

    @property
    def running(self) -> Event[Any] | None:
        """Something of the open chunk that is in flight here."""
        return next((event for event in self._events if not event.done()), None)

    def _submit(
        self, chain: Chain, work: Callable[[], None], label: str, after: Sequence[Event[Any]], *, ahead: bool = False
    ) -> Event[Any]:  # fmt: skip
        stream = self._peer.streams.prefetch if ahead else self._peer.streams.compute
        event = chain.submit(stream, work, label=label, after=after)
        self._events.append(event)
        return event

    def open(self, chain: Chain, chunk: AppendChunk) -> None:
        """A chunk is open: its first work at the peer."""
        assert chunk.peer is not None, "a chunk on two devices"
        self._chunk, self._owner = chunk.peer, chunk
        self._events.clear()
        self._begun = self._submit(chain, self._begin, "append.peer.begin", (chunk.ready, chunk.peer.ready))

    def _begin(self) -> None:
        chunk, device = self._chunk, self._peer.device
        self._positions = torch.arange(chunk.first, chunk.first + chunk.rows, device=device)
        self._cos, self._sin = self._peer.model.rope(self._positions)
        self._rows, self._keys = (torch.empty(chunk.rows, dtype=torch.int64, device=device) for _ in range(2))
        copy_across(self._rows, self._owner.row_destinations)
        copy_across(self._keys, self._owner.key_destinations)

    def bring(self, chain: Chain, local: int, key_layer: int | None, after: Event[Any]) -> Event[Any]:
        """The layer's rows, and the keys of one that makes the selection, once the owner has stored them."""
        return self._submit(chain, partial(self._bring, local, key_layer), f"append.{local}.replica", (after,))

    def _bring(self, local: int, key_layer: int | None) -> None:
        layout, chunk = self._peer.layout, self._chunk
        offset = layout.row_offset(local)
        copy_rows(self._rows, chunk.row_destinations, layout.row.row_bytes, offset, offset)
        if key_layer is not None:
            at = key_layer * layout.key_layer_bytes
            copy_keys(self._keys, chunk.key_destinations, layout.key, at, at)
            copy_keys(self._keys, chunk.page_destinations[key_layer].contiguous(), layout.key, at)

    def bring_all(self, chain: Chain, after: Event[Any]) -> Event[Any]:
        """The rows and keys of every layer: a chunk that no layer of the model made."""
        layout = self._peer.layout

        def bring() -> None:
            for group, layers in enumerate(layout.groups):
                for local in layers:
                    self._bring(local, group if local == layers[0] else None)

        return self._submit(chain, bring, "append.replica", (after,))

    def fetch(self, chain: Chain, local: int, end: int, free: Sequence[Event[Any]]) -> Event[Any]:
        """Older rows of a layer. Args: end: where the append ends. free: what its scratch waits for."""
        return self._submit(chain, partial(self._fetch, local, end), f"append.{local}.peer.fetch", (self._begun, *free), ahead=True)

    def _fetch(self, local: int, end: int) -> None:
        held, chunk = self._peer.append_scratch[local % 2], self._chunk
        if held is None or held.shape[0] < chunk.first + chunk.rows:
            held = torch.empty((end, self._peer.layout.row.row_bytes), dtype=torch.uint8, device=self._peer.device)
            self._peer.append_scratch[local % 2] = held
        bring_rows(chunk, self._peer.layout, local, 0, chunk.first, held)

    def choose(
        self, chain: Chain, group: int, first: int, end: int, each: int, asked: Asked, after: Event[Any]
    ) -> Event[Any]:  # fmt: skip
        """Candidates of rows [first, end), `each` at a time. Args: asked: gives index query and head weights, when it runs."""
        return self._submit(chain, partial(self._choose, group, first, end, each, asked), f"append.group.{group}.peer.choose", (after,))

    def _choose(self, group: int, first: int, end: int, each: int, asked: Asked) -> None:
        for start in range(first, end, each):
            stop = min(start + each, end)
            query, weights = (_here(part[start:stop], self._peer.device) for part in asked())
            positions, keys = self._positions[start:stop], self._chunk.first + stop
            self._chosen[start] = choose_own(
                PEER_SHARE, query, weights, self._pages.table[group], positions, keys, self._peer.layout.key, self._peer.model.config.top_k
            )

    def merge(self, start: int, own: Candidates, out: Tensor) -> None:
        """The owner's work: its candidates and the peer's of one tile."""
        its = self._chosen[start]  # kept: let go now, its memory could be written again before this has run
        merge_candidates(own, Candidates(*(_here(part, out.device) for part in its.buffers)), out)

    def attend(self, chain: Chain, local: int, asked: Asked, few: bool, after: Sequence[Event[Any]]) -> Event[Any]:
        """Attention of the peer's heads. Args: asked: gives query latent and selection, when it runs. few: whether only picks are read."""
        return self._submit(chain, partial(self._attend, local, asked, few), f"append.{local}.peer.attend", after)

    def _attend(self, local: int, asked: Asked, few: bool) -> None:
        layout, chunk, device = self._peer.layout, self._chunk, self._peer.device
        latent, selection = (_here(part, device) for part in asked())
        if few:
            rows = picked_rows(chunk, layout, local, selection)
        else:
            held, end = self._peer.append_scratch[local % 2], chunk.first + chunk.rows
            assert held is not None, "the layer's history was fetched before"
            bring_rows(chunk, layout, local, chunk.first, end, held)
            rows = held[:end]
        heads = self._peer.model.layers[local].heads
        query = heads.project_query(latent, self._cos, self._sin)
        attended = sparse_mla_packed(*query, rows, selection, layout.row, self._peer.model.config.scale)
        self.partial = heads.project_output(attended).float()

    def feed(self, chain: Chain, local: int, asked: Asked, after: Event[Any]) -> Event[Any]:
        """Its part of the MLP. Args: asked: gives the state that the MLP reads and, of a routed layer, the owner's choice, when it runs."""
        return self._submit(chain, partial(self._feed, local, asked), f"append.{local}.peer.forward", (after,))

    def _feed(self, local: int, asked: Asked) -> None:
        state, *chosen = (_here(part, self._peer.device) for part in asked())
        pair = (chosen[0], chosen[1]) if chosen else None
        self.partial = self._peer.model.layers[local].feed(state, pair).float()

    def added(self, own: Tensor) -> Tensor:
        """The owner's work: both parts, added in float32, owner first, in the dtype of the owner's."""
        return (own.float() + _here(self.partial, own.device)).to(own.dtype)


def _here(source: Tensor, device: torch.device) -> Tensor:
    """A copy of the other device's tensor."""
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    copy_across(target, source)
    return target
