"""What an engine holds and has done, as one frozen snapshot. Knows no HTTP and decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.loop import StepLoop
from engine.session import Session
from kernels.layout import BLOCK_ROWS

__all__ = ["Statistics", "totals"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot. Rows are counted in positions; bytes are physical."""

    sessions: int
    running: int
    waiting: int
    steps: int
    mirrored_rows: int
    hot_rows: int
    ring_rows: int
    hits: int
    misses: int
    ring_reads: int
    drafts_proposed: tuple[int, ...]  # by place in their run, the first draft of a step first
    drafts_accepted: tuple[int, ...]
    stored: int  # idle histories kept for prompts that begin like them
    host_bytes: int
    device_bytes: int
    resident_bytes: int


def totals(loop: StepLoop, sessions_held: Iterable[Session]) -> Statistics:
    """The counts now. Args: sessions_held: by callers."""
    held = [request.session for request in (*loop.appending, *loop.decoding)]
    stored = loop.stored.sessions
    sessions = {session.id: session for session in (*sessions_held, *held)}
    memories = [session.memory for session in (*sessions.values(), *stored) if session.memory is not None]
    held_rows = [memory.statistics() for memory in memories]
    reads = loop.reads.plus(memories)
    stage = loop.stage
    # Counted for every session that has them.
    shared_bytes = sum((arena.references - (arena.blocks - arena.free)) * arena.block_bytes for arena in stage.arenas)
    return Statistics(
        sessions=len(sessions),
        running=len(held),
        waiting=len(loop.waiting),
        steps=loop.steps,
        mirrored_rows=sum(one.counts.mirrored for one in held_rows),
        hot_rows=sum(max((cache.mapped for cache in one.hot), default=0) for one in held_rows),
        ring_rows=sum(one.ring_rows for one in held_rows),
        hits=reads.hits,
        misses=reads.misses,
        ring_reads=reads.ring,
        drafts_proposed=loop.depth.counts.proposed,
        drafts_accepted=loop.depth.counts.accepted,
        stored=len(stored),
        host_bytes=sum(one.counts.mirrored for one in held_rows) * stage.block_bytes // BLOCK_ROWS - shared_bytes,
        device_bytes=stage.ledger.total("device").allocated_bytes,
        resident_bytes=sum(one.counts.logical for one in held_rows) * stage.block_bytes // BLOCK_ROWS,
    )
