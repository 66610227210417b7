"""A soak: for minutes, conversations come and go on real threads and everything happens to them, faults included.

Clients draw scripts and talk them through one small engine over the tiny model: turns, aborts, idle times, forks, cuts, archives and back,
stateless prompts that begin with stored histories; priorities, two keys, drafts, little memory. What each says is compared with what the
same script says alone. Knows the engine's face, and at the end the stage's books.

Invariants:
1. Every token anybody hears is the one that was said alone, at its place.
2. Nothing breaks where nothing was made to fail; where it was, a conversation ends with `SessionBroken` and never with wrong tokens.
   One that broke unseen, behind a turn that was left or its last token, is refused after: that counts where something failed since the
   beginning of its last whole turn.
3. At the end nothing is held: blocks, pages, bytes, operations, tasks, threads, file descriptors, sessions.
Unlike the search, a run cannot be repeated to the order: threads are real. What it finds is looked for with the search afterwards.
"""

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from engine.engine import Engine
from engine.errors import BadRequest, ForebayError, NeverFits, NotAdmitted, SessionBroken, SessionBusy
from engine.protocol import SessionId
from engine.sampling import PRIORITY_MAX, Sampling
from engine.search.reference import Bench, Turn
from engine.search.tiny import CONTEXT_MAX, TOP_K
from engine.search.watch import check_stage
from engine.session import Phase, Session
from engine.stage import open_stage
from streams import CpuBackend, TransferFailed
from streams.cpu import CpuStream
from streams.queued import Operation

__all__ = ["SoakPlan", "SoakResult", "run_soak"]

T = TypeVar("T")
_SCRIPTS = 12
_BLOCKS = 30  # of 64 rows: less than all clients' conversations would take, so that some wait and idle ones give up what they hold
_STRUCK = (
    "layer.", "group.", "step.", "append.", "append tail", "copyback", "mirrored", "table.rewrite", "tables", "truncate", "fork", "image",
)  # fmt: skip
_PAUSE_S = 0.02  # of an idle client, at most


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What to run. `fault_every`: operations to one that fails, on the average; 0: none fails."""

    seconds: float
    seed: int = 0
    clients: int = 6
    fault_every: int = 4000


@dataclass(slots=True)
class SoakResult:
    """What happened, by kind, and what is wrong, a line each."""

    plan: SoakPlan
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        plan = {name: getattr(self.plan, name) for name in ("seconds", "seed", "clients", "fault_every")}
        counts = dict(sorted(self.counts.items()))
        return {
            "version": 1,
            "kind": "soak",
            "ok": not self.wrong,
            "plan": plan,
            "seconds": self.seconds,
            "counts": counts,
            "wrong": self.wrong,
        }


class _FaultyStream(CpuStream):
    """A stream of `_FaultyBackend`."""

    def make(self, work: Callable[[], T], label: str, session: str, number: int) -> Operation[T]:
        """See `QueuedStream.make`."""
        assert isinstance(self.backend, _FaultyBackend)
        return super().make(self.backend.work(work, label), label, session, number)


class _FaultyBackend(CpuBackend):
    """Worker threads on which one operation in some never runs and fails instead."""

    def __init__(self, rng: random.Random, fault_every: int) -> None:
        super().__init__()
        self.struck = 0
        self._failed: list[str] = []  # labels of those struck that have run; worker threads append
        self._rng = rng
        self._every = fault_every

    @property
    def faults(self) -> int:
        """Grows whenever an operation is struck, and again when it runs and fails, which may be much later."""
        return self.struck + len(self._failed)

    def open_stream(self, name: str, queue_max: int) -> CpuStream:
        """See `QueuedBackend.open_stream`."""
        return _FaultyStream(self, name, queue_max, self._workers)

    def work(self, work: Callable[[], T], label: str) -> Callable[[], T]:
        """The work, or what fails instead."""
        if not (self._every and label.startswith(_STRUCK) and self._rng.randrange(self._every) == 0):
            return work
        self.struck += 1

        def fail() -> T:
            self._failed.append(label)
            raise TransferFailed(f"{label} failed by order of the soak")

        return fail


@dataclass(frozen=True, slots=True)
class _Script:
    """A conversation and what it says alone. `ends`: tokens up to each turn's end."""

    turns: tuple[Turn, ...]
    sampling: Sampling  # of its turns, but for the number of tokens
    whole: tuple[int, ...]

    @property
    def ends(self) -> list[int]:
        """How many tokens there are after each turn."""
        lengths = [turn.rows + turn.tokens for turn in self.turns]
        return [sum(lengths[: number + 1]) for number in range(len(lengths))]


