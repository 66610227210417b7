"""Memory and its streams without a model: what the scenarios of rows stand on.

Holds a small layout, rows whose bytes are known (`Written`) and `Life`, which plays the engine for one session: steps of several query
rows with a plan and gathers for each selection group, chunks, aborted steps. Knows no orders and no scenarios.

A row's bytes depend on its position, layer and a salt drawn anew for every writing, so a row of a rolled-back step never looks like the
one that replaced it.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.chain import Chain
from engine.search.scenario import Scene
from engine.search.watch import PoisonedArena, PoisonedPool, WatchedPlacement, check_empty, same
from engine.search.watched_rounds import WatchedRounds
from kernels.address import store_at, tensor_at
from kernels.layout import BLOCK_ROWS, BlockLayout, KeyLayout, RowLayout, StateField, TableLayout
from kernels.locate import locate_new
from kernels.round import RoundPlan, begin_round
from kernels.verify import spread_rows
from memory.append import AppendChunk
from memory.copyback import Copyback
from memory.host import Registration
from memory.ledger import Ledger
from memory.placement import Offload, Placement, Resident
from memory.rounds import OffloadRounds, Picked, ResidentRounds
from memory.session import SessionMemory
from memory.table import StepTable
from streams import Event

__all__ = ["LAYOUT", "PICKS", "Ground", "Life", "Written"]

LAYOUT = BlockLayout(RowLayout("q8g64", 20, 8), KeyLayout("bf16", 8), ((0, 1), (2,)))
PICKS = 4
ROWS_MAX = 32  # query rows of a step
CHUNK_ROWS = 200
_TABLE = TableLayout(LAYOUT.key_layers)
_HIDDEN = 12


class Written:
    """Salts of a session's positions as its device work sees them. An `Expected`."""

    def __init__(self) -> None:
        self.salts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """See Expected."""
        return len(self.salts)

    def rows(self, layer: int, positions: Tensor) -> Tensor:
        """See Expected."""
        return self._bytes(positions, layer, LAYOUT.row.row_bytes)

    def keys(self, key_layer: int, positions: Tensor) -> Tensor:
        """See Expected."""
        return self._bytes(positions, 50 + key_layer, LAYOUT.key.key_bytes)

    def _bytes(self, positions: Tensor, part: int, size_bytes: int) -> Tensor:
        """uint8 [n, size_bytes] that differ between positions, parts and salts and are nowhere 0 nor 255."""
        salt = torch.tensor([self.salts[position] for position in positions.tolist()], dtype=torch.int64)
        places = torch.arange(size_bytes)
        row = positions[:, None] * 97 + part * 31 + salt[:, None] * 57
        return ((row + places * (3 + part) + (places * positions[:, None]) % 7) % 254 + 1).to(torch.uint8)

    def store(self, positions: Sequence[int], rows: Tensor, keys: Tensor, pages: Tensor) -> None:
        """Write whole rows where `rows`, `keys` (layer 0) and `pages` say, as a step's kernels do."""
        at = torch.tensor(positions, dtype=torch.int64)
        for layer in range(LAYOUT.layers):
            store_at(rows + LAYOUT.row_offset(layer), self.rows(layer, at))
        for layer in range(LAYOUT.key_layers):
            store_at(keys + layer * LAYOUT.key_layer_bytes, self.keys(layer, at))
            store_at(pages[layer], self.keys(layer, at))


