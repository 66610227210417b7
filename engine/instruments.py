"""Reading an open engine: its counts, its sessions by tier, and what its streams do while somebody watches.

Knows the loop and the stage; changes nothing of either. See `measures.py` for what is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from engine.activity import Activity
from engine.loop import StepLoop
from engine.measures import Arena, Measures, SessionTiers, StreamCounts
from engine.protocol import SessionId
from engine.request import Request
from engine.session import Session
from engine.sessions import held_bytes
from engine.totals import totals
from kernels.layout import BLOCK_ROWS
from memory.ring import RING_ROWS
from memory.session import SessionMemory
from streams import observed

__all__ = ["Instruments"]


class Instruments:
    """Of one engine. Loop thread only."""

    def __init__(self, loop: StepLoop, held: Mapping[SessionId, Session]) -> None:
        """Args: held: the sessions of callers, by id; as they are when asked."""
        self.open = True
        self._loop = loop
        self._held = held

    def close(self) -> None:
        """The engine gives back its memory: nothing can be read any more."""
        self.open = False

    def measures(self) -> Measures:
        """Counts and sizes now. On a device it costs a small copy a session, which waits for nothing else."""
        loop, stage = self._loop, self._loop.stage
        found = totals(loop, self._held.values())
        sessions = self._sessions()
        lags = [_lag(session.memory) for session, _ in sessions if session.memory is not None]
        arenas, held = stage.arenas, stage.ledger.statistics()
        return Measures(
            waiting=len(loop.waiting),
            appending=len(loop.appending),
            decoding=len(loop.decoding),
            sessions={kind: sum(of == kind for _, of in sessions) for kind in ("held", "request", "stored")},
            steps=found.steps,
            tokens=loop.tally.tokens(loop.requests),
            waits=loop.tally.waits(),
            stalls=loop.tally.stalls,
            hits=found.hits,
            misses=found.misses,
            ring_reads=found.ring_reads,
            drafts_proposed=found.drafts_proposed,
            drafts_accepted=found.drafts_accepted,
            mirrored_rows=found.mirrored_rows,
            hot_rows=found.hot_rows,
            ring_rows=found.ring_rows,
            lag_rows=sum(lags),
            lag_rows_most=max(lags, default=0),
            held_bytes={tier: {owner: one.allocated_bytes for owner, one in owners.items()} for tier, owners in held.items()},
            arena=Arena(
                sum(arena.blocks * arena.block_bytes for arena in arenas),
                sum((arena.blocks - arena.free) * arena.block_bytes for arena in arenas),
                sum(arena.reserved * arena.block_bytes for arena in arenas),
            ),
            device_budget_bytes=stage.pool.statistics().budget_bytes,
            streams=[
                StreamCounts(one.name, one.completed, one.failed, one.payload_bytes, one.busy_ns / 1e9, one.in_flight)
                for one in stage.backend.statistics().streams
            ],
        )

    def _sessions(self) -> list[tuple[Session, str]]:
        """Every session with its kind, each once: those of running requests that nobody holds, held ones, stored ones."""
        loop = self._loop
        found = {id(session): (session, "held") for session in self._held.values()}
        for request in (*loop.appending, *loop.decoding):
            found.setdefault(id(request.session), (request.session, "request"))
        for session in loop.stored.sessions:
            found.setdefault(id(session), (session, "stored"))
        return list(found.values())

    def tiers(self, namespace: str, most: int) -> Sequence[SessionTiers]:
        """See `InstrumentsFace.tiers`."""
        running = {id(request.session): request for request in (*self._loop.appending, *self._loop.decoding)}
        used = {id(session): place for place, session in enumerate(self._loop.stored.by_use)}
        seen = [(session, kind) for session, kind in self._sessions() if session.namespace == namespace]
        seen.sort(key=lambda item: (id(item[0]) not in running, -used.get(id(item[0]), -1)))
        return [_tiers(self._loop, session, kind, running.get(id(session))) for session, kind in seen[:most]]

    @contextmanager
    def watch(self) -> Iterator[Activity]:
        """See `InstrumentsFace.watch`."""
        backend = self._loop.stage.backend
        activity = Activity(backend.clock)
        with observed(backend, activity):
            yield activity


def _lag(memory: SessionMemory) -> int:
    """Rows that are committed and not yet in RAM; RAM is no part of a resident session's way."""
    return 0 if memory.ring is None else memory.counts.committed - memory.counts.mirrored


def _tiers(loop: StepLoop, session: Session, kind: str, request: Request | None) -> SessionTiers:
    memory = session.memory
    done, total, generated = (0, 0, 0) if request is None else _progress(request)
    tiers = SessionTiers(
        id=session.id, namespace=session.namespace, kind=kind, phase=session.phase.value, tokens=len(session.tokens), rows=session.rows,
        prompt_rows=done, prompt_rows_total=total, generated=generated, block_rows=BLOCK_ROWS,
    )  # fmt: skip
    if memory is None:
        return tiers
    held, (host, device) = memory.statistics(), held_bytes(loop, session)
    fullest = max(held.hot, key=lambda cache: cache.mapped, default=None)
    return replace(
        tiers, mirrored_rows=held.counts.mirrored, ring_rows=held.ring_rows, ring_rows_max=0 if memory.ring is None else RING_ROWS,
        hot_rows=0 if fullest is None else fullest.mapped, hot_rows_max=0 if fullest is None else fullest.slots, blocks=held.blocks,
        host_bytes=host, device_bytes=device,
    )  # fmt: skip


def _progress(request: Request) -> tuple[int, int, int]:
    """Rows of the prompt in place, rows of it in all while it is read, and tokens generated."""
    if request.append is None:
        return 0, 0, request.generated
    return request.cached + request.append.done_rows, request.prompt_tokens, request.generated
