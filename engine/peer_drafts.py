"""The peer's part of drafting: MTP rows as everywhere, and its candidates among the MTP block's keys. The block itself is the owner's.

Operations run on the peer's selection stream, between those of the owner that ask and those that choose.
"""

from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.peer import OWNER_SHARE, PeerRows, PeerStage
from engine.rows import Destinations
from engine.stage_streams import StageStreams
from kernels.candidates import Candidates, merge_candidates, own_candidates
from kernels.layout import KeyLayout
from kernels.replicate import copy_across
from kernels.selection import Scratch
from memory.table import StepTable
from streams import Event

__all__ = ["PeerDrafts", "Written"]

Written = tuple[Tensor, Tensor, Destinations | None]  # place and slot of each query row; where the owner stored its row, if it did


class PeerDrafts:
    """Buffers of one bucket."""

    def __init__(
        self, peer: PeerStage, table: StepTable, scratch: Scratch | None, places: int, count: int, device: torch.device, layer: int,
        group: int,
    ) -> None:  # fmt: skip
        """Args: table: the peer's. count: query rows of the step. device: the owner's. layer, group: the block's."""
        self._table, self._scratch, self._layer, self._group = table, scratch, layer, group
        self._rows, self._chain = PeerRows(peer, count), PeerRows(peer, places)
        picks = peer.model.config.top_k
        self._own, self._arrived = (Candidates.empty(places, picks, device) for _ in range(2))
        self.extended: Written | None = None  # what the owner wrote behind the step's query rows
        self.written: Written | None = None  # and for the chain
        self.asked: tuple[Tensor, Tensor] | None = None  # index query and head weights of the chain's rows

    def extend(self, chain: Chain, streams: StageStreams, after: Event[Any]) -> Event[Any]:
        """Bring the MTP rows of the step's query rows."""
        assert streams.peer is not None, "drafts are on two devices"
        return chain.submit(streams.peer.selection, self._extend, label="draft.replica", after=(after,))

    def choose(self, chain: Chain, streams: StageStreams, depth: int, after: Event[Any]) -> Event[Any]:
        """Bring the rows of the chain, if the owner stored any, and choose among the peer's keys."""
        assert streams.peer is not None, "drafts are on two devices"
        return chain.submit(
            streams.peer.selection, self._choose, label=f"draft.{depth}.peer.choose", after=(after,), writes=self._chain.candidates.buffers
        )

    def _extend(self) -> None:
        self._bring(self._rows, self.extended)

    def _bring(self, rows: PeerRows, written: Written | None) -> None:
        assert written is not None, "the owner has written before"
        place_of, slots, to = written
        rows.follow(self._table.tensor, place_of, slots, to)
        if to is not None:
            rows.bring(self._layer, self._group)

    def _choose(self) -> None:
        assert self.asked is not None, "the owner has asked before"
        self._bring(self._chain, self.written)
        rows = self._chain
        rows.choose(self._table.tensor, self._group, rows.place_of, rows.positions, *self.asked, 1, self._scratch)

    def select(self, table: Tensor, place_of: Tensor, positions: Tensor, key: KeyLayout, out: Tensor, scratch: Scratch | None) -> None:
        """The owner's work behind `choose`: its own candidates, and the best of both."""
        assert self.asked is not None, "the owner has asked before"
        own_candidates(table, self._group, place_of, positions, *self.asked, key, 1, OWNER_SHARE, self._own, scratch)
        for target, source in zip(self._arrived.buffers, self._chain.candidates.buffers, strict=True):
            copy_across(target, source)
        merge_candidates(self._own, self._arrived, out)