class Ground:
    """Arena, pool, placement and streams of one stage, watched."""

    def __init__(
        self, scene: Scene, *, resident: bool = False, blocks: int = 40, hot_rows: int = 8, registration: Registration | None = None
    ) -> None:
        self.scene = scene
        scene.watch.layout = LAYOUT
        self.ledger = Ledger()
        chunk_bytes = 5 * LAYOUT.block_bytes + 1
        self.arena = PoisonedArena(
            LAYOUT, blocks * LAYOUT.block_bytes, self.ledger, chunk_bytes=chunk_bytes, registration=registration
        )  # fmt: skip
        self.pool = PoisonedPool(torch.device("cpu"), None, self.ledger)
        inner: Placement = (
            Resident(LAYOUT, self.arena, self.pool, hidden=_HIDDEN)
            if resident
            else Offload(LAYOUT, self.arena, self.pool, hidden=_HIDDEN, hot_rows=hot_rows, picks=PICKS, chunk_rows=CHUNK_ROWS)
        )
        self.placement = WatchedPlacement(inner, scene.watch)
        rounds = ResidentRounds(LAYOUT, _TABLE) if resident else OffloadRounds(LAYOUT, _TABLE)
        self.rounds = WatchedRounds(rounds, scene.watch, LAYOUT)
        self.compute, self.selection, self.prefetch = (scene.backend.stream(name) for name in ("compute", "selection", "prefetch"))
        self.copyback = Copyback(scene.backend.stream("copyback"))
        self._salt = 0
        scene.at_end.append(self._check_end)

    def salt(self) -> int:
        """One never used before."""
        self._salt += 1
        return self._salt

    def _check_end(self) -> None:
        if self.rounds.wrong:
            raise self.rounds.wrong[0]
        check_empty(self.placement, self.arena, self.pool, self.ledger)


