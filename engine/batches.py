"""Decode steps of several requests: buckets of buffers, their tables, and the steps in flight.

Holds one bucket a batch size. Does not decide who steps, nor read what came of it.

Invariants:
1. A bucket's tables are rewritten, in stream order, before a step whose members are not the ones it names; a step comes after that.
2. A request's counts advance when its step is submitted, never before.
"""

from dataclasses import dataclass

from engine.decode import DecodeStep, StepEvents
from engine.request import Request
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from kernels.layout import PAGE_KEYS
from memory.table import StepTable
from streams import Event

__all__ = ["Batches", "Bucket", "Flight"]


@dataclass(slots=True)
class Bucket:
    """Buffers of one batch size, and who is in its table."""

    step: DecodeStep
    table: StepTable
    sampling: SamplingTable
    members: tuple[Request, ...] = ()


@dataclass(slots=True)
class Flight:
    """A step not followed yet. `failed`: members of a failed step that it came after, if it did: then none of it ran."""

    bucket: Bucket
    members: tuple[Request, ...]
    events: StepEvents
    failed: tuple[Request, ...] | None = None


class Batches:
    """Submits steps on one stage."""

    def __init__(self, stage: Stage) -> None:
        self.steps = 0  # submitted so far
        self._stage = stage
        self._buckets: dict[tuple[int, int], Bucket] = {}

    def _bucket(self, members: tuple[Request, ...]) -> Bucket:
        """The smallest power-of-two batch that holds them; on a device also of positions, which bound the launches of scoring."""
        places = 1 << (len(members) - 1).bit_length()
        positions = 0 if self._stage.device.type == "cpu" else max(_positions_max(request) for request in members)
        key = places, 1 << (positions - 1).bit_length() if positions else 0
        found = self._buckets.get(key)
        if found is None:
            table = StepTable(places, self._stage.table_layout, self._stage.device)
            sampling = SamplingTable(places, self._stage.device)
            found = self._buckets[key] = Bucket(DecodeStep(self._stage, *key), table, sampling)
        return found

    def submit(self, members: tuple[Request, ...], previous: Flight | None) -> Flight:
        """Submit a step of these requests, one row each; every one has room for it. `previous`: the step before, not followed yet."""
        bucket = self._bucket(members)
        stale = bucket.members != members
        for request in members:
            memory = request.session.memory
            assert memory is not None, f"request {request.id} decodes without memory"
            memory.ensure_rows(memory.counts.logical + 1, self._stage.streams.compute)
        # Behind a step that never ran the stream's own order is enough; behind a live one its failure must reach this one.
        after = [] if previous is None or previous.failed is not None else [previous.events.done]
        if stale:
            after.append(self._rewrite(bucket, members))
        if self._stage.recorder is not None and bucket.step.ran and not bucket.step.recorded:
            bucket.step.record(self._stage.recorder, bucket.table, bucket.sampling)
        session = members[0].session.id if len(members) == 1 else f"{len(members)} sessions"
        keep_logits = any(request.wants_logits for request in members)
        events = bucket.step.submit(bucket.table, bucket.sampling, session=session, after=after, keep_logits=keep_logits)
        for request in members:
            assert request.session.memory is not None
            request.session.memory.advance(1)
            request.session.memory.operations.hold(events.output)
            request.in_flight += 1
        self.steps += 1
        return Flight(bucket, members, events)

    def _rewrite(self, bucket: Bucket, members: tuple[Request, ...]) -> Event[None]:
        """Set the tables to these members by one stream-ordered operation; if it fails, so must the step that would read others' places."""
        rows = [request.session.memory.table_row(1) for request in members if request.session.memory is not None]
        states = [request.state for request in members]
        bucket.members = members
        write_table = bucket.table.rewrite(rows)

        def rewrite() -> None:
            write_table()
            bucket.sampling.rewrite(states)

        return self._stage.streams.compute.submit(rewrite, label="table.rewrite")

    def forget(self, request: Request) -> None:
        """The request has left: the next step on a bucket that names it rewrites its tables."""
        for bucket in self._buckets.values():
            if request in bucket.members:
                bucket.members = ()


def _positions_max(request: Request) -> int:
    """Positions that its session has room for, in whole pages."""
    memory = request.session.memory
    assert memory is not None, f"request {request.id} decodes without memory"
    return memory.pages.pages_max * PAGE_KEYS
