"""Exports and imports while the session works, is closed, is cancelled, or the disk fails: nothing is lost, nobody waits for ever."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.archive import transfers
from engine.archive.directory import Directory
from engine.errors import ArchiveFailed, NotAdmitted, SessionBroken, SessionBusy, UnknownSession
from engine.sampling import Sampling
from engine.search.tiny import prompt
from engine.session import Phase
from tests.engine.archive.engines import engine_of, held, say, session_of, state


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block a thread, two a segment."""
    monkeypatch.setattr(transfers, "_BATCH_BLOCKS", 1)
    monkeypatch.setattr(transfers, "SEGMENT_BYTES", 60_000)


@pytest.mark.both_loops
async def test_a_session_at_work_is_not_exported(tmp_path: Path) -> None:
    """During a turn an export is refused; a turn asked for during an export comes behind it and says what it always would."""
    async with engine_of() as engine:
        session, plain = await session_of(engine, 130), await session_of(engine, 130)
        expected = await say(engine, plain, prompt(5, 3), 10)
        turn = engine.generate(list(prompt(5, 3)), Sampling(max_tokens=10, temperature=0.0, ignore_eos=True), session=session)
        got = list((await anext(turn)).token_ids)
        with pytest.raises(SessionBusy, match="export it between its turns"):
            await engine.export_session(session, tmp_path / "a")
        assert got + [token async for chunk in turn for token in chunk.token_ids] == expected
        export = asyncio.ensure_future(engine.export_session(session, tmp_path / "a"))
        await asyncio.sleep(0)
        assert engine._sessions[session].phase is Phase.EXPORTING
        with pytest.raises(SessionBusy):
            await engine.export_session(session, tmp_path / "b")
        following = asyncio.ensure_future(say(engine, session, (), 10))
        assert (await export).rows == 145
        assert await following == await say(engine, plain, (), 10)


async def test_an_export_right_behind_a_stop_waits_for_the_step_in_flight(tmp_path: Path) -> None:
    """The last chunk of a turn that stopped has come, a step of it is still in flight: the export has what the turn left."""
    async with engine_of() as engine:
        session, plain = await session_of(engine, 70), await session_of(engine, 70)
        said = await say(engine, plain, prompt(5, 3), 20)
        stop = said[11]
        got = await say(engine, session, prompt(5, 3), 20, stop_token_ids=(stop,))
        assert got == said[: said.index(stop) + 1]
        done = await engine.export_session(session, tmp_path / "a")
        assert done.rows == 71 + 5 + len(got) - 1
        assert (await engine.export_session(session, tmp_path / "a")).written_bytes == (tmp_path / "a/manifest.json").stat().st_size


async def test_an_imported_history_is_its_namespaces(tmp_path: Path) -> None:
    """A stateless prompt that goes on from it begins with its rows, in the namespace that it came into and in no other."""
    async with engine_of() as engine:
        session = await session_of(engine, 200)
        tokens = tuple(engine._sessions[session].tokens)
        await engine.export_session(session, tmp_path / "a")
    async with engine_of(prefix_cache="on") as other:
        await other.import_session(tmp_path / "a", namespace="one")
        for namespace, cached in (("two", 0), ("one", 192)):
            generation = other.generate([*tokens, 1, 2, 3], Sampling(max_tokens=1, temperature=0.0), namespace=namespace)
            usage = [chunk.usage async for chunk in generation][-1]
            assert (usage.cached_tokens >= cached) if cached else (usage.cached_tokens == 0), f"namespace {namespace}"


@pytest.mark.both_loops
async def test_a_session_closed_while_it_is_archived(tmp_path: Path, small_batches: None) -> None:
    """Closing waits until no thread reads its memory; the export ends with one line and leaves no archive of half of it."""
    async with engine_of() as engine:
        before = held(engine)
        session = await session_of(engine, 400)
        started = asyncio.Event()
        export = asyncio.ensure_future(engine.export_session(session, tmp_path / "a", lambda *_: started.set()))
        await started.wait()
        await engine.close_session(session)
        with pytest.raises(UnknownSession, match="was closed while it was archived"):
            await export
        assert os.listdir(tmp_path / "a") == []
        assert held(engine) == before


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 8, 13, 21, 34])
@pytest.mark.parametrize("way", ["out", "in"])
async def test_cancelled_anywhere_it_leaves_what_was(tmp_path: Path, small_batches: None, way: str, rounds: int) -> None:
    """A cancelled export leaves session and archive as they were, a cancelled import no session; both can be done again."""
    async with engine_of() as engine:
        session = await session_of(engine, 300)
        await engine.export_session(session, tmp_path / "a")
        expected = await say(engine, session, prompt(70, 2), 3)
        files = {name: (tmp_path / "a" / name).read_bytes() for name in os.listdir(tmp_path / "a")}
        before = held(engine)
        work = engine.export_session(session, tmp_path / "a") if way == "out" else engine.import_session(tmp_path / "a")
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]  # either
        for _ in range(rounds):
            await asyncio.sleep(0.001)
        finished = task.done()
        task.cancel()
        await asyncio.wait([task])
        if not finished and task.cancelled():
            if way == "in":
                assert held(engine) == before
            assert {name: (tmp_path / "a" / name).read_bytes() for name in os.listdir(tmp_path / "a")} == files or way == "out"
        assert engine._sessions[session].phase is Phase.READY
        await engine.export_session(session, tmp_path / "b")
        await engine.close_session(session)
        again = await engine.import_session(tmp_path / "a")
        if len(engine._sessions[again].tokens) < 350:
            assert await say(engine, again, prompt(70, 2), 3) == expected