def _drawn(rng: random.Random, number: int) -> tuple[tuple[Turn, ...], Sampling]:
    turns = tuple(
        Turn(rng.choice((3, 30, 64, 100)), rng.choice((4, 9, 40)), 100 * number + place) for place in range(rng.choice((1, 2, 3)))
    )
    if number % 2:
        return turns, Sampling(temperature=0.0, ignore_eos=True)
    return turns, Sampling(temperature=0.9, top_p=0.95, seed=number, ignore_eos=True)


async def _alone(bench: Bench, drawn: Sequence[tuple[tuple[Turn, ...], Sampling]]) -> list[_Script]:
    """What each says in an engine of its own kind: resident, nobody beside, nothing fails."""
    backend, scripts = CpuBackend(), []
    config = bench.config(placement="resident")
    stage = open_stage(bench.tiny.model, config, backend, context_max=CONTEXT_MAX)
    engine = bench.engine(config, stage)
    async with engine.running():
        for turns, sampling in drawn:
            session = await engine.create_session()
            for turn in turns:
                await engine.generate(list(turn.prompt), replace(sampling, max_tokens=turn.tokens), session=session).complete()
            scripts.append(_Script(turns, sampling, tuple(engine.sessions[session].token_ids)))
            await engine.close_session(session)
    await backend.close()
    check_stage(stage)
    return scripts


