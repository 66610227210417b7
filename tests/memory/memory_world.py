"""A small stage on CPU streams whose rows are known: what tests of sessions, copies and barriers share.

`Conversation` plays the engine: it submits steps that write rows by the real step table and kernels, follows them, and knows for every
position which bytes must be there. A row's bytes depend on its position, layer and a salt drawn anew for every writing, so a row of a
rolled-back step never looks like the one that replaced it.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.address import store_at, tensor_at
from kernels.layout import BLOCK_ROWS, BlockLayout, KeyLayout, RowLayout, StateField, TableLayout
from kernels.locate import locate_new
from memory import Arena, Copyback, Ledger, Offload, Placement, Pool, Resident, SessionMemory, barrier
from memory.append import AppendChunk
from streams import Event, Stream

LAYOUT = BlockLayout(RowLayout("q8g64", 20, 8), KeyLayout("bf16", 8), ((0, 1), (2,)))
TABLE_LAYOUT = TableLayout(LAYOUT.key_layers)
HIDDEN = 12
PICKS = 4


def pattern(positions: Tensor, part: int, size_bytes: int, salts: Tensor) -> Tensor:
    """uint8 [n, size_bytes] that differs between positions, parts and salts and is nowhere 0."""
    places = torch.arange(size_bytes)
    row = positions[:, None] * 97 + part * 31 + salts[:, None] * 57
    return ((row + places * (3 + part) + (places * positions[:, None]) % 7) % 255 + 1).to(torch.uint8)


def rows_of(positions: Sequence[int], salts: Sequence[int]) -> list[Tensor]:
    """Each layer's rows, uint8 [n, row_bytes], then each key layer's keys, uint8 [n, key_bytes]."""
    at, salt = torch.tensor(positions, dtype=torch.int64), torch.tensor(salts, dtype=torch.int64)
    rows = [pattern(at, layer, LAYOUT.row.row_bytes, salt) for layer in range(LAYOUT.layers)]
    return rows + [pattern(at, 50 + layer, LAYOUT.key.key_bytes, salt) for layer in range(LAYOUT.key_layers)]


def parts_of(block: Tensor) -> list[Tensor]:
    """A block cut as `rows_of` orders it, each [64, unit]."""
    starts = [LAYOUT.row_offset(layer) for layer in range(LAYOUT.layers)]
    parts = [block[start : start + LAYOUT.layer_bytes].view(BLOCK_ROWS, -1) for start in starts]
    starts = [LAYOUT.key_offset(layer) for layer in range(LAYOUT.key_layers)]
    return parts + [block[start : start + LAYOUT.key_layer_bytes].view(BLOCK_ROWS, -1) for start in starts]


def store(positions: Sequence[int], salts: Sequence[int], rows: Tensor, keys: Tensor, pages: Tensor) -> None:
    """Write whole rows where `rows`, `keys` (layer 0) and `pages` say, as a step's kernels do."""
    parts = rows_of(positions, salts)
    for layer in range(LAYOUT.layers):
        store_at(rows + LAYOUT.row_offset(layer), parts[layer])
    for layer in range(LAYOUT.key_layers):
        store_at(keys + layer * LAYOUT.key_layer_bytes, parts[LAYOUT.layers + layer])
        store_at(pages[layer], parts[LAYOUT.layers + layer])


