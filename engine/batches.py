"""Decode steps of several requests: buckets of buffers, their tables, and the steps in flight.

Holds one bucket a batch size and depth of drafts. Does not decide who steps, nor read what came of it.

Invariants:
1. A bucket's tables are rewritten, in stream order, before a step whose members are not the ones it names; a step comes after that.
2. A request's counts advance when its step is submitted, never before, by every row that could be accepted: `logical` is then the most that
   the session can have, until the step is followed and what was refused is taken back.
3. A member with a form has a new mask in place before its step: the step before was followed, or it would not be a member.
4. A step of r rows a session may write up to `reach(r)` positions from its first: r of its own, and MTP rows behind the last of them.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.decode import DecodeStep
from engine.joint import id_of
from engine.pair_decode import decode_step
from engine.request import Request
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from engine.stage_calls import Carried, StepCall, StepShape
from engine.step_output import StepEvents
from kernels.layout import PAGE_KEYS
from kernels.place import BULK_ROWS
from memory.staging import pinned
from memory.table import StepTable
from streams import Event

__all__ = ["Batches", "Bucket", "Flight", "reach"]


def reach(rows: int) -> int:
    """Positions from its first on that a step of `rows` rows a session may write: drafts of drafts reach past the rows themselves."""
    return 2 * rows - 1


@dataclass(slots=True)
class Bucket:
    """Buffers of one batch size and depth, and who is in its table."""

    step: DecodeStep
    table: StepTable
    sampling: SamplingTable
    members: tuple[Request, ...] = ()
    written: Event[None] | None = None  # the last rewrite of its tables

    @property
    def names_members(self) -> bool:
        """Whether the last rewrite ran: one that failed left those before in the table, who may be gone."""
        return self.written is not None and self.written.done() and self.written.error() is None


@dataclass(slots=True)
class Flight:
    """A step not followed yet. `failed`: members of a failed step that it came after, if it did: then none of it ran."""

    bucket: Bucket
    members: tuple[Request, ...]
    rows: tuple[int, ...]  # that each member's counts advanced by
    events: StepEvents
    lane: int = 0
    call: StepCall | None = None  # what the stages before were told; None: there is one stage
    failed: tuple[Request, ...] | None = None


class Batches:
    """Submits steps on one stage."""

    def __init__(self, stage: Stage) -> None:
        self.steps = 0  # submitted so far
        self._stage = stage
        self._buckets: dict[StepShape, Bucket] = {}

    def _shape(self, members: tuple[Request, ...], rows: int, lane: int) -> StepShape:
        """The smallest power-of-two batch that holds them; on a device also of positions, which bound the launches of scoring."""
        positions = 0 if self._stage.device.type == "cpu" else max(_positions_max(request) for request in members)
        return StepShape(lane, _batch(len(members)), 1 << (positions - 1).bit_length() if positions else 0, rows)

    def _bucket(self, shape: StepShape, arrived: Carried | None) -> Bucket:
        found = self._buckets.get(shape)
        if found is None:
            table = StepTable(shape.places, self._stage.table_layout, self._stage.device)
            sampling = SamplingTable(shape.places, self._stage.device, rows=shape.rows)
            step = decode_step(self._stage, shape.places, shape.positions_max, shape.rows, arrived)
            found = self._buckets[shape] = Bucket(step, table, sampling)
        return found

    def submit(self, members: tuple[Request, ...], depth: int, previous: Flight | None, lane: int = 0) -> Flight:
        """Submit a step of these requests, one row each and up to `depth` drafts; every one has room for it.

        Args: previous: the step before, not followed yet. lane: theirs; steps of others may be in flight.
        """
        # More rows than this go the way of appends, whose sums depend on the number of rows.
        depth = min(depth, max(1, BULK_ROWS // _batch(len(members))) - 1)
        rows = tuple(1 + request.depth_within(depth) for request in members)
        shape = self._shape(members, max(rows), lane)
        for request, own in zip(members, rows, strict=True):
            memory = request.session.memory
            assert memory is not None, f"request {request.id} decodes without memory"
            memory.ensure_rows(memory.counts.logical + reach(own), self._stage.streams.compute)
        # Behind a step that never ran the stream's own order is enough; behind a live one its failure must reach this one.
        after = [] if previous is None or previous.failed is not None else [previous.events.done]
        session = members[0].session.id if len(members) == 1 else f"{len(members)} sessions"
        stale = shape not in self._buckets or self._buckets[shape].members != members
        call, arrived = None, None
        if self._stage.before:
            ids = tuple(id_of(request.session.memory) for request in members)
            call = StepCall(shape, ids, rows, stale, bool(after), session)
            arrived = self._begin(call)
            after.append(arrived.event)
        bucket = self._bucket(shape, arrived)
        after.extend(self._bring_masks(members))
        if stale:
            after.append(self._rewrite(bucket, members, rows))
        if self._stage.recorder is not None and bucket.step.ran and not bucket.step.recorded:
            bucket.step.record(self._stage.recorder, bucket.table, bucket.sampling)
        keep_logits = any(request.wants_logits for request in members)
        events = bucket.step.submit(bucket.table, bucket.sampling, session=session, after=after, keep_logits=keep_logits)
        if call is not None:
            events = self._stood(call, bucket, events)
        for request, own in zip(members, rows, strict=True):
            assert request.session.memory is not None
            request.session.memory.advance(own)
            request.session.memory.operations.hold(events.followed)
            request.in_flight += 1
        self.steps += 1
        return Flight(bucket, members, rows, events, lane, call)

    def _begin(self, call: StepCall) -> Carried:
        """Submit the parts of a step on the stages before; returns what arrives here."""
        carried: Carried | None = None
        for stage in self._stage.before:
            carried = stage.step(call, carried)
        assert carried is not None, "asked for where stages are before"
        return carried

    def _stood(self, call: StepCall, bucket: Bucket, events: StepEvents) -> StepEvents:
        """Let the stages before know where the step's sessions stand; the host follows once they do, so that nothing else of these sessions
        comes in between."""
        standing = bucket.step.standing(events.done)
        stood = [stage.stand(call, standing) for stage in self._stage.before]
        over = self._stage.joined([events.output, *stood], label="step.over", session=call.label)
        return replace(events, over=over)

    def _bring_masks(self, members: tuple[Request, ...]) -> list[Event[Any]]:
        """Bring the masks of members whose form went on to where the sampler reads them, which no table row changes for."""
        compute, uploads = self._stage.streams.compute, list[Event[Any]]()
        for request in members:
            mask, state = request.due_mask(), request.state
            if mask is None or state is None or state.mask is None:
                continue
            work = partial(state.mask.copy_, pinned(mask, self._stage.device), non_blocking=True)
            uploads.append(compute.submit(work, label="mask.upload", session=request.session.id, writes=(state.mask,)))
        return uploads

    def _rewrite(self, bucket: Bucket, members: tuple[Request, ...], rows: tuple[int, ...]) -> Event[None]:
        """Set the tables to these members by one stream-ordered operation; if it fails, so must the step that would read others' places."""
        memories = [request.session.memory for request in members]
        places = [memory.table_row(own) for memory, own in zip(memories, rows, strict=True) if memory is not None]
        states = [request.state for request in members]
        bucket.members = members
        write_table = bucket.table.rewrite(places)

        def rewrite() -> None:
            write_table()
            bucket.sampling.rewrite(states)

        # A replay is over when compute is; of a failed step that was issued anew, something may still read the table on another stream.
        after = () if bucket.step.recorded else self._stage.streams.fences()
        after = (*after, *bucket.step.rewrite_peer([memory for memory in memories if memory is not None], rows, after=after))
        bucket.written = self._stage.streams.compute.submit(rewrite, label="table.rewrite", after=after)
        return bucket.written

    def forget(self, request: Request) -> None:
        """The request has left: the next step on a bucket that names it rewrites its tables."""
        for bucket in self._buckets.values():
            if request in bucket.members:
                bucket.members = ()


def _batch(members: int) -> int:
    """Places of the bucket of so many sessions."""
    return 1 << (members - 1).bit_length()


def _positions_max(request: Request) -> int:
    """Positions that its session has room for, in whole pages."""
    memory = request.session.memory
    assert memory is not None, f"request {request.id} decodes without memory"
    return memory.pages.pages_max * PAGE_KEYS
