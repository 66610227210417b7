"""Sessions of an engine out to a directory and into another engine: what they say next, and what is left when something is refused."""

import asyncio
import dataclasses
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.archive import transfers
from engine.archive.directory import Directory
from engine.archive.stages import merge, split
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ArchiveFailed, ArchiveRefused, NotAdmitted, SessionBroken, SessionBusy, UnknownSession
from engine.model.glm import Model
from engine.protocol import SessionId
from engine.sampling import Sampling
from engine.search.tiny import TinyModel, prompt
from engine.session import Phase
from tests.engine.runs import small


@functools.cache
def model(seed: int = 5) -> Model:
    """The tiny model, with room for long sessions."""
    tiny = TinyModel(seed).model
    return dataclasses.replace(tiny, config=dataclasses.replace(tiny.config, context_max=2048))


@asynccontextmanager
async def engine_of(weights: Model | None = None, **settings: object) -> AsyncIterator[Engine]:
    """An engine of the tiny model whose parts are checked and empty at the end."""
    config: EngineConfig = small(**{"hot_rows": 24, "host_memory_bytes": 8 << 20, **settings})
    async with Engine.open("tiny", config, weights=weights or model()) as engine:
        yield engine
        engine.stage.arena.check_integrity()
        engine.stage.pool.check_integrity()


def held(engine: Engine) -> tuple[object, ...]:
    """What must be as before when nothing new is held."""
    stage = engine.stage
    return stage.arena.statistics(), stage.pool.statistics(), stage.ledger.statistics(), tuple(engine._sessions)


async def say(engine: Engine, session: SessionId | None, ids: tuple[int, ...], tokens: int, **sampling: Any) -> list[int]:
    """Tokens of one turn, greedy unless told otherwise."""
    asked = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return [token async for chunk in engine.generate(list(ids), asked, session=session) for token in chunk.token_ids]


async def session_of(engine: Engine, rows: int) -> SessionId:
    """A session between two turns with `rows` rows."""
    session = await engine.create_session()
    turns = [rows] if rows < 40 else [rows - 30, 30]
    for number, length in enumerate(turns):
        tokens = 1 if number == 0 or length == 1 else min(9, length)
        held_before = len(engine._sessions[session].tokens) - engine._sessions[session].rows
        await say(engine, session, prompt(length - held_before - tokens + 1, rows + number), tokens)
    assert engine._sessions[session].rows == rows
    return session