class Conversation:
    """One session and what its rows must be."""

    def __init__(self, stage: "Stage", session_id: str, tokens_max: int) -> None:
        self.stage = stage
        self.session: SessionMemory = stage.placement.open(session_id, tokens_max)
        self.salts: list[int] = []  # of every logical position

    def submit_step(self, rows: int = 1) -> Event[None]:
        """Submit a decode step of `rows` rows; not followed yet."""
        session, first = self.session, len(self.salts)
        session.ensure_rows(first + rows, self.stage.compute)
        session.advance(rows)
        table = torch.tensor([session.table_row(rows)], dtype=torch.int64)
        salts = [self.stage.next_salt() for _ in range(rows)]
        self.salts += salts
        state = session.state

        def work() -> None:
            logical = int(state[StateField.LOGICAL])
            assert logical == first, f"the device has {logical} rows, the host submitted a step at {first}"
            positions = torch.arange(logical, logical + rows)
            destinations = locate_new(table, TABLE_LAYOUT, LAYOUT, torch.zeros(rows, dtype=torch.int32), positions)
            store(positions.tolist(), salts, *destinations)
            state[StateField.LOGICAL] += rows

        written = [self._rows_written(position) for position in range(first, first + rows)]
        event = self.stage.compute.submit(
            work, label="step", session=session.session_id, writes=[view for views in written for view in views]
        )
        session.operations.hold(event)
        return event

    def _rows_written(self, position: int) -> list[Tensor]:
        """The bytes that a step at `position` writes, for the stream to guard."""
        session, row = self.session, position % BLOCK_ROWS
        views = [part[row] for part in parts_of(session.device_block(position // BLOCK_ROWS))]
        for layer in range(LAYOUT.key_layers):
            views.append(session.pages.view(layer, position // 1024).view(1024, -1)[position % 1024])
        return views

    async def decode(self, rows: int, each: int = 8) -> None:
        """Steps of `each` rows until `rows` rows were added, each followed and committed, with room waited for."""
        while rows > 0:
            step = min(each, rows)
            while not self.session.room(len(self.salts), step):
                await self.session.operations.settle()
                assert self.session.room(len(self.salts), step), f"no room with nothing in flight: {self.session.counts!r}"
            event = self.submit_step(step)
            await event
            self.session.commit(step, self.stage.copyback, event)
            rows -= step

    def submit_chunk(self, rows: int, work: Callable[[], None] | None = None) -> tuple[AppendChunk, Event[None], list[int]]:
        """Open a chunk and submit its writes (or `work` instead); returns it, its last event and the salts it wrote."""
        chunk = self.session.begin_append(rows, self.stage.compute)
        salts = [self.stage.next_salt() for _ in range(rows)]
        positions = range(chunk.first, chunk.first + rows)

        def write() -> None:
            store(positions, salts, chunk.row_destinations, chunk.key_destinations, chunk.page_destinations)
            self.check_addresses(chunk, [*self.salts[: chunk.first], *salts])

        event = self.stage.compute.submit(
            work or write, label="chunk", session=self.session.session_id, after=[chunk.ready], reads=self._read_by(chunk),
            writes=self._written_by(chunk),
        )  # fmt: skip
        return chunk, event, salts

    def _read_by(self, chunk: AppendChunk) -> list[Tensor]:
        """The blocks below the chunk's own, wherever they are: RAM, or the ring for those not mirrored yet."""
        session = self.session
        whole = session.counts.mirrored // BLOCK_ROWS
        return [
            session.device_block(block) if session.ring is None or block >= whole else session.mirror_block(block)
            for block in range(chunk.first // BLOCK_ROWS)
        ]

    def _written_by(self, chunk: AppendChunk) -> list[Tensor]:
        """The blocks the chunk writes."""
        session, tail = self.session, chunk.first // BLOCK_ROWS
        blocks = range(tail, -(-(chunk.first + chunk.rows) // BLOCK_ROWS))
        if isinstance(self.stage.placement, Offload):
            return [self.stage.placement.append_ring.block_view(block - tail) for block in blocks]
        return [session.device_block(block) for block in blocks]

    def check_addresses(self, chunk: AppendChunk, salts: Sequence[int]) -> None:
        """Every row of history and chunk is where the chunk's block addresses say."""
        for block, address in enumerate(chunk.block_addresses.tolist()):
            self.check_block(tensor_at(address, (LAYOUT.block_bytes,), torch.uint8), block, salts)

    async def append(self, rows: int) -> None:
        """One chunk, begun, written, finished and awaited."""
        chunk, event, salts = self.submit_chunk(rows)
        await chunk.finish(self.stage.compute, self.stage.copyback, event)
        self.salts += salts

    async def truncate(self, rows: int) -> None:
        """Cut, with the device's part awaited."""
        event = self.session.truncate(rows, self.stage.compute)
        del self.salts[rows:]
        await event

    def check_block(self, block: Tensor, number: int, salts: Sequence[int]) -> None:
        """All rows of `salts` that lie in block `number` have their bytes."""
        positions = range(BLOCK_ROWS * number, min(BLOCK_ROWS * (number + 1), len(salts)))
        expected = rows_of(positions, salts[BLOCK_ROWS * number : BLOCK_ROWS * (number + 1)])
        for part, (found, wanted) in enumerate(zip(parts_of(block), expected, strict=True)):
            wrong = (found[: len(positions)] != wanted).any(1).nonzero().flatten() + BLOCK_ROWS * number
            assert not wrong.numel(), f"block {number}, part {part}: positions {wrong.tolist()} have other bytes"

    def check(self) -> None:
        """With nothing in flight: counts agree, every row is readable where a step would read it, mirrored rows are in RAM."""
        session = self.session
        counts = session.counts
        assert counts.logical == counts.committed == len(self.salts)
        assert int(session.state[StateField.LOGICAL]) == counts.logical
        assert int(session.state[StateField.MIRRORED]) == counts.mirrored
        session.check_integrity()
        whole = counts.mirrored // BLOCK_ROWS if session.ring is not None else 0
        for block in range(-(-counts.mirrored // BLOCK_ROWS)):
            self.check_block(session.mirror_block(block), block, self.salts[: counts.mirrored])
        for block in range(whole, -(-counts.logical // BLOCK_ROWS)):
            self.check_block(session.device_block(block), block, self.salts)
        keys = rows_of(range(len(self.salts)), self.salts)[LAYOUT.layers :]
        for page in range(session.pages.pages):
            for layer in range(LAYOUT.key_layers):
                wanted = keys[layer][1024 * page : 1024 * (page + 1)]
                assert torch.equal(session.pages.view(layer, page).view(1024, -1)[: len(wanted)], wanted), f"page {page} of {layer}"


class Stage:
    """Arena, pool, placement and streams of one stage."""

    def __init__(
        self,
        backend: Any,
        *,
        resident: bool = False,
        blocks: int = 64,
        budget_bytes: int | None = None,
        chunk_rows: int = 200,
        hot_rows: int = 8,
    ) -> None:
        self.ledger = Ledger()
        self.arena = Arena(LAYOUT, blocks * LAYOUT.block_bytes, self.ledger, chunk_bytes=5 * LAYOUT.block_bytes + 1)
        self.pool = Pool(torch.device("cpu"), budget_bytes, self.ledger)
        self.placement: Placement = (
            Resident(LAYOUT, self.arena, self.pool, hidden=HIDDEN)
            if resident
            else Offload(LAYOUT, self.arena, self.pool, hidden=HIDDEN, hot_rows=hot_rows, picks=PICKS, chunk_rows=chunk_rows)
        )
        self.compute: Stream = backend.stream("compute")
        self.copyback = Copyback(backend.stream("copyback"))
        self._salt = 0

    def next_salt(self) -> int:
        """A salt never used before."""
        self._salt += 1
        return self._salt

    def converse(self, tokens_max: int = 1000, session_id: str = "one") -> Conversation:
        """Open a session and play its engine."""
        return Conversation(self, session_id, tokens_max)

    def snapshot(self) -> tuple[Any, ...]:
        """What must be as before when nothing remains held."""
        return self.ledger.statistics(), self.arena.statistics(), self.pool.statistics()

    def check(self) -> None:
        """Integrity of what sessions share."""
        self.arena.check_integrity()
        self.pool.check_integrity()
        held = self.pool.statistics()
        assert self.ledger.total("device").allocated_bytes == held.allocated_bytes
        assert self.ledger.total("device").payload_bytes == held.payload_bytes


_gates: list[threading.Event] = []


def hold(stream: Stream) -> Callable[[], None]:
    """Hold a CPU stream: what is submitted from now on waits until the returned function is called, or the test ends."""
    gate = threading.Event()
    _gates.append(gate)
    stream.submit(gate.wait, label="gate")
    return gate.set


def release_all() -> None:
    """Let every held stream go on, so that a failing test ends instead of waiting for its own gate."""
    while _gates:
        _gates.pop().set()


async def live(conversation: Conversation, stage: Stage, draw: random.Random) -> None:
    """One random move of a session's life, of at most 600 rows."""
    session: SessionMemory = conversation.session
    move = draw.choice(["decode", "decode", "append", "rollback", "truncate", "barrier", "abandon"])
    left = 600 - len(conversation.salts)
    if move == "decode":
        await conversation.decode(min(left, draw.choice([1, 5, 63, 64, 65])), each=draw.choice([1, 4, 16]) * 4)
    elif move == "append" and left:
        await conversation.append(min(left, draw.choice([1, 63, 64, 65, 130, 200])))
    elif move == "rollback" and left > 8 and session.room(len(conversation.salts), 8):
        kept = len(conversation.salts) + draw.randrange(4)
        conversation.submit_step(4)
        conversation.submit_step(4)
        event = session.truncate(kept, stage.compute)
        del conversation.salts[kept:]
        session.commit(kept - session.counts.committed, stage.copyback, event)
    elif move == "truncate":
        await session.operations.settle()
        await conversation.truncate(draw.randrange(len(conversation.salts) + 1))
    elif move == "barrier":
        assert await barrier(session, stage.copyback) == len(conversation.salts)
        conversation.check()
    elif move == "abandon" and left:
        chunk, written, _ = conversation.submit_chunk(min(left, draw.randrange(1, 200)))
        chunk.abandon([written])
