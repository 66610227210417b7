"""Archives against plain sequential I/O on the same disk, and against reading the tokens anew.

Runs rounds of both and says what they show; prints nothing. What is written lies in one directory, which is made and removed here.

1. Plain I/O moves as many bytes in the same run, one file in pieces of 8 MiB, synced, and reads them to memory that holds them all. What
   the system keeps of files in memory is dropped before each: whoever comes second would else wait for memory that the first one holds.
2. A ratio is stated only after every block that came in was compared with the one that went out.
3. What is appended anew are the very tokens of an archived session, really read.
4. Resuming from RAM is what a turn takes longer in a session that gave its hot cache and pages of index keys up.
"""

import asyncio
import os
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Final, Protocol

import torch
from rich.table import Table

from engine.archive.identity import identity_of
from engine.archive.transfers import Archives
from engine.bench.arm import seeded_prompt
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting, SessionBroken
from engine.protocol import SessionId, SyntheticHistory
from engine.sampling import Sampling
from engine.session import Phase, Session
from engine.stage import Stage
from engine.synthetic import SyntheticRun, tokens_of
from kernels.layout import BLOCK_ROWS

__all__ = ["ArchivePlan", "Archived", "as_json", "run_archives", "table"]

_VERSION: Final = 1
_PIECE_BYTES: Final = 1 << 23
_FORKS: Final = 9
_TURNS: Final = 9
_SEED: Final = 20_250_303
_MADE: Final = SessionId("00000000000000aa")


class Told(Protocol):
    """How far it is."""

    def __call__(self, title: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """What to run. Raises BadSetting."""

    model: Path
    engine: EngineConfig
    directory: Path  # where the disk is
    rows: int = 100_000  # made up, archived
    appended: int = 2_000  # tokens really read, archived, and read anew
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "appended", "rounds"):
            if getattr(self, name) < 1:
                raise BadSetting(f"--{name} must be at least 1, not {getattr(self, name)}")
        if not self.directory.is_dir():
            raise BadSetting(f"--directory: {self.directory} is not a directory")


@dataclass(slots=True)
class Archived:
    """Seconds of each round, and bytes."""

    payload_bytes: int = 0
    again_bytes: int = 0  # that a second export wrote
    plain_write_s: list[float] = field(default_factory=list)
    export_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    plain_read_s: list[float] = field(default_factory=list)
    import_s: list[float] = field(default_factory=list)
    append_s: list[float] = field(default_factory=list)
    fork_s: list[float] = field(default_factory=list)  # of that session, all of it
    warm_s: list[float] = field(default_factory=list)  # a turn of one token, to its first
    rested_s: list[float] = field(default_factory=list)  # the same once hot cache and key pages were given up
    restore_s: list[float] = field(default_factory=list)  # of the session whose tokens are read anew

    def ratios(self) -> dict[str, float]:
        """Medians: shares of plain speed, and restoring over appending anew."""
        middle = statistics.median
        return {
            "export_of_plain_write": middle(self.plain_write_s) / middle(self.export_s),
            "import_of_plain_read": middle(self.plain_read_s) / middle(self.import_s),
            "second_export_of_first": middle(self.again_s) / middle(self.export_s),
            "fork_of_append": middle(self.fork_s) / middle(self.append_s),
            "resume_of_append": (middle(self.rested_s) - middle(self.warm_s)) / middle(self.append_s),
            "import_of_append": middle(self.restore_s) / middle(self.append_s),
        }


async def run_archives(plan: ArchivePlan, told: Told) -> Archived:
    """Every round. Raises ForebayError; AssertionError: what came in is not what went out."""
    found = Archived()
    place = Path(await asyncio.to_thread(mkdtemp, prefix="forebay-archive-", dir=plan.directory))
    try:
        async with Engine.open(plan.model, plan.engine) as engine:
            if max(plan.rows + 1, plan.appended + 4 * _TURNS) >= engine.context_max:
                raise BadSetting(f"the context has {engine.context_max} tokens; fewer --rows or --appended")
            await _sequential(engine, plan, place, found, told)
            await _anew(engine, plan, place, found, told)
    finally:
        await asyncio.to_thread(rmtree, place, ignore_errors=True)
    return found


