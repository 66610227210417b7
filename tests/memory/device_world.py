"""A life of one session over the tensors of any device, its every random byte known: the same script runs on the CPU and on a card.

Rows are written by views and read back by address through the kernels, with two steps in flight as the engine has them. What is read
depends on the script alone, so two devices must give the same bytes.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.gather import gather_blocks, gather_rows
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, StateField
from kernels.round import RoundPlan, begin_round
from memory import AppendChunk, Arena, Copyback, Ledger, Offload, Placement, Pool, Resident, barrier, registration_for, verify_mirror
from memory.backing import Slabs
from memory.copyback import copy_bytes
from memory.rounds import OffloadRounds, Picked, ResidentRounds, Rounds
from memory.staging import pinned
from memory.table import StepTable
from streams import Backend, CpuBackend, Event
from streams.device import DeviceBackend
from tests.memory.memory_world import HIDDEN, LAYOUT, TABLE_LAYOUT, parts_of

PICKS = 24
HOT_ROWS = 32
CHUNK_ROWS = 200
WIDTHS = [LAYOUT.row.row_bytes] * LAYOUT.layers + [LAYOUT.key.key_bytes] * LAYOUT.key_layers
ROW_BYTES, KEY_BYTES = LAYOUT.row.row_bytes, LAYOUT.key.key_bytes


class DeviceLife:
    """One session on one stage. `truth`: uint8 [sum(WIDTHS)] of every logical position, its rows and then its keys."""

    def __init__(
        self, device: torch.device, *, resident: bool, tokens_max: int, seed: int = 0, late: Callable[[], None] | None = None
    ) -> None:
        """Args: late: called before the first buffer is taken, to keep the default stream busy meanwhile."""
        self.device = device
        self.backend: Backend = CpuBackend() if device.type == "cpu" else DeviceBackend(device)
        self.ledger = Ledger()
        blocks = 5 * -(-tokens_max // BLOCK_ROWS)  # room to grow, and a resident session's mirror
        chunk_bytes = 5 * LAYOUT.block_bytes + 1
        self.arena = Arena(LAYOUT, blocks * LAYOUT.block_bytes, self.ledger, chunk_bytes=chunk_bytes, registration=registration_for(device))
        if late is not None:
            late()
        self.pool = Pool(device, None, self.ledger, backing=Slabs(device, slab_bytes=300_000))  # a few spans of pages, a dozen blocks
        self.placement: Placement = (
            Resident(LAYOUT, self.arena, self.pool, hidden=HIDDEN)
            if resident
            else Offload(LAYOUT, self.arena, self.pool, hidden=HIDDEN, hot_rows=HOT_ROWS, picks=PICKS, chunk_rows=CHUNK_ROWS)
        )
        self.rounds: Rounds = ResidentRounds(LAYOUT, TABLE_LAYOUT) if resident else OffloadRounds(LAYOUT, TABLE_LAYOUT)
        self.compute, self.copyback = self.backend.stream("compute"), Copyback(self.backend.stream("copyback"))
        self.session = self.placement.open("one", tokens_max)
        self.table = StepTable(1, TABLE_LAYOUT, device)
        self.plans = [RoundPlan.empty(1, PICKS, device) for _ in LAYOUT.groups]
        self.place_of = torch.zeros(1, dtype=torch.int32, device=device)
        self.truth: list[Tensor] = []
        self.read: list[Tensor] = []  # everything that was read back, in order
        self._bytes = torch.Generator().manual_seed(seed)
        self._draw = random.Random(seed)

    def fresh(self, rows: int) -> Tensor:
        """Random bytes of new positions, on the host; zero bytes and 255 come up like any other."""
        made = torch.randint(0, 256, (rows, sum(WIDTHS)), dtype=torch.uint8, generator=self._bytes)
        self.truth += list(made)
        return pinned(made, self.device)

    def arriving(self, like: Tensor) -> Tensor:
        """A host tensor of that shape for bytes to arrive in, with poison until they did."""
        return torch.full(like.shape, 0xEE, dtype=torch.uint8, pin_memory=self.device.type != "cpu")

    def write(self, first: int, fresh: Tensor, block_of: Callable[[int], Tensor]) -> None:
        """Work: new rows from position `first` on to their blocks and key pages."""
        rows = fresh.to(self.device, non_blocking=True)
        position, end = first, first + rows.shape[0]
        while position < end:
            block, row = divmod(position, BLOCK_ROWS)
            count = min(BLOCK_ROWS - row, end - position)
            parts = rows[position - first : position - first + count].split(WIDTHS, dim=1)
            for target, part in zip(parts_of(block_of(block)), parts, strict=True):
                target[row : row + count].copy_(part)
            page, place = divmod(position, PAGE_KEYS)
            for key_layer in range(LAYOUT.key_layers):
                keys = self.session.pages.view(key_layer, page).view(PAGE_KEYS, KEY_BYTES)
                keys[place : place + count].copy_(parts[LAYOUT.layers + key_layer])
            position += count

    def submit_step(self, rows: int) -> tuple[Event[Any], Tensor, Tensor]:
        """A step that writes `rows` rows and gathers random picks of all rows; returns its event, what it reads and what it must read."""
        session, first = self.session, len(self.truth)
        session.ensure_rows(first + rows, self.compute)
        session.advance(rows)
        write_table = self.table.rewrite([session.table_row(rows)])
        fresh = self.fresh(rows)
        asked = [position for position in range(first + rows) if position % 9 == 0 or position > first - 8]  # few enough to be hit again
        picks = sorted(self._draw.sample(asked, min(PICKS - 3, len(asked))))
        chosen = torch.full((1, PICKS), -1, dtype=torch.int32)
        chosen[0, : len(picks)] = torch.tensor(picks)
        selection = pinned(chosen, self.device)
        wanted = torch.zeros((LAYOUT.layers, PICKS, ROW_BYTES), dtype=torch.uint8)
        wanted[:, : len(picks)] = torch.stack([self.truth[position] for position in picks])[:, : LAYOUT.layers * ROW_BYTES].view(
            len(picks), LAYOUT.layers, ROW_BYTES
        ).transpose(0, 1)  # fmt: skip
        found = self.arriving(wanted)

        def work() -> None:
            write_table()
            mirrored = session.state[StateField.MIRRORED : StateField.MIRRORED + 1] // BLOCK_ROWS * BLOCK_ROWS
            self.write(first, fresh, session.device_block)
            compact = torch.empty((LAYOUT.layers, 1, PICKS, ROW_BYTES), dtype=torch.uint8, device=self.device)
            begin_round(self.table.tensor)
            for group, (layers, plan) in enumerate(zip(LAYOUT.groups, self.plans, strict=True)):
                plan.selection.copy_(selection, non_blocking=True)
                self.rounds.plan(self.table.tensor, group, self.place_of, mirrored, plan)
                for number, layer in enumerate(layers):
                    self.rounds.gather(Picked(self.table.tensor, group, number, layer, self.place_of, plan), compact[layer])
            copy_bytes(found, compact[:, 0])
            session.state[StateField.LOGICAL : StateField.LOGICAL + 1].add_(rows)

        event = self.compute.submit(work, label="step", session=session.session_id)
        session.operations.hold(event)
        return event, found, wanted

    async def decode(self, rows: int, each: int) -> None:
        """Steps of `each` rows, the next submitted before the one before is followed, with room waited for."""
        flying: list[tuple[int, tuple[Event[Any], Tensor, Tensor]]] = []
        while rows > 0 or flying:
            step = min(each, rows)
            if step and len(flying) < 2 and self.session.room(len(self.truth), step):
                flying.append((step, self.submit_step(step)))
                rows -= step
            elif flying:
                count, (event, found, wanted) = flying.pop(0)
                await event
                self.session.commit(count, self.copyback, event)
                self.check(found, wanted, "a step")
            else:
                await self.session.operations.settle()
                assert self.session.room(len(self.truth), step), f"no room with nothing in flight: {self.session.counts!r}"

    def check(self, found: Tensor, wanted: Tensor, what: str) -> None:
        """Bytes that were read are those that were written; kept for the comparison of devices."""
        assert torch.equal(found, wanted), (
            f"{what} at {len(self.truth)} rows read other bytes in {(found != wanted).nonzero().tolist()[:4]}"
        )
        self.read.append(found.clone())

    def submit_chunk(self, rows: int) -> tuple[AppendChunk, Event[Any], list[tuple[Tensor, Tensor]]]:
        """A chunk's writes, and reads through all its addresses: layer 0 of all history, new rows, their keys in blocks and pages."""
        session = self.session
        chunk = session.begin_append(rows, self.compute)
        first, end, tail = chunk.first, chunk.first + rows, chunk.first // BLOCK_ROWS
        ring = self.placement.append_ring if isinstance(self.placement, Offload) else None
        fresh = self.fresh(rows)
        written = torch.stack(self.truth[first:])
        parts = written.split(WIDTHS, dim=1)
        last = LAYOUT.layers + LAYOUT.key_layers - 1
        wanted = [torch.stack(self.truth)[:, :ROW_BYTES], parts[LAYOUT.layers - 1], parts[LAYOUT.layers], parts[last]]
        found = [self.arriving(values) for values in wanted]

        def work() -> None:
            self.write(first, fresh, session.device_block if ring is None else lambda block: ring.block_view(block - tail))
            reads = [torch.empty(values.shape, dtype=torch.uint8, device=self.device) for values in wanted]
            gather_blocks(chunk.block_addresses, 0, end, ROW_BYTES, reads[0])
            gather_rows(chunk.row_destinations + LAYOUT.row_offset(LAYOUT.layers - 1), ROW_BYTES, reads[1])
            gather_rows(chunk.key_destinations, KEY_BYTES, reads[2])
            gather_rows(chunk.page_destinations[-1], KEY_BYTES, reads[3])
            for target, source in zip(found, reads, strict=True):
                copy_bytes(target, source)

        event = self.compute.submit(work, label="chunk", session=session.session_id, after=[chunk.ready])
        return chunk, event, list(zip(found, wanted, strict=True))

    async def append(self, rows: int) -> None:
        """One chunk, awaited to its end."""
        chunk, event, reads = self.submit_chunk(rows)
        await chunk.finish(self.compute, self.copyback, event)
        for number, (found, wanted) in enumerate(reads):
            self.check(found, wanted, f"a chunk's read {number}")

    async def abandon(self, rows: int) -> None:
        """One chunk, dropped while its writes are in flight."""
        before = len(self.truth)
        chunk, event, _ = self.submit_chunk(rows)
        chunk.abandon([event])
        del self.truth[before:]

    async def rollback(self, kept: int) -> None:
        """Two steps of 4 rows, of which the host keeps `kept` rows."""
        rows = len(self.truth) + kept
        self.submit_step(4)
        self.submit_step(4)
        event = self.session.truncate(rows, self.compute)
        del self.truth[rows:]
        self.session.commit(kept, self.copyback, event)

    async def truncate(self, rows: int) -> None:
        """A cut anywhere, with nothing in flight before it."""
        await self.session.operations.settle()
        self.session.truncate(rows, self.compute)
        del self.truth[rows:]

    async def grow(self, tokens_max: int) -> None:
        """A longer turn: new tables and hot caches, used at once."""
        await self.session.operations.settle()
        assert self.placement.grow(self.session, tokens_max)

    async def barrier(self) -> None:
        """Everything is in RAM, byte for byte, on host and device alike."""
        assert await barrier(self.session, self.copyback) == len(self.truth)
        self.session.check_integrity()
        verify_mirror(self.session, LAYOUT)
        for block in range(-(-len(self.truth) // BLOCK_ROWS)):
            wanted = torch.stack(self.truth[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS])
            parts = parts_of(self.session.mirror_block(block))
            self.check(torch.cat([part[: len(wanted)] for part in parts], dim=1), wanted, f"block {block} in RAM")

    async def play(self, moves: int, rows_max: int) -> None:
        """Random moves, the same for every device, and a barrier at the end."""
        for _ in range(moves):
            move = self._draw.choice(["decode", "decode", "append", "rollback", "truncate", "barrier", "abandon"])
            left = rows_max - len(self.truth)
            rows, each, kept = self._draw.choice([1, 5, 63, 64, 130, 200]), self._draw.choice([1, 4, 16]), self._draw.randrange(5)
            cut = self._draw.randrange(len(self.truth) + 1)
            if move == "decode":
                await self.decode(min(left, rows, 70), each)
            elif move == "append" and left:
                await self.append(min(left, rows))
            elif move == "abandon" and left:
                await self.abandon(min(left, rows))
            elif move == "rollback" and left > 8:
                await self.session.operations.settle()
                await self.rollback(kept)
            elif move == "truncate":
                await self.truncate(cut)
            elif move == "barrier":
                await self.barrier()
        await self.barrier()

    async def close(self) -> None:
        """Give everything back and assert that nothing is left."""
        await self.session.operations.settle()
        self.session.close()
        self.placement.close()
        await self.backend.close()
        assert self.pool.statistics().allocated_bytes == self.pool.statistics().reserved_bytes == 0
        self.arena.close()
        assert self.ledger.total("host").allocated_bytes == self.ledger.total("device").allocated_bytes == 0