class _Client:
    """One conversation after another until the time is over. Raises AssertionError where something is wrong."""

    def __init__(self, soak: "_Soak", number: int) -> None:
        self._soak = soak
        self._engine = soak.engine
        self._counts = soak.result.counts
        self._rng = random.Random(f"{soak.result.plan.seed} {number}")
        self._namespace = f"key {number % 2}"

    async def run(self) -> None:
        """Until the deadline; the last conversation is talked to its end."""
        while time.monotonic() < self._soak.deadline:
            script = self._rng.choice(self._soak.scripts)
            talk = self._stateless if self._rng.random() < 0.3 else self._conversation
            await self._guarded(talk(script))
            self._soak.engine.stage.arena.check_integrity()

    async def _guarded(self, talk: Any) -> None:
        try:
            await talk
            self._counts["conversations"] += 1
        except SessionBroken:
            assert self._soak.backend.struck, "a session broke and nothing had failed"
            self._counts["broken"] += 1
        except NeverFits:
            raise
        except NotAdmitted:
            self._counts["refused"] += 1

    def _sampling(self, script: _Script, tokens: int) -> Sampling:
        depth, priority = self._rng.choice((None, 0, 1, 3)), self._rng.randint(-PRIORITY_MAX, PRIORITY_MAX)
        return replace(script.sampling, max_tokens=tokens, draft_depth=depth, priority=priority)

    async def _hear(self, script: _Script, prompt: Sequence[int], wanted: Sequence[int], session: SessionId | None) -> bool:
        """One turn, perhaps left before its end: False."""
        leaves_at = self._rng.randrange(len(wanted)) if self._rng.random() < 0.2 else len(wanted)
        heard: list[int] = []
        async with self._engine.generate(
            list(prompt), self._sampling(script, len(wanted)), session=session, namespace=self._namespace
        ) as generation:  # fmt: skip
            async for chunk in generation:
                heard.extend(chunk.token_ids)
                assert heard == list(wanted[: len(heard)]), f"heard {heard}, alone it says {list(wanted)}"
                if len(heard) > leaves_at:
                    self._counts["aborts"] += 1
                    self._counts["tokens"] += len(heard)
                    return False
        assert heard == list(wanted), f"heard {heard}, alone it says {list(wanted)}"
        self._counts["turns"] += 1
        self._counts["tokens"] += len(heard)
        return True

    async def _stateless(self, script: _Script) -> None:
        """Each turn as a prompt of all before it, as OpenAI's clients do."""
        for turn, end in zip(script.turns, script.ends, strict=True):
            first = end - turn.tokens
            await self._hear(script, script.whole[:first], script.whole[first:end], None)
            await self._idle()

    async def _conversation(self, script: _Script, session: SessionId | None = None, forks: int = 2, faults: int | None = None) -> None:
        """In a session of its own, which is closed at the end, whatever happened to it. Args: faults: how many there were before it."""
        good = self._soak.backend.faults if faults is None else faults  # how many there were before the last whole turn
        held = await self._engine.create_session(self._namespace) if session is None else session
        try:
            while len(self._engine.sessions[held].token_ids) < len(script.whole):
                asked = self._soak.backend.faults
                if await self._turn(script, held):
                    good = asked
                what = self._rng.choice(("idle", "nothing", "nothing", "fork", "cut", "archive"))
                if what == "idle":
                    await self._idle()
                elif what == "fork" and forks:
                    await self._fork(script, held, forks - 1, good)
                elif what == "cut" and self._rng.random() < 0.5:
                    await self._engine.truncate_session(held, self._place(script, held))
                    self._counts["cuts"] += 1
                elif what == "archive":
                    held = await self._archived(held)
        except BadRequest as error:
            if not self._broke_unseen(error, held, good):
                raise
            raise SessionBroken("it broke unseen") from error
        finally:
            if held in self._engine.sessions:
                await self._engine.close_session(held)

    def _broke_unseen(self, error: BadRequest, session: SessionId, faults: int) -> bool:
        """Whether a refusal is because the session is gone, and something failed since there were that many faults. Busy is not gone."""
        view = self._engine.sessions.get(session)
        gone = view is not None and view.phase in (Phase.BROKEN.value, Phase.CLOSED.value)
        return gone and not isinstance(error, SessionBusy) and self._soak.backend.faults > faults

    async def _turn(self, script: _Script, session: SessionId) -> bool:
        """Say what is left of the turn that the session stands in; it may have been left or cut anywhere. False: it was left again."""
        view = self._engine.sessions[session]
        held = list(view.token_ids)
        assert held == list(script.whole[: len(held)]), "the session holds other tokens than it said"
        ends = script.ends
        number = next(place for place, end in enumerate(ends) if end > len(held))
        said = ends[number] - script.turns[number].tokens
        first = max(said, len(held) + (len(held) == view.rows))
        return await self._hear(script, script.whole[len(held) : first], script.whole[first : ends[number]], session)

    def _place(self, script: _Script, session: SessionId) -> int:
        """Where a session may be cut or forked: behind any token but a turn's last but one, behind which there is nothing to ask with."""
        tokens = len(self._engine.sessions[session].token_ids)
        ends = script.ends
        return self._rng.choice([place for place in range(1, tokens + 1) if place + 1 not in ends] or [tokens])

    async def _fork(self, script: _Script, session: SessionId, forks: int, faults: int) -> None:
        """Another client goes on from somewhere in this conversation, beside it."""
        if not self._engine.sessions[session].token_ids:
            return
        try:
            other = await self._engine.fork_session(session, self._place(script, session))
        except BadRequest:
            assert self._soak.backend.struck, "a session could not be forked and nothing had failed"
            raise SessionBroken("its rows are gone") from None
        self._counts["forks"] += 1
        self._soak.group.create_task(self._guarded(self._conversation(script, other, forks, faults)))

    async def _archived(self, session: SessionId) -> SessionId:
        """To disk, closed, and back from there."""
        if not self._engine.sessions[session].token_ids:
            return session
        with TemporaryDirectory(dir=self._soak.folder) as folder:
            place = Path(folder) / "archive"
            await self._engine.export_session(session, place)
            await self._engine.close_session(session)
            back = await self._engine.import_session(place, namespace=self._namespace)
        self._counts["restores"] += 1
        return back

    async def _idle(self) -> None:
        await asyncio.sleep(self._rng.random() * _PAUSE_S)


