"""What a session holds on all stages, behind the protocols of one: the loop asks one memory and one placement, whatever the stages.

Holds the last stage's memory and its parts on the stages before. Knows no steps: what a step does to rows it tells each stage itself
(`Batches`, `LocalFollower.step`), what a chunk does the append.

Invariants:
1. A session is on every stage or on none: what does not fit on one is given back on the others, and a cut is made on all or on none.
2. Counts of rows are the last stage's; those of the others move along. What is in flight anywhere is held in the last stage's operations.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from engine.stage_calls import Follower, FollowerMemory, MemoryId
from memory.append import AppendChunk
from memory.copyback import Copyback
from memory.fork import check_cut
from memory.placement import Needs, Placement, PlacementStatistics
from memory.ring import Ring
from memory.session import SessionMemory, SessionStatistics
from streams import Event, Stream

__all__ = ["JointMemory", "JointPlacement", "id_of"]


class JointMemory:
    """See SessionMemory. Made by `JointPlacement`; tensors, tables and blocks are the last stage's."""

    def __init__(self, memory_id: MemoryId, own: SessionMemory, parts: Sequence[FollowerMemory]) -> None:
        """Args: parts: on the stages before, in order of layers."""
        self.id, self.own, self.parts = memory_id, own, parts
        self.session_id = own.session_id
        self.counts, self.operations = own.counts, own.operations
        self.history, self.pages = own.history, own.pages
        self.state, self.hidden = own.state, own.hidden
        self.ring: Ring | None = own.ring
        self.peered = own.peered
        self.device_block: Callable[[int], Tensor] = own.device_block
        self.mirror_block: Callable[[int], Tensor] = own.mirror_block
        own.counts.retracted = self._retracted

    def _retracted(self, rows: int) -> None:
        for part in self.parts:
            part.retract(rows)

    @property
    def reads(self) -> tuple[int, int, int]:
        """See SessionMemory. Of all stages."""
        hits, misses, ring = zip(self.own.reads, *(part.reads for part in self.parts), strict=True)
        return sum(hits), sum(misses), sum(ring)

    def table_row(self, rows: int) -> list[int]:
        """See SessionMemory."""
        return self.own.table_row(rows)

    def room(self, upper: int, rows: int) -> bool:
        """See SessionMemory. On every stage."""
        return self.own.room(upper, rows) and all(part.room(upper, rows) for part in self.parts)

    def ensure_rows(self, upper: int, stream: Stream) -> bool:
        """See SessionMemory. The other stages do so in their part of a step."""
        return self.own.ensure_rows(upper, stream)

    def advance(self, rows: int) -> None:
        """See SessionMemory. The other stages do so in their part of a step."""
        self.own.advance(rows)

    def commit(self, rows: int, copyback: Copyback, after: Event[Any]) -> None:
        """See SessionMemory."""
        for part in self.parts:
            part.commit(rows)
        self.own.commit(rows, copyback, after)

    def begin_append(self, rows: int, compute: Stream, after: Sequence[Event[Any]] = ()) -> AppendChunk:
        """See SessionMemory. The other stages' chunks are `AppendRun`'s."""
        return self.own.begin_append(rows, compute, after)

    def truncate(self, rows: int, stream: Stream) -> Event[None]:
        """See SessionMemory. Returns: the last stage's part; every part is held."""
        check_cut(self.own, rows)
        for part in self.parts:
            part.check_cut(rows)
        for part in self.parts:
            part.truncate(rows)
        return self.own.truncate(rows, stream)

    def close(self) -> None:
        """See SessionMemory."""
        for part in self.parts:
            part.close()
        self.own.close()

    def statistics(self) -> SessionStatistics:
        """See SessionMemory. Counts are those of the stage that is behind the others; slots are of all."""
        own, parts = self.own.statistics(), [part.held for part in self.parts]
        behind = min((own, *parts), key=lambda held: held.counts.mirrored)
        counts = replace(own.counts, mirrored=behind.counts.mirrored, submitted=behind.counts.submitted)
        hot = tuple(cache for held in (*parts, own) for cache in held.hot)
        return replace(own, counts=counts, ring_rows=max(held.ring_rows for held in (own, *parts)), hot=hot)

    def check_integrity(self) -> None:
        """See SessionMemory. Of the last stage's part."""
        self.own.check_integrity()