@pytest.mark.both_loops
async def test_an_engine_that_ends_waits_for_neither_for_long(tmp_path: Path, small_batches: None) -> None:
    """Leaving the engine's block stops an export and an import at the next batch; nothing is lost but them."""
    async with engine_of() as engine:
        session = await session_of(engine, 400)
        await engine.export_session(session, tmp_path / "a")
        await say(engine, session, prompt(200, 1), 1)
        started = [asyncio.Event(), asyncio.Event()]
        out = asyncio.ensure_future(engine.export_session(session, tmp_path / "b", lambda *_: started[0].set()))
        into = asyncio.ensure_future(engine.import_session(tmp_path / "a", lambda *_: started[1].set()))
        await started[0].wait()
        await started[1].wait()
    for task in (out, into):
        assert task.done()
        with pytest.raises((UnknownSession, NotAdmitted)):
            await task


async def test_a_full_disk_costs_the_session_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None) -> None:
    """The error names disk and directory in one line; the session goes on, and is exported elsewhere."""
    real = os.pwritev

    def full(file: int, views: list[memoryview], offset: int) -> int:
        if offset > 0:
            raise OSError(28, "No space left on device")
        return real(file, views, offset)

    async with engine_of() as engine:
        session, plain = await session_of(engine, 200), await session_of(engine, 200)
        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(ArchiveFailed, match="No space left on device; make room"):
            await engine.export_session(session, tmp_path / "a")
        monkeypatch.undo()
        assert os.listdir(tmp_path / "a") == []
        assert await say(engine, session, prompt(3, 3), 9) == await say(engine, plain, prompt(3, 3), 9)
        assert (await engine.export_session(session, tmp_path / "a")).rows > 200


async def test_short_reads_and_writes_are_followed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that moves fewer bytes than asked changes nothing."""
    real = {name: getattr(os, name) for name in ("pwritev", "preadv")}

    def few(name: str) -> Callable[[int, list[memoryview], int], int]:
        return lambda file, views, offset: real[name](file, [views[0][: min(1000, len(views[0]))]], offset)  # type: ignore[no-any-return]

    async with engine_of() as engine:
        session = await session_of(engine, 150)
        expected = state(engine, session)
        for name in real:
            monkeypatch.setattr(os, name, few(name))
        await engine.export_session(session, tmp_path / "a")
        await engine.close_session(session)
        session = await engine.import_session(tmp_path / "a")
        assert state(engine, session) == expected


async def test_a_session_whose_copy_fails_is_broken_and_not_archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier's failure ends the session, not the engine; no manifest is written."""

    def fails(*_: object) -> None:
        raise OSError("the copy failed")

    async with engine_of() as engine:
        session = await session_of(engine, 70)
        monkeypatch.setattr("memory.copyback.copy_bytes", fails)
        with pytest.raises(SessionBroken, match="the copy failed"):
            await engine.export_session(session, tmp_path / "a")
        monkeypatch.undo()
        assert engine._sessions[session].phase is Phase.BROKEN
        assert os.listdir(tmp_path / "a") == []
        await engine.close_session(session)
        assert len(await say(engine, None, prompt(20, 1), 5)) == 5


async def test_files_are_never_touched_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call to the system's files is made by a thread that is not the loop's."""
    import threading

    loop_thread, seen = threading.get_ident(), []
    for name in ("open", "pwritev", "preadv", "fsync", "rename", "unlink", "listdir", "fstat"):
        real = getattr(os, name)

        def watched(*arguments: Any, _real: Any = real, _name: str = name, **named: Any) -> Any:
            if any(str(tmp_path) in str(argument) for argument in arguments) or "dir_fd" in named or _name in ("pwritev", "preadv"):
                seen.append((_name, threading.get_ident()))
            return _real(*arguments, **named)

        monkeypatch.setattr(os, name, watched)
    async with engine_of() as engine:
        session = await session_of(engine, 150)
        await engine.export_session(session, tmp_path / "a")
        await engine.import_session(tmp_path / "a")
    assert {"open", "pwritev", "preadv"} <= {name for name, _ in seen}
    assert [name for name, thread in seen if thread == loop_thread] == []


def test_a_closed_directory_can_be_had_again(tmp_path: Path) -> None:
    """The lock ends with the holder."""
    for _ in range(3):
        Directory(tmp_path / "a", writes=True).close()