class Life:
    """One session, played."""

    def __init__(self, ground: Ground, name: str, tokens_max: int, begins: tuple["Life", int] | None = None) -> None:
        """Args: begins: whose first rows it has from the start, and how many. Raises DoesNotFit; nothing is held then."""
        self.ground = ground
        self.rng: random.Random = ground.scene.rng
        self.tokens_max = tokens_max
        self.salts: list[int] = []  # of every logical position, as the host sees it
        self.written = Written()
        if begins is None:
            self.session: SessionMemory = ground.placement.open(name, tokens_max)
        else:
            source, rows = begins
            self.session = ground.placement.fork(source.session, name, tokens_max, rows, compute=ground.compute, copyback=ground.copyback)
            self.salts = source.salts[:rows]
            self.written.salts = tuple(self.salts)
        ground.scene.watch.expect(name, self.written)
        self._table = StepTable(1, _TABLE)
        self._plans = [RoundPlan.empty(ROWS_MAX, PICKS) for _ in LAYOUT.groups]
        self._compact = torch.zeros((LAYOUT.layers, ROWS_MAX, PICKS, LAYOUT.row.row_bytes), dtype=torch.uint8)
        self._place_of = torch.full((ROWS_MAX,), -1, dtype=torch.int32)
        self._mirrored = torch.zeros(1, dtype=torch.int64)
        self._last: Event[Any] | None = None

    # steps

    def fork(self, name: str, rows: int, tokens_max: int) -> "Life":
        """A session that begins with the first `rows` committed rows of this one, whatever is in flight. Raises DoesNotFit."""
        return Life(self.ground, name, tokens_max, (self, rows))

    def submit_step(self, rows: int, *, fails_at: int | None = None) -> Event[None]:
        """Submit a step of `rows` rows: written, planned, gathered and read, layer by layer; not followed yet.

        Args: fails_at: the layer whose gather raises instead.
        """
        session, ground, first = self.session, self.ground, len(self.salts)
        session.ensure_rows(first + rows, ground.compute)
        self.salts += [ground.salt() for _ in range(rows)]
        seen = tuple(self.salts)
        rewrite = self._table.rewrite([session.table_row(rows)])
        table_written = ground.compute.submit(rewrite, label="table.rewrite", session=session.session_id)
        chain = Chain(session.session_id, [table_written] if self._last is None or self._last.done() else [table_written, self._last])
        chain.submit(ground.compute, lambda: self._begin(seen, rows), label="step.begin", writes=(self._mirrored,))
        written = chain.submit(ground.compute, lambda: self._write(first, rows), label="step.write")
        for group, layers in enumerate(LAYOUT.groups):
            picks = self._draw_picks(first, rows)
            plan = self._plans[group]
            planned = chain.submit(
                ground.selection, lambda group=group, picks=picks: self._plan(group, picks), label=f"group.{group}.plan",  # type: ignore[misc]
                after=[written], writes=[plan.selection, plan.slot, plan.fill, plan.miss, plan.source],
            )  # fmt: skip
            for place, layer in enumerate(layers):
                picked = Picked(self._table.tensor, group, place, layer, self._place_of, plan)
                gathered = chain.submit(
                    ground.prefetch if place else ground.selection, partial(self._gather, picked, fails_at), label=f"layer.{layer}.gather",
                    after=[planned], writes=[self._compact[layer]],
                )  # fmt: skip
                chain.submit(
                    ground.compute, partial(ground.rounds.check_copy, picked, self._compact[layer]), label=f"layer.{layer}.read",
                    after=[gathered], reads=[self._compact[layer]],
                )  # fmt: skip
        done = chain.submit(ground.compute, lambda: self._finish(rows), label="step.finish")
        session.advance(rows)
        session.operations.hold(done)
        self._last = done
        return done

    def _begin(self, seen: tuple[int, ...], rows: int) -> None:
        self.written.salts = seen
        self._place_of.fill_(-1)
        self._place_of[:rows] = 0
        position, token, judged, bad_layer = torch.zeros((4, 1), dtype=torch.int64)
        spread_rows(self._table.tensor, torch.zeros(1, dtype=torch.int32), position, token, self._mirrored, judged, bad_layer)
        begin_round(self._table.tensor)

    def _write(self, first: int, rows: int) -> None:
        logical = int(self.session.state[StateField.LOGICAL])
        assert logical == first, f"the device has {logical} rows, the host submitted a step at {first}"
        positions = torch.arange(first, first + rows)
        destinations = locate_new(self._table.tensor, _TABLE, LAYOUT, torch.zeros(rows, dtype=torch.int32), positions)
        self.written.store(positions.tolist(), *destinations)

    def _plan(self, group: int, picks: Tensor) -> None:
        self._plans[group].selection.copy_(picks)
        self.ground.rounds.plan(self._table.tensor, group, self._place_of, self._mirrored, self._plans[group])

    def _gather(self, picked: Picked, fails_at: int | None) -> None:
        if picked.layer == fails_at:
            raise RuntimeError(f"layer {picked.layer} fails as planned")
        self.ground.rounds.gather(picked, self._compact[picked.layer])

    def _finish(self, rows: int) -> None:
        self.session.state[StateField.LOGICAL] += rows

    def _draw_picks(self, first: int, rows: int) -> Tensor:
        """A selection for each row, int32 [ROWS_MAX, PICKS]: old rows that several rows share, recent ones, tails of -1."""
        picks = torch.full((ROWS_MAX, PICKS), -1, dtype=torch.int32)
        shared = [self.rng.randrange(first + 1) for _ in range(PICKS)]
        for row in range(rows):
            last = first + row
            drawn = {self.rng.choice((self.rng.choice(shared), self.rng.randrange(last + 1), last)) for _ in range(PICKS)}
            kept = sorted(drawn)[: self.rng.choice((PICKS, PICKS, PICKS, PICKS - 1, 0))]
            picks[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        return picks

    async def decode(self, rows: int, each: int = 4) -> None:
        """Steps of `each` rows until `rows` were added, each followed and committed, with room waited for."""
        while rows > 0:
            step = min(each, rows, ROWS_MAX)
            while not self.session.room(len(self.salts), step):
                await self.session.operations.settle()
                assert self.session.room(len(self.salts), step), f"no room with nothing in flight: {self.session.counts!r}"
            event = self.submit_step(step)
            await event
            self.session.commit(step, self.ground.copyback, event)
            rows -= step

    async def decode_ahead(self, rows: int, each: int) -> None:
        """As `decode`, but the next step is submitted before the one before was followed, as the engine does."""
        flight: tuple[int, Event[None]] | None = None
        while rows > 0 or flight is not None:
            previous, flight, step = flight, None, min(each, rows)
            if step and self.session.room(len(self.salts), step):
                flight = (step, self.submit_step(step))
                rows -= step
            if previous is not None:
                await previous[1]
                self.session.commit(previous[0], self.ground.copyback, previous[1])
            elif flight is None:
                await self.session.operations.settle()
                assert self.session.room(len(self.salts), step), f"no room with nothing in flight: {self.session.counts!r}"

    def roll_back(self, kept: int) -> Event[None]:
        """Cut the rows that are not committed, but for the first `kept` rows in all."""
        event = self.session.truncate(kept, self.ground.compute)
        del self.salts[kept:]
        return event

    async def abort_step(self, rows: int, fails_at: int) -> None:
        """A step fails at a layer, with another one behind it: its slots are cleared, its rows taken back, and the session goes on."""
        first = len(self.salts)
        failing = self.submit_step(rows, fails_at=fails_at)
        behind = self.submit_step(rows) if self.session.room(len(self.salts), rows) else failing
        await failing.wait_done()
        await behind.wait_done()
        assert failing.error() is not None
        assert behind.error() is not None
        ground = self.ground
        fences = [stream.submit(lambda: None, label="fence") for stream in (ground.selection, ground.prefetch)]
        cleared = ground.compute.submit(self._clear, label="step.abort", session=self.session.session_id, after=fences)
        self._last = None
        await self.roll_back(first)
        await cleared  # if that failed too, maps claim rows that slots may not hold: nobody goes on with such a session

    def _clear(self) -> None:
        for group in range(len(LAYOUT.groups)):
            self.ground.rounds.clear(self._table.tensor, group, self._place_of, self._plans[group])

    # chunks

    def submit_chunk(self, rows: int) -> tuple[AppendChunk, Event[None], list[int]]:
        """Open a chunk and submit its writes; returns it, its last event and the salts it wrote."""
        chunk = self.session.begin_append(rows, self.ground.compute)
        salts = [self.ground.salt() for _ in range(rows)]
        seen = (*self.salts[: chunk.first], *salts)

        def write() -> None:
            self.written.salts = seen
            positions = range(chunk.first, chunk.first + rows)
            self.written.store(positions, chunk.row_destinations, chunk.key_destinations, chunk.page_destinations)
            self._check_addresses(chunk)

        event = self.ground.compute.submit(write, label="append.write", session=self.session.session_id, after=[chunk.ready])
        return chunk, event, salts

    def _check_addresses(self, chunk: AppendChunk) -> None:
        """Every row of history and chunk is where the chunk's block addresses say."""
        for number, address in enumerate(chunk.block_addresses.tolist()):
            block = tensor_at(address, (LAYOUT.block_bytes,), torch.uint8)
            positions = torch.arange(BLOCK_ROWS * number, min(BLOCK_ROWS * (number + 1), chunk.first + chunk.rows))
            for layer in range(LAYOUT.layers):
                start = LAYOUT.row_offset(layer)
                found = block[start : start + LAYOUT.layer_bytes].view(BLOCK_ROWS, -1)[: positions.numel()]
                same(found, self.written.rows(layer, positions), positions, f"a chunk's history, block {number}, layer {layer}")

    async def append(self, rows: int) -> None:
        """One chunk, begun, written, finished and awaited."""
        chunk, event, salts = self.submit_chunk(rows)
        await chunk.finish(self.ground.compute, self.ground.copyback, event)
        self.salts += salts

    # the end

    def check(self) -> None:
        """Everything, with nothing in flight."""
        assert len(self.salts) == self.session.counts.logical, f"{len(self.salts)} salts, {self.session.counts!r}"
        self.written.salts = tuple(self.salts)
        self.ground.scene.watch.check_session(self.session)