class JointPlacement:
    """See Placement. Over the last stage's placement and the stages before."""

    def __init__(self, own: Placement, before: Sequence[Follower]) -> None:
        self._own, self._before = own, before
        self._ids = count()

    def needs(self, tokens_max: int) -> Needs:
        """See Placement. On the last stage."""
        return self._own.needs(tokens_max)

    def open(self, session_id: str, tokens_max: int) -> JointMemory:
        """See Placement."""
        own, memory_id = self._own.open(session_id, tokens_max), MemoryId(next(self._ids))
        return self._join(memory_id, own, lambda stage: stage.open(memory_id, session_id, tokens_max, own.operations))

    def fork(
        self, source: SessionMemory, session_id: str, tokens_max: int, rows: int, *, compute: Stream, copyback: Copyback
    ) -> JointMemory:  # fmt: skip
        """See Placement."""
        joint, memory_id = _joint(source), MemoryId(next(self._ids))
        own = self._own.fork(joint.own, session_id, tokens_max, rows, compute=compute, copyback=copyback)
        return self._join(
            memory_id, own, lambda stage: stage.fork(joint.id, memory_id, session_id, tokens_max, rows, own.operations)
        )  # fmt: skip

    def _join(self, memory_id: MemoryId, own: SessionMemory, make: Callable[[Follower], FollowerMemory]) -> JointMemory:
        with ExitStack() as undo:
            undo.callback(own.close)
            parts = []
            for stage in self._before:
                parts.append(make(stage))
                undo.callback(parts[-1].close)
            undo.pop_all()
        return JointMemory(memory_id, own, tuple(parts))

    def grow(self, session: SessionMemory, tokens_max: int, *, cut: int | None = None) -> bool:
        """See Placement. A stage that has grown before another refused gives up all that it can, as one at rest: a grow brings it back."""
        joint = _joint(session)
        changed = False
        with ExitStack() as undo:
            for part in joint.parts:
                changed |= part.grow(tokens_max, cut)
                undo.callback(part.rest)
            changed |= self._own.grow(joint.own, tokens_max, cut=cut)
            undo.pop_all()
        return changed

    def extra_bytes(self, session: SessionMemory) -> int:
        """See Placement. On all stages."""
        joint = _joint(session)
        return self._own.extra_bytes(joint.own) + sum(part.extra_bytes for part in joint.parts)

    def shrink(self, session: SessionMemory) -> bool:
        """See Placement."""
        joint = _joint(session)
        return all([self._own.shrink(joint.own), *(part.shrink() for part in joint.parts)])

    def rest(self, session: SessionMemory) -> bool:
        """See Placement."""
        joint = _joint(session)
        return any([self._own.rest(joint.own), *(part.rest() for part in joint.parts)])

    def shed(self, session: SessionMemory, *, shared: bool) -> bool:
        """See Placement."""
        joint = _joint(session)
        return any([self._own.shed(joint.own, shared=shared), *(part.shed(shared=shared) for part in joint.parts)])

    def statistics(self) -> PlacementStatistics:
        """See Placement. Of the last stage; the others have `held`."""
        return self._own.statistics()

    def close(self) -> None:
        """See Placement. Of the last stage."""
        self._own.close()


def _joint(memory: SessionMemory | None) -> JointMemory:
    assert isinstance(memory, JointMemory), "a session of one stage"
    return memory


def id_of(memory: SessionMemory | None) -> MemoryId:
    """Its id on every stage."""
    return _joint(memory).id