def state(engine: Engine, session: SessionId) -> dict[str, object]:
    """Every byte of a session, wherever it lies."""
    one = engine._sessions[session]
    memory, layout = one.memory, engine.stage.layout
    assert memory is not None
    rows, keys = [], []
    for position in range(memory.counts.logical):
        block, within = divmod(position, 64)
        mirrored = memory.ring is not None and block < memory.counts.mirrored // 64
        held_in = memory.mirror_block(block) if mirrored else memory.device_block(block)
        for layer in range(layout.layers):
            rows.append(held_in[layout.row_offset(layer, within) :][: layout.row.row_bytes])
        for layer in range(layout.key_layers):
            keys.append(memory.pages.view(layer, position // 1024).view(1024, -1)[position % 1024])
            keys.append(held_in[layout.key_offset(layer, within) :][: layout.key.key_bytes])
    return {
        "rows": torch.cat(rows).tolist(), "keys": torch.cat(keys).tolist(), "hidden": memory.hidden.tolist(), "tokens": list(one.tokens),
        "revision": one.revision, "logical": int(memory.state[0]),
    }  # fmt: skip


@pytest.mark.parametrize(("row", "rows"), [("q8g64", 1), ("q8g64", 63), ("bf16", 64), ("q8g64", 65), ("f32", 200)])
async def test_a_session_is_the_same_in_another_engine(tmp_path: Path, row: str, rows: int) -> None:
    """Rows, keys, hidden states, tokens and revision are equal to the byte in both placements, and so is what it says next."""
    async with engine_of(row_format=row) as engine:
        session = await session_of(engine, rows)
        before = state(engine, session)
        done = await engine.export_session(session, tmp_path / "a")
        assert (done.rows, state(engine, session)) == (rows, before)
        expected = await say(engine, session, (), 70)
    for placement in ("offload", "resident"):
        async with engine_of(row_format=row, placement=placement, append_chunk_rows=33, hot_rows=8) as other:
            assert await other.import_session(tmp_path / "a") == session
            memory = other._sessions[session].memory
            assert memory is not None
            memory.check_integrity()
            assert state(other, session) == before
            assert await say(other, session, (), 70) == expected


async def test_an_empty_session_comes_back(tmp_path: Path) -> None:
    """A session without a turn is an archive without segments, and takes its first turn after an import."""
    async with engine_of() as engine:
        session = await engine.create_session()
        assert (await engine.export_session(session, tmp_path / "a")).rows == 0
        assert os.listdir(tmp_path / "a") == ["manifest.json"]
        await engine.close_session(session)
        assert await engine.import_session(tmp_path / "a") == session
        assert await say(engine, session, prompt(20, 1), 5) == await say(engine, None, prompt(20, 1), 5)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["offload", "resident"])
async def test_512_tokens_after_an_export_a_wipe_and_an_import(tmp_path: Path, placement: str) -> None:
    """512 greedy tokens, and sampled ones with penalties behind them, equal those of the session that never left."""
    penalised = {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    async with engine_of(row_format="q8g64") as engine:
        session = await session_of(engine, 150)
        await engine.export_session(session, tmp_path / "a")
        expected = await say(engine, session, prompt(5, 1), 512) + await say(engine, session, prompt(5, 2), 64, **penalised)
    async with engine_of(row_format="q8g64", placement=placement, append_chunk_rows=100, hot_rows=16) as other:
        session = await other.import_session(tmp_path / "a")
        assert await say(other, session, prompt(5, 1), 512) + await say(other, session, prompt(5, 2), 64, **penalised) == expected


async def test_a_later_export_writes_little_and_brings_all(tmp_path: Path) -> None:
    """After one more turn an export writes the tail and a manifest; progress counts every byte once; its import is the session."""
    async with engine_of() as engine:
        session = await session_of(engine, 260)
        first = await engine.export_session(session, tmp_path / "a")
        await say(engine, session, prompt(3, 9), 5)
        told: list[tuple[int, int]] = []
        again = await engine.export_session(session, tmp_path / "a", lambda *both: told.append(both))
        assert again.rows == 268
        manifest_bytes = (tmp_path / "a/manifest.json").stat().st_size
        assert again.written_bytes - manifest_bytes <= 12 * engine.stage.layout.block_bytes // 64 < first.written_bytes / 10
        assert told == sorted(told)
        assert told[-1] == (again.payload_bytes, again.payload_bytes)
        expected = await say(engine, session, (), 20)
    async with engine_of() as other:
        told.clear()
        session = await other.import_session(tmp_path / "a", lambda *both: told.append(both))
        assert told[-1] == (again.payload_bytes, again.payload_bytes)
        assert await say(other, session, (), 20) == expected


@pytest.mark.parametrize("kept", [60, 64, 201])
async def test_a_cut_session_comes_back_cut(tmp_path: Path, kept: int) -> None:
    """After a truncation an export writes a manifest alone, and what is imported says what the cut session says."""
    async with engine_of(row_format="q8g64") as engine:
        session = await session_of(engine, 230)
        await engine.export_session(session, tmp_path / "a")
        await engine.truncate_session(session, kept)
        done = await engine.export_session(session, tmp_path / "a")
        assert done.rows == engine._sessions[session].rows <= kept
        assert done.written_bytes == (tmp_path / "a/manifest.json").stat().st_size
        memory = engine._sessions[session].memory
        assert memory is not None
        hidden_from = memory.counts.hidden_from
        expected = await say(engine, session, prompt(7, 1), 40)
    async with engine_of(row_format="q8g64", placement="resident") as other:
        await other.import_session(tmp_path / "a")
        memory = other._sessions[session].memory
        assert memory is not None
        assert memory.counts.hidden_from == hidden_from
        assert await say(other, session, prompt(7, 1), 40) == expected


async def test_drafts_are_as_often_right(tmp_path: Path) -> None:
    """With drafts every count of proposed and accepted ones, and every token, equals those of the session that never left."""
    async with engine_of(row_format="q8g64", draft_depth=3) as engine:
        session = await session_of(engine, 100)
        await engine.export_session(session, tmp_path / "a")
        before = engine.statistics()
        expected = await say(engine, session, prompt(3, 1), 90)
        after = engine.statistics()
    async with engine_of(row_format="q8g64", draft_depth=3, append_chunk_rows=50) as other:
        session = await other.import_session(tmp_path / "a")
        assert await say(other, session, prompt(3, 1), 90) == expected
        found = other.statistics()
    for name in ("drafts_proposed", "drafts_accepted"):
        gained = [late - early for early, late in zip(getattr(before, name), getattr(after, name), strict=True)]
        assert list(getattr(found, name)) == gained, name
    assert sum(found.drafts_proposed) > 0, "nothing was ever drafted: the comparison proves nothing"


async def test_an_archive_that_was_split_and_merged_is_the_session(tmp_path: Path) -> None:
    """Cut into the archives of two stages, inside a selection group, and put together again, it says what it always would."""
    async with engine_of() as engine:
        session = await session_of(engine, 200)
        await engine.export_session(session, tmp_path / "a")
        expected = await say(engine, session, (), 30)
    split(tmp_path / "a", [range(1), range(1, 3)], [tmp_path / "first", tmp_path / "last"])
    merge([tmp_path / "first", tmp_path / "last"], tmp_path / "b")
    async with engine_of() as other:
        for part in ("first", "last"):
            with pytest.raises(ArchiveRefused, match="in another format"):
                await other.import_session(tmp_path / part)
        assert await say(other, await other.import_session(tmp_path / "b"), (), 30) == expected


async def test_an_empty_session_is_exported_once_at_a_time(tmp_path: Path) -> None:
    """Two exports of a session without rows at once: one is refused."""
    async with engine_of() as engine:
        session = await engine.create_session()
        found = await asyncio.gather(*(engine.export_session(session, tmp_path / name) for name in "ab"), return_exceptions=True)
        assert sorted(type(one).__name__ for one in found) == ["Exported", "SessionBusy"]


async def test_an_id_that_is_taken_is_not_taken_twice(tmp_path: Path) -> None:
    """Imported beside itself, at once and again, a session gets other ids; the sessions go their own ways."""
    async with engine_of() as engine:
        session = await session_of(engine, 70)
        await engine.export_session(session, tmp_path / "a")
        others = await asyncio.gather(*(engine.import_session(tmp_path / "a") for _ in range(3)))
        assert len({session, *others}) == 4
        await say(engine, others[0], prompt(4, 4), 5)
        assert await say(engine, others[1], (), 12) == await say(engine, session, (), 12)


@pytest.mark.both_loops
async def test_two_come_and_there_is_room_for_one(tmp_path: Path) -> None:
    """One of two imports is refused with the missing bytes, at once; when the other has left, it comes in."""
    async with engine_of() as engine:
        session = await session_of(engine, 250)
        await engine.export_session(session, tmp_path / "a")
        block_bytes = engine.stage.layout.block_bytes
    async with engine_of(host_memory_bytes=6 * block_bytes) as other:
        before = held(other)
        found = await asyncio.wait_for(
            asyncio.gather(*(other.import_session(tmp_path / "a") for _ in range(2)), return_exceptions=True), 60
        )
        refused = [one for one in found if isinstance(one, NotAdmitted)]
        assert len(refused) == 1
        assert "bytes of host memory missing" in str(refused[0])
        await other.close_session(next(one for one in found if isinstance(one, str)))  # type: ignore[arg-type]  # the id
        assert held(other) == before
        assert await other.import_session(tmp_path / "a") == session
    async with engine_of(sessions_max=1) as other:
        found = await asyncio.gather(*(other.import_session(tmp_path / "a") for _ in range(2)), return_exceptions=True)
        assert sorted(type(one).__name__ for one in found) == ["NotAdmitted", "str"]


async def test_what_does_not_fit_the_engine_is_refused(tmp_path: Path) -> None:
    """Other weights, formats, a shorter context, no archive: one line with its reason, and nothing is held."""
    async with engine_of() as engine:
        session = await session_of(engine, 100)
        await engine.export_session(session, tmp_path / "a")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"weights": model(6)}, ArchiveRefused, "of another model: layer 0 has other weights"),
        ({"row_format": "bf16"}, ArchiveRefused, "in another format: rows are f32"),
        ({"index_key_format": "bf16"}, ArchiveRefused, "in another format: index keys are f32"),
        ({"context_max": 64}, NotAdmitted, "the archive has 101 tokens"),
    ]
    for settings, kind, says in cases:
        async with engine_of(**settings) as other:
            before = held(other)
            with pytest.raises(kind, match=says) as caught:
                await other.import_session(tmp_path / "a")
            assert "\n" not in str(caught.value)
            assert held(other) == before
            for path in (tmp_path / "absent", tmp_path):
                with pytest.raises(ArchiveRefused, match="incomplete"):
                    await other.import_session(path)


async def test_another_template_is_said_and_no_hindrance(tmp_path: Path) -> None:
    """The rows are what they are: a log line names the session."""
    async with engine_of() as engine:
        session = await session_of(engine, 40)
        await engine.export_session(session, tmp_path / "a")
        await engine.close_session(session)
        identity = engine._archives._identity
        assert identity is not None
        engine._archives._identity = dataclasses.replace(identity, template="0" * 64)
        with capture_logs() as logs:
            await engine.import_session(tmp_path / "a")
    assert [one["session_id"] for one in logs if one["event"] == "restore.template_differs"] == [session]


# While it goes on.


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