@dataclass
class _Soak:
    """What the clients share."""

    result: SoakResult
    scripts: list[_Script]
    engine: Engine
    backend: _FaultyBackend
    folder: str
    group: asyncio.TaskGroup
    deadline: float


def _process() -> tuple[int, int, int]:
    """File descriptors, threads but for the loop's own pool, and tasks of this process."""
    threads = sum(not thread.name.startswith(("asyncio_", "uvloop_")) for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), threads, len(asyncio.all_tasks())


async def run_soak(plan: SoakPlan, progress: Callable[[float, SoakResult], None] = lambda seconds, result: None) -> SoakResult:
    """Run it. Args: progress: called now and then with the seconds so far and the counts."""
    result, bench, started = SoakResult(plan), Bench(), time.monotonic()
    rng = random.Random(plan.seed)
    scripts = await _alone(bench, [_drawn(rng, number) for number in range(_SCRIPTS)])
    before = _process()
    backend = _FaultyBackend(random.Random(f"faults {plan.seed}"), plan.fault_every)
    config = bench.config(
        host_memory_bytes=_BLOCKS * bench.block_bytes, hot_rows=2 * TOP_K, draft_depth=3, decode_batch_limit=4, prefix_cache="on"
    )
    stage = open_stage(bench.tiny.model, config, backend, context_max=CONTEXT_MAX)
    engine = bench.engine(config, stage)
    with TemporaryDirectory(prefix="forebay-soak-") as folder:
        try:
            async with engine.running(), asyncio.TaskGroup() as group:
                soak = _Soak(result, scripts, engine, backend, folder, group, time.monotonic() + plan.seconds)
                clients = [group.create_task(_Client(soak, number).run()) for number in range(plan.clients)]
                group.create_task(_told(soak, clients, progress))
        except Exception as error:
            result.wrong.append(_words(error))
        left = os.listdir(folder)
    result.counts["faults"], result.counts["steps"] = backend.struck, engine.statistics().steps
    await backend.close()
    if not result.wrong:
        result.wrong.extend(_leaks(engine, backend, before, left))
    result.seconds = round(time.monotonic() - started, 1)
    return result


async def _told(soak: _Soak, clients: Sequence[asyncio.Task[None]], progress: Callable[[float, SoakResult], None]) -> None:
    """Say how far it is while clients run."""
    begun = soak.deadline - soak.result.plan.seconds
    running: set[asyncio.Task[None]] = set(clients)
    while running:
        _, running = await asyncio.wait(running, timeout=1.0)
        progress(min(time.monotonic() - begun, soak.result.plan.seconds), soak.result)


def _leaks(engine: Engine, backend: _FaultyBackend, before: tuple[int, int, int], left: Sequence[str]) -> list[str]:
    """What is still held, a line each."""
    found = []
    statistics, in_flight = engine.statistics(), backend.statistics().in_flight
    if (statistics.sessions, statistics.running, statistics.waiting, in_flight) != (0, 0, 0, 0):
        found.append(f"the engine ended with {statistics} and {in_flight} operations in flight")
    try:
        check_stage(engine.stage)
    except AssertionError as error:
        found.append(str(error))
    gc.collect()
    for name, was, now in zip(("file descriptors", "threads", "tasks"), before, _process(), strict=True):
        if now > was:
            found.append(f"{now} {name}, {was} before")
    held = sum(type(each) is Session and each.memory is not None for each in gc.get_objects())
    if held:
        found.append(f"{held} sessions still have memory")
    if left:
        found.append(f"{len(left)} folders of archives are left")
    return found


def _words(error: BaseException) -> str:
    """The first failure inside groups, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    kind = "" if isinstance(error, ForebayError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())
