"""A stage before the last, in the process of the last: what `stage_calls.py` asks, done on a `Stage` of its own.

Holds its sessions' memories by id, the buffers of its steps and who is in their tables. Knows no requests and decides nothing.

Invariants:
1. A step's operations are on this stage's streams; what other stages do it waits for by events alone. Where sessions stand behind a step is
   written on a stream of its own, so that a step of other sessions does not wait for it.
2. A table is rewritten behind what the step before it left to be written through it.
Source: design, sections 2 and 13.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from engine.append import AppendRun
from engine.append_scratch import Scratch
from engine.archive.checksums import weights_of
from engine.batches import reach
from engine.decode import DecodeStep
from engine.pair_append import append_run
from engine.pair_decode import decode_step
from engine.protocol import SyntheticHistory
from engine.stage import Stage
from engine.stage_calls import Block, Carried, MemoryId, Standing, StepCall, StepShape
from engine.synthetic import HistoryFill
from engine.unit import Unit
from kernels.layout import StateField
from kernels.verify import write_standing
from memory.errors import DoesNotFit
from memory.fork import check_cut
from memory.image import Loading, read_out, rows_in_ram
from memory.operations import Operations
from memory.placement import PlacementStatistics
from memory.session import SessionMemory, SessionStatistics
from memory.table import StepTable
from streams import Event, Full, Stream

__all__ = ["LocalFollower"]


class LocalMemory:
    """See FollowerMemory."""

    def __init__(self, stage: Stage, memory: SessionMemory, told: Operations, closed: Callable[[], object]) -> None:
        """Args: closed: told when it is."""
        self.memory = memory
        self._stage, self._closed = stage, closed
        memory.operations.report_to(told)

    @property
    def held(self) -> SessionStatistics:
        """See FollowerMemory."""
        return self.memory.statistics()

    @property
    def reads(self) -> tuple[int, int, int]:
        """See FollowerMemory."""
        return self.memory.reads

    @property
    def extra_bytes(self) -> int:
        """See FollowerMemory."""
        return self._stage.placement.extra_bytes(self.memory)

    def room(self, upper: int, rows: int) -> bool:
        """See FollowerMemory."""
        return self.memory.room(upper, rows)

    def commit(self, rows: int) -> None:
        """See FollowerMemory. What of the copies has no room now is submitted by a later commit or the barrier."""
        with suppress(Full):
            self.memory.commit(rows, self._stage.copyback, Event.completed(None))

    def retract(self, rows: int) -> None:
        """See FollowerMemory."""
        self.memory.counts.retract(rows)

    def check_cut(self, rows: int) -> None:
        """See FollowerMemory."""
        check_cut(self.memory, rows)

    def truncate(self, rows: int) -> Event[None]:
        """See FollowerMemory."""
        return self.memory.truncate(rows, self._stage.streams.compute)

    def grow(self, tokens_max: int, cut: int | None) -> bool:
        """See FollowerMemory."""
        return self._stage.placement.grow(self.memory, tokens_max, cut=cut)

    def rest(self) -> bool:
        """See FollowerMemory."""
        return self._stage.placement.rest(self.memory)

    def shed(self, *, shared: bool) -> bool:
        """See FollowerMemory."""
        return self._stage.placement.shed(self.memory, shared=shared)

    def shrink(self) -> bool:
        """See FollowerMemory."""
        return self._stage.placement.shrink(self.memory)

    def close(self) -> None:
        """See FollowerMemory."""
        self._closed()
        self.memory.close()


class LocalAppend:
    """See FollowerAppend."""

    def __init__(self, stage: Stage, memory: SessionMemory, run: AppendRun, out: Carried) -> None:
        """Args: out: where every chunk's states go, of as many rows as the longest has; its event is nobody's."""
        self._stage, self._memory, self._run, self._out = stage, memory, run, out
        self._rows = 0
        self._fill: HistoryFill | None = None

    @property
    def carried(self) -> Carried:
        """See FollowerAppend."""
        return _first_rows(self._out, self._rows, self._run.forwarded)

    @property
    def fetching(self) -> Event[Any] | None:
        """See FollowerAppend."""
        return self._run.fetching

    def units(self, tokens: Sequence[int], arrived: Carried | None) -> Iterator[Unit]:
        """See FollowerAppend."""
        self._rows = len(tokens)
        return self._run.layer_units(tokens, arrived, _first_rows(self._out, self._rows, self._out.event))

    def finish(self, after: Event[Any], *, last: bool) -> Event[Any]:
        """See FollowerAppend."""
        return self._run.end_part(after, last)

    def fill(self, rows: int, history: SyntheticHistory) -> Event[Any]:
        """See FollowerAppend."""
        self._fill = self._fill or HistoryFill(self._stage, history, self._run.everywhere)
        return self._fill.chunk(self._memory, rows, self._memory.session_id)

    def stand(self, token: Tensor, event: Event[Any]) -> Event[None]:
        """See FollowerAppend."""
        assert self._stage.carry is not None, "one of several stages"
        target = self._memory.state[StateField.TOKEN : StateField.TOKEN + 1]
        stood = self._stage.carry.submit(
            partial(_copy, target, token), label="token.stand", session=self._memory.session_id, after=[event], reads=[token]
        )
        self._memory.operations.hold(stood)
        return stood

    def abandon(self) -> None:
        """See FollowerAppend."""
        self._run.abandon()


class LocalImage:
    """See FollowerImage."""

    def __init__(self, stage: Stage, memory: SessionMemory) -> None:
        self._stage, self._memory = stage, memory
        self._loading: Loading | None = None

    async def read_out(self) -> int:
        """See FollowerImage."""
        if self._stage.backend.lost.done():
            return rows_in_ram(self._memory)
        return (await read_out(self._memory, self._stage.copyback)).rows

    async def begin(self, rows: int, window: int) -> None:
        """See FollowerImage."""
        streams = self._stage.streams
        self._loading = Loading(
            self._memory, self._stage.layout, rows, tables=streams.compute, copies=streams.copyback, window=window
        )  # fmt: skip

    async def blocks(self, first: int, stop: int) -> list[Block]:
        """See FollowerImage."""
        find = self._memory.mirror_block if self._loading is None else self._loading.target
        return [find(block).numpy() for block in range(first, stop)]

    async def place(self, first: int, stop: int) -> None:
        """See FollowerImage."""
        assert self._loading is not None, "nothing is being loaded"
        await self._loading.place(first, stop)

    async def finish(self, hidden_from: int) -> None:
        """See FollowerImage. Hidden states are kept by the last stage."""
        assert self._loading is not None, "nothing is being loaded"
        await self._loading.finish(torch.zeros_like(self._memory.hidden, device="cpu"), hidden_from)


@dataclass(slots=True)
class _Bucket:
    """Buffers of steps of one shape, and who is in their table."""

    step: DecodeStep
    table: StepTable
    members: tuple[MemoryId, ...] = ()
    written: Event[None] | None = None
    stood: Event[None] | None = None  # what the last step left to be written through the table


class LocalFollower:
    """See Follower."""

    apart = False  # a step takes a device that is shared as long in parts as whole

    def __init__(self, stage: Stage) -> None:
        assert not stage.model.is_last, "the last stage leads"
        self.stage = stage
        self.layout, self.first_layer = stage.layout, stage.first_layer
        self._held: dict[MemoryId, LocalMemory] = {}
        self._buckets: dict[StepShape, _Bucket] = {}
        self._stood: dict[int, Event[None]] = {}  # by lane: the last step's
        self._scratch: ref[Scratch] | None = None  # of the appends that run; it goes with the last of them
        config, rows, device = stage.model.config, stage.append_rows, stage.device
        selection = torch.full((rows, config.top_k), -1, dtype=torch.int32, device=device) if stage.model.cuts_group else None
        self._out = Carried(
            Event.completed(None), torch.zeros((rows, config.hidden), dtype=stage.model.dtype, device=device),
            torch.full((rows,), -1, dtype=torch.int64, device=device), selection,
        )  # fmt: skip

    @property
    def held(self) -> PlacementStatistics:
        """See Follower."""
        return self.stage.placement.statistics()

    @property
    def _carry(self) -> Stream:
        assert self.stage.carry is not None, "one of several stages"
        return self.stage.carry

    def _memory(self, memory: MemoryId) -> SessionMemory:
        return self._held[memory].memory

    def _take(self, memory: MemoryId, opened: SessionMemory, told: Operations) -> LocalMemory:
        self._held[memory] = taken = LocalMemory(self.stage, opened, told, partial(self._held.pop, memory))
        return taken

    def open(self, memory: MemoryId, session: str, tokens_max: int, told: Operations) -> LocalMemory:
        """See Follower."""
        return self._take(memory, self.stage.placement.open(session, tokens_max), told)

    def fork(
        self, source: MemoryId, memory: MemoryId, session: str, tokens_max: int, rows: int, told: Operations
    ) -> LocalMemory:  # fmt: skip
        """See Follower."""
        stage = self.stage
        forked = stage.placement.fork(
            self._memory(source), session, tokens_max, rows, compute=stage.streams.compute, copyback=stage.copyback
        )  # fmt: skip
        return self._take(memory, forked, told)

    def never_fits(self, tokens_max: int) -> DoesNotFit | None:
        """See Follower."""
        return self.stage.missing(tokens_max)

    def step(self, call: StepCall, arrived: Carried | None) -> Carried:
        """See Follower."""
        bucket, compute = self._bucket(call.shape, arrived), self.stage.streams.compute
        memories = [self._memory(member) for member in call.members]
        for memory, rows in zip(memories, call.rows, strict=True):
            memory.ensure_rows(memory.counts.logical + reach(rows), compute)
        after: list[Event[Any]] = [] if arrived is None else [arrived.event]
        if call.follows and call.shape.lane in self._stood:
            after.append(self._stood[call.shape.lane])
        if call.fresh or bucket.members != call.members:
            after.append(self._rewrite(bucket, call, memories))
        if self.stage.recorder is not None and bucket.step.ran and not bucket.step.recorded:
            bucket.step.record(self.stage.recorder, bucket.table, None)
        carried = bucket.step.hand_on(bucket.table, session=call.label, after=after)
        for memory, rows in zip(memories, call.rows, strict=True):
            memory.advance(rows)
            memory.operations.hold(carried.event)
        return carried

    def _bucket(self, shape: StepShape, arrived: Carried | None) -> _Bucket:
        found = self._buckets.get(shape)
        if found is None:
            step = decode_step(self.stage, shape.places, shape.positions_max, shape.rows, arrived)
            table = StepTable(shape.places, self.stage.table_layout, self.stage.device)
            found = self._buckets[shape] = _Bucket(step, table)
        return found

    def _rewrite(self, bucket: _Bucket, call: StepCall, memories: Sequence[SessionMemory]) -> Event[None]:
        compute = self.stage.streams.compute
        if bucket.stood is not None:
            compute.wait(bucket.stood)
        write = bucket.table.rewrite([memory.table_row(rows) for memory, rows in zip(memories, call.rows, strict=True)])
        after: tuple[Event[Any], ...] = () if bucket.step.recorded else self.stage.streams.fences()
        after = (*after, *bucket.step.rewrite_peer(memories, call.rows, after=after))
        bucket.members = call.members
        bucket.written = compute.submit(write, label="table.rewrite", after=after)
        return bucket.written

    def stand(self, call: StepCall, standing: Standing) -> Event[None]:
        """See Follower."""
        bucket = self._buckets[call.shape]
        work = partial(write_standing, bucket.table.tensor, standing.values)
        stood = self._carry.submit(work, label="stand", session=call.label, after=[standing.event], reads=[standing.values])
        bucket.stood = self._stood[call.shape.lane] = stood
        for member in call.members:
            self._memory(member).operations.hold(stood)
        return stood

    def abort(self, call: StepCall) -> tuple[Event[Any], ...]:
        """See Follower."""
        bucket, left = self._buckets[call.shape], self.stage.streams.fences()
        written = bucket.written is not None and bucket.written.done() and bucket.written.error() is None
        ends: tuple[Event[Any], ...] = left
        if written and bucket.members == call.members:
            ends = (*left, bucket.step.abort(bucket.table, session=""))
        for member in call.members:
            for event in ends:
                self._memory(member).operations.hold(event)
        return ends

    def append(self, memory: MemoryId, session: str, rows: int) -> LocalAppend:
        """See Follower."""
        held = self._memory(memory)
        scratch = None if self._scratch is None else self._scratch()
        if scratch is None:
            scratch = Scratch()
            self._scratch = ref(scratch)
        run = append_run(self.stage, held, (), None, session, scratch)
        run.expect(rows)
        return LocalAppend(self.stage, held, run, self._out)

    def image(self, memory: MemoryId) -> LocalImage:
        """See Follower."""
        return LocalImage(self.stage, self._memory(memory))

    def weights(self) -> tuple[str, ...]:
        """See Follower."""
        return weights_of(self.stage)

    async def idle(self) -> None:
        """See Follower."""
        await self.stage.idle()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _first_rows(out: Carried, rows: int, event: Event[Any]) -> Carried:
    return Carried(event, out.states[:rows], out.bad_layer[:rows], None if out.selection is None else out.selection[:rows])
