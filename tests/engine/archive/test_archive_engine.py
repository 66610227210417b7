"""Sessions of an engine out to a directory and into another engine: what they say next, and what is left when something is refused."""

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.archive.stages import merge, split
from engine.errors import ArchiveRefused, NotAdmitted
from engine.sampling import Sampling
from engine.search.tiny import prompt
from tests.engine.archive.engines import engine_of, held, model, say, session_of, state


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


async def test_an_archive_may_have_many_tokens_without_rows(tmp_path: Path) -> None:
    """A fork of a session that still decodes has the rows of full blocks; archived, the rest is read by its next turn, to the same end."""
    async with engine_of() as engine:
        running = await engine.create_session()
        generation = engine.generate(list(prompt(100, 1)), Sampling(max_tokens=60, temperature=0.0, ignore_eos=True), session=running)
        await anext(generation)
        branch = await engine.fork_session(running)
        await engine.export_session(branch, tmp_path / "a")
        one = engine._sessions[branch]
        assert one.rows <= 64 < 100 < len(one.tokens)
        await generation.aclose()
        expected = await say(engine, branch, prompt(7, 2), 30)
    async with engine_of(placement="resident") as other:
        taken = await other.import_session(tmp_path / "a")
        assert await say(other, taken, prompt(7, 2), 30) == expected


@pytest.mark.slow
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
