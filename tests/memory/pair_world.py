"""The small stage of `memory_world` on two devices: rows are written on the owner and brought to the peer by address, as steps do."""

from typing import Any

import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, PageShare, StateField
from kernels.locate import locate_new
from kernels.replicate import copy_keys, copy_rows
from memory import Arena, Copyback, Ledger, Offload, Pool, Resident
from memory.append import AppendChunk
from memory.pair import PairPlacement
from memory.replica import FollowedBlocks, FollowingCopyback, PairSession, verify_replica
from streams import Event, Stream
from tests.memory.memory_world import (
    HIDDEN,
    LAYOUT,
    PICKS,
    TABLE_LAYOUT,
    Conversation,
    Stage,
    parts_of,
    rows_of,
    store_at,
)

SHARES = (PageShare(2, 0), PageShare(2, 1))


class PairConversation(Conversation):
    """A session on two devices; `replicates` can be set to nothing, so that a test sees what a lost replica does."""

    stage: "PairStage"
    session: PairSession

    def submit_step(self, rows: int = 1) -> Event[None]:
        """See Conversation: written on the owner, then at the peer; the returned event is behind both."""
        session, first, stage = self.session, len(self.salts), self.stage
        session.ensure_rows(first + rows, stage.compute)
        session.advance(rows)
        tables = [torch.tensor([one.table_row(rows)], dtype=torch.int64) for one in (session.owner, session.peer)]
        salts = [stage.next_salt() for _ in range(rows)]
        self.salts += salts
        places = torch.zeros(rows, dtype=torch.int32)
        positions = torch.arange(first, first + rows)

        def write() -> None:
            assert int(session.state[StateField.LOGICAL]) == first
            _store(positions.tolist(), salts, *locate_new(tables[0], TABLE_LAYOUT, LAYOUT, places, positions, SHARES[0]))

        def replicate() -> None:
            source = locate_new(tables[0], TABLE_LAYOUT, LAYOUT, places, positions, SHARES[0])
            target = locate_new(tables[1], TABLE_LAYOUT, LAYOUT, places, positions, SHARES[1])
            _replicate(source[0], source[1], *target)

        def end() -> None:
            session.state[StateField.LOGICAL] += rows

        written = stage.compute.submit(write, label="step", session=session.session_id, writes=self._written(session.owner, first, rows))
        rings = self._written(session.owner, first, rows, pages=False)
        copied = stage.peer_compute.submit(
            replicate, label="replica", session=session.session_id, after=[written], reads=rings,
            writes=self._written(session.peer, first, rows),
        )  # fmt: skip
        event = stage.compute.submit(end, label="step.end", session=session.session_id, after=[copied])
        for each in (written, copied, event):
            session.operations.hold(each)
        return event

    def _written(self, one: Any, first: int, rows: int, *, pages: bool = True) -> list[Tensor]:
        """The bytes of some rows on one device."""
        views = []
        for position in range(first, first + rows):
            row, page = position % BLOCK_ROWS, position // PAGE_KEYS
            views += [part[row] for part in parts_of(one.device_block(position // BLOCK_ROWS))]
            share = one.holdings.share
            if pages and share.has(page):
                held = [one.pages.view(layer, share.pages(page)).view(PAGE_KEYS, -1) for layer in range(LAYOUT.key_layers)]
                views += [keys[position % PAGE_KEYS] for keys in held]
        return views

    def submit_chunk(self, rows: int, work: Any = None) -> tuple[AppendChunk, Event[None], list[int]]:
        """See Conversation."""
        stage, session = self.stage, self.session
        chunk = session.begin_append(rows, stage.compute)
        peer = chunk.peer
        assert peer is not None
        salts = [stage.next_salt() for _ in range(rows)]
        known = [*self.salts[: chunk.first], *salts]

        def write() -> None:
            positions = range(chunk.first, chunk.first + rows)
            _store(positions, salts, chunk.row_destinations, chunk.key_destinations, chunk.page_destinations)
            self.check_addresses(chunk, known)

        def replicate() -> None:
            _replicate(chunk.row_destinations, chunk.key_destinations, peer.row_destinations, peer.key_destinations, peer.page_destinations)
            self.check_addresses(peer, known)

        written = stage.compute.submit(work or write, label="chunk", session=session.session_id, after=[chunk.ready])
        copied = stage.peer_compute.submit(replicate, label="chunk.replica", session=session.session_id, after=[written, peer.ready])
        event = stage.compute.submit(lambda: None, label="chunk.end", session=session.session_id, after=[copied])
        for each in (written, copied, event):
            session.operations.hold(each)
        return chunk, event, salts

    def check(self) -> None:
        """See Conversation; both devices have every row, and every key is in the page of the device that has it."""
        session = self.session
        for one in (session.owner, session.peer):
            counts = one.counts
            assert counts.logical == counts.committed == len(self.salts)
            assert int(one.state[StateField.MIRRORED]) == counts.mirrored
            whole = counts.mirrored // BLOCK_ROWS if one.ring is not None else 0
            for block in range(whole, -(-counts.logical // BLOCK_ROWS)):
                self.check_block(one.device_block(block), block, self.salts)
            if one.ring is not None:
                for block in range(-(-counts.mirrored // BLOCK_ROWS)):
                    self.check_block(one.mirror_block(block), block, self.salts[: counts.mirrored])
        session.check_integrity()
        verify_replica(session, LAYOUT)
        self.check_pages()

    def check_pages(self) -> None:
        """Every key lies in its page, on one device."""
        keys = rows_of(range(len(self.salts)), self.salts)[LAYOUT.layers :]
        seen = 0
        for one in (self.session.owner, self.session.peer):
            for place in range(one.pages.pages):
                page = one.holdings.share.page(place)
                seen += 1
                for layer in range(LAYOUT.key_layers):
                    wanted = keys[layer][PAGE_KEYS * page : PAGE_KEYS * (page + 1)]
                    assert torch.equal(one.pages.view(layer, place).view(PAGE_KEYS, -1)[: len(wanted)], wanted), f"page {page} of {layer}"
        assert seen >= -(-len(self.salts) // PAGE_KEYS)


def _store(positions: Any, salts: Any, rows: Tensor, keys: Tensor, pages: Tensor) -> None:
    """As `memory_world.store`, where pages may be another device's."""
    parts = rows_of(list(positions), salts)
    for layer in range(LAYOUT.layers):
        store_at(rows + LAYOUT.row_offset(layer), parts[layer])
    for layer in range(LAYOUT.key_layers):
        key = parts[LAYOUT.layers + layer]
        store_at(keys + layer * LAYOUT.key_layer_bytes, key)
        here = pages[layer] != 0
        store_at(pages[layer][here], key[here])


def _replicate(rows: Tensor, keys: Tensor, to_rows: Tensor, to_keys: Tensor, to_pages: Tensor) -> None:
    for layer in range(LAYOUT.layers):
        copy_rows(rows, to_rows, LAYOUT.row.row_bytes, LAYOUT.row_offset(layer), LAYOUT.row_offset(layer))
    for layer in range(LAYOUT.key_layers):
        offset = layer * LAYOUT.key_layer_bytes
        copy_keys(keys, to_keys, LAYOUT.key, offset, offset)
        copy_keys(keys, to_pages[layer], LAYOUT.key, offset)


class PairStage(Stage):
    """See Stage; two pools, one arena or two."""

    def __init__(
        self, backend: Any, *, resident: bool = False, replicas: int = 1, blocks: int = 64, budget_bytes: int | None = None,
        chunk_rows: int = 200, hot_rows: int = 8,
    ) -> None:  # fmt: skip
        self.ledger, self.peer_ledger = Ledger(), Ledger()
        cpu = torch.device("cpu")
        self.arena = Arena(LAYOUT, blocks * LAYOUT.block_bytes, self.ledger, chunk_bytes=5 * LAYOUT.block_bytes + 1)
        self.peer_arena = self.arena
        if replicas == 2:
            self.peer_arena = Arena(LAYOUT, blocks * LAYOUT.block_bytes, self.peer_ledger, chunk_bytes=3 * LAYOUT.block_bytes)
        self.pool, self.peer_pool = Pool(cpu, budget_bytes, self.ledger), Pool(cpu, budget_bytes, self.peer_ledger)
        self.compute: Stream = backend.stream("owner.compute")
        self.peer_compute: Stream = backend.stream("peer.compute")
        self.copyback = Copyback(backend.stream("owner.copyback"))
        self.peer_copyback = (Copyback if replicas == 2 else FollowingCopyback)(backend.stream("peer.copyback"))
        if resident:
            owner: Any = Resident(LAYOUT, self.arena, self.pool, hidden=HIDDEN, share=SHARES[0])
            peer: Any = Resident(LAYOUT, self.peer_arena, self.peer_pool, hidden=HIDDEN, share=SHARES[1], mirrors=replicas == 2)
        else:
            asked: dict[str, Any] = {"hidden": HIDDEN, "hot_rows": hot_rows, "picks": PICKS, "chunk_rows": chunk_rows}
            store_of = None if replicas == 2 else lambda: FollowedBlocks(self.arena)
            owner = Offload(LAYOUT, self.arena, self.pool, **asked, share=SHARES[0])
            peer = Offload(LAYOUT, self.peer_arena, self.peer_pool, **asked, share=SHARES[1], store_of=store_of)
        self.placement = PairPlacement(owner, peer, self.peer_compute, self.peer_copyback)
        self._salt = 0

    def converse(self, tokens_max: int = 1000, session_id: str = "one") -> PairConversation:
        """See Stage."""
        return PairConversation(self, session_id, tokens_max)

    def snapshot(self) -> tuple[Any, ...]:
        """See Stage."""
        peers = self.peer_ledger.statistics(), self.peer_arena.statistics(), self.peer_pool.statistics()
        return (*super().snapshot(), *peers)