async def _sequential(engine: Engine, plan: ArchivePlan, place: Path, found: Archived, told: Told) -> None:
    """A made-up session out and in, beside plain files of as many bytes."""
    stage = engine.stage
    sessions: dict[SessionId, Session] = {}
    identify = partial(identity_of, stage, model="bench", tokenizer="0" * 64, template="0" * 64, context_max=engine.context_max)
    archives = Archives(stage, sessions, 2, identify, lambda: None, lambda _: False)
    made = await _made_up(stage, plan.rows, told)
    landing = bytearray(plan.rows * stage.layout.block_bytes // BLOCK_ROWS)
    try:
        await archives.export(made, place / "first", None)  # the sample of the weights is taken
        for number in range(plan.rounds):
            told("rounds of archives and plain files", number, plan.rounds)
            await asyncio.to_thread(rmtree, place / "first")
            found.payload_bytes = plan.rows * stage.layout.block_bytes // BLOCK_ROWS
            found.plain_write_s.append(await asyncio.to_thread(_write_plain, place / "plain", found.payload_bytes))
            await asyncio.to_thread(_forget, place)
            found.export_s.append((await archives.export(made, place / "first", None)).seconds)
            again = await archives.export(made, place / "first", None)
            found.again_s.append(again.seconds)
            found.again_bytes = again.written_bytes
            await asyncio.to_thread(_forget, place)
            found.plain_read_s.append(await asyncio.to_thread(_read_plain, place / "plain", landing))
            await asyncio.to_thread(_forget, place)
            started = time.perf_counter()
            taken = sessions[await archives.take(place / "first", "", None)]
            found.import_s.append(time.perf_counter() - started)
            _compare(made, taken, plan.rows)
            await _close(taken)
            sessions.clear()
        told("rounds of archives and plain files", plan.rounds, plan.rounds)
    finally:
        await _close(made)


async def _made_up(stage: Stage, rows: int, told: Told) -> Session:
    """A session between two turns whose rows are made up, but for the last."""
    history = SyntheticHistory(_SEED, rows - 1) if rows > 1 else None
    session = Session(_MADE, temporary=False)
    session.tokens = array("i", [*(tokens_of(history, stage.model.config.vocabulary) if history else []), 1])
    session.memory = memory = stage.placement.open(session.id, rows)
    session.move(Phase.APPENDING)
    if history is not None:
        run = SyntheticRun(stage, memory, [1], None, session.id, history)
        for unit in run.units():
            await unit.submit()
            told("making rows up", max(0, run.done_rows + history.rows), rows)
    await stage.streams.idle()
    if memory.operations.broken is not None:
        raise SessionBroken(f"making rows up failed: {memory.operations.broken}")
    session.move(Phase.READY)
    return session


async def _close(session: Session) -> None:
    if session.memory is not None:
        await session.memory.operations.settle()
        session.memory.close()
        session.memory = None


def _compare(one: Session, other: Session, rows: int) -> None:
    """Assert equal rows and keys, block by block, where both are in RAM or on the device."""
    assert one.memory is not None, "a session with rows has memory"
    assert other.memory is not None, "a session with rows has memory"
    assert one.rows == other.rows == rows, f"{one!r} came in as {other!r}"
    for block in range(rows // BLOCK_ROWS):  # the last one, if it is not whole, has bytes behind its rows
        assert torch.equal(one.memory.history.view(block), other.memory.history.view(block)), f"block {block} came in with other bytes"


async def _anew(engine: Engine, plan: ArchivePlan, place: Path, found: Archived, told: Told) -> None:
    """A session whose tokens were really read, restored, and its tokens read again."""
    tokens = seeded_prompt(engine.stage.model.config.vocabulary, plan.appended)
    for number in range(plan.rounds):
        told("rounds of restoring and appending", number, plan.rounds)
        session = await engine.create_session()
        found.append_s.append(await _turn(engine, session, tokens))
        found.fork_s.append(await _forked(engine, session))
        await engine.export_session(session, place / f"read{number}")
        warm, rested = await _resumed(engine, session)
        found.warm_s.append(warm)
        found.rested_s.append(rested)
        await engine.close_session(session)
        await asyncio.to_thread(_forget, place / f"read{number}")
        started = time.perf_counter()
        session = await engine.import_session(place / f"read{number}")
        found.restore_s.append(time.perf_counter() - started)
        await engine.close_session(session)
    told("rounds of restoring and appending", plan.rounds, plan.rounds)


async def _turn(engine: Engine, session: SessionId, tokens: Sequence[int]) -> float:
    """Seconds of a turn of one new token."""
    started = time.perf_counter()
    async for _ in engine.generate(list(tokens), Sampling(max_tokens=1, temperature=0.0), session=session):
        pass
    return time.perf_counter() - started


async def _resumed(engine: Engine, session: SessionId) -> tuple[float, float]:
    """Seconds of a turn of one token in a session that has everything, and in one that gave its hot cache and key pages up; medians."""
    warm, rested = [], []
    for _ in range(_TURNS):
        warm.append(await _turn(engine, session, [1]))
        await engine.stage.streams.idle()
        memory = engine._sessions[session].memory
        assert memory is not None, "it has just had a turn"
        await memory.operations.settle()
        engine.stage.placement.shed(memory, shared=True)
        rested.append(await _turn(engine, session, [1]))
    return statistics.median(warm), statistics.median(rested)


async def _forked(engine: Engine, session: SessionId) -> float:
    """Seconds of a fork until it can go on; the median of some, since one takes less than a thread's turn on a busy machine."""
    await engine.stage.streams.idle()
    seconds = []
    for _ in range(_FORKS):
        started = time.perf_counter()
        fork = await engine.fork_session(session)
        await engine.stage.streams.idle()
        seconds.append(time.perf_counter() - started)
        await engine.close_session(fork)
    return statistics.median(seconds)


def _write_plain(path: Path, size_bytes: int) -> float:
    """Seconds to write and sync a new file."""
    piece = memoryview(os.urandom(_PIECE_BYTES))
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = size_bytes
        while left:
            left -= os.write(file, piece[: min(left, _PIECE_BYTES)])
        os.fsync(file)
    finally:
        os.close(file)
    return time.perf_counter() - started


def _read_plain(path: Path, into: bytearray) -> float:
    """Seconds to read a file once, piece by piece, into memory of its size that exists."""
    view = memoryview(into)
    started = time.perf_counter()
    file = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while got := os.readv(file, [view[done : done + _PIECE_BYTES]]):
            done += got
    finally:
        os.close(file)
    return time.perf_counter() - started


def _forget(place: Path) -> None:
    """Have the system drop what it keeps of a directory's files in memory: the next to be written or read then begins as the one before."""
    forget: Callable[..., None] = os.posix_fadvise
    for path in (each for each in place.rglob("*") if each.is_file()):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            forget(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def table(plan: ArchivePlan, found: Archived) -> Table:
    """Medians: seconds and bytes a second beside what they are compared with."""
    shown = Table(title=f"archives of {plan.rows:,} rows, {found.payload_bytes / 2**20:,.1f} MiB; medians of {plan.rounds}")
    for name in ("", "seconds", "MiB/s"):
        shown.add_column(name, justify="left" if not name else "right")
    timed = (
        ("plain write", found.plain_write_s),
        ("export", found.export_s),
        ("plain read", found.plain_read_s),
        ("import", found.import_s),
    )
    for name, seconds in timed:
        middle = statistics.median(seconds)
        shown.add_row(name, f"{middle:.3f}", f"{found.payload_bytes / 2**20 / middle:,.0f}")
    shown.add_row("export of nothing new", f"{statistics.median(found.again_s):.3f}", f"{found.again_bytes / 2**20:.2f} MiB in all")
    shown.add_row(f"import of {plan.appended:,} rows", f"{statistics.median(found.restore_s):.3f}", "")
    shown.add_row("a fork of them", f"{statistics.median(found.fork_s):.5f}", "")
    shown.add_row("a turn of one token", f"{statistics.median(found.warm_s):.5f}", "")
    shown.add_row("the same after giving up hot cache and keys", f"{statistics.median(found.rested_s):.5f}", "")
    shown.add_row("the rows read anew", f"{statistics.median(found.append_s):.3f}", "")
    return shown


def as_json(plan: ArchivePlan, found: Archived, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "version": _VERSION, "machine": machine, "rows": plan.rows, "appended": plan.appended, "rounds": plan.rounds,
        "payload_bytes": found.payload_bytes, "again_bytes": found.again_bytes, "ratios": found.ratios(),
        "seconds": {name: getattr(found, name) for name in found.__dataclass_fields__ if name.endswith("_s")},
    }  # fmt: skip
