"""Idle sessions leave memory for the disk when somebody needs it: who goes, who waits, who stays, and what comes back."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy
import pytest
from structlog.testing import capture_logs

from engine.archive.reader import Reader
from engine.engine import Engine
from engine.errors import ArchiveFailed, ForebayError, NotAdmitted, SessionBusy, UnknownSession
from engine.protocol import SessionId
from engine.sampling import Sampling
from engine.search.tiny import prompt
from engine.session import Phase
from memory.append import blocks_of
from streams import SeededOrder, VirtualBackend
from tests.engine.archive.archive_world import unit_rows
from tests.engine.archive.engines import engine_of, model, say, session_of
from tests.engine.runs import small

LIMIT_S = 60


class Place:
    """Where sessions are archived, each in a directory of its name."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self.engine, self.path = engine, path
        self.taken: list[SessionId] = []
        self.before: Callable[[SessionId], None] = lambda _: None
        self.gate, self.written = asyncio.Event(), asyncio.Event()
        self.gate.set()
        engine.departures.archive_with(self.archive, "")

    async def archive(self, session: SessionId) -> None:
        self.taken.append(session)
        self.before(session)
        await self.engine.export_session(session, self.path / session)
        self.written.set()
        await self.gate.wait()

    async def back(self, session: SessionId) -> None:
        """Bring a session back that has left."""
        while session not in self.engine.sessions:
            with contextlib.suppress(NotAdmitted):  # others run, and will give memory back
                assert await self.engine.import_session(self.path / session) == session
            await asyncio.sleep(0)


@asynccontextmanager
async def tight(tmp_path: Path, blocks: int, **settings: object) -> AsyncIterator[tuple[Engine, Place]]:
    """An engine with room for so many blocks of rows, and a place for its sessions."""
    async with engine_of() as any_:
        block_bytes = any_.stage.layout.block_bytes
    async with engine_of(host_memory_bytes=blocks * block_bytes, **settings) as engine:
        assert engine.stage.arena.statistics().blocks == blocks
        place = Place(engine, tmp_path)
        try:
            yield engine, place
        finally:
            place.gate.set()  # a failing test ends instead of waiting for its own gate


both = pytest.mark.parametrize("placement", ["offload", "resident"])


async def test_a_request_waits_while_the_least_recently_used_leave(tmp_path: Path) -> None:
    """A turn that lacks five blocks waits for two of four idle sessions, the two used longest ago, which later go on as they were."""
    async with engine_of() as roomy:
        plain = [await session_of(roomy, 150) for _ in range(4)]
        expected = [await say(roomy, session, prompt(5, 3), 8) for session in plain]
    async with tight(tmp_path, 14) as (engine, place):
        sessions = [await session_of(engine, 150) for _ in range(4)]
        order = [2, 0, 3, 1]
        for number in order:
            await say(engine, sessions[number], (1,), 1)
            await engine.truncate_session(sessions[number], 151)
        assert place.taken == []
        said = await asyncio.wait_for(say(engine, None, prompt(400, 1), 5), LIMIT_S)
        assert len(said) == 5
        assert place.taken == [sessions[2], sessions[0]]
        assert set(engine.sessions) == {sessions[3], sessions[1]}
        assert engine.departures.count == 2
        for number in (2, 0):
            await place.back(sessions[number])
        for session, wanted in zip(sessions, expected, strict=True):
            await place.back(session)
            assert await say(engine, session, prompt(5, 3), 8) == wanted


async def test_a_turn_of_a_session_spares_it(tmp_path: Path) -> None:
    """A session that must grow waits for the others, and is not archived itself although it was used longest ago."""
    async with tight(tmp_path, 8) as (engine, place):
        first, second = await session_of(engine, 150), await session_of(engine, 150)
        assert len(await asyncio.wait_for(say(engine, first, prompt(200, 1), 5), LIMIT_S)) == 5
        assert place.taken == [second]


async def test_without_a_place_nobody_leaves(tmp_path: Path) -> None:
    """Where nobody said where archives go, what idle sessions of callers hold is refused, as before."""
    async with tight(tmp_path, 8) as (engine, place):
        engine.departures._archives.clear()
        held = [await session_of(engine, 150) for _ in range(2)]
        with pytest.raises(NotAdmitted, match="host memory missing; ask for fewer tokens"):
            await say(engine, None, prompt(200, 1), 5)
        assert set(engine.sessions) == set(held)
        assert place.taken == []


async def test_a_full_disk_keeps_sessions_in_memory(tmp_path: Path) -> None:
    """A disk that is full is met once, not once a session; who waited is told in one line why; the sessions go on, and leave later."""

    def full(_: SessionId) -> None:
        raise ArchiveFailed("cannot write archive 'x': No space left on device; make room or choose another directory")

    async with tight(tmp_path, 8) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        place.before = full
        with capture_logs() as logs, pytest.raises(NotAdmitted, match=r"stay in memory: cannot write .*No space left") as caught:
            await asyncio.wait_for(say(engine, None, prompt(200, 1), 5), LIMIT_S)
        assert "\n" not in str(caught.value)
        assert place.taken == held[:1]
        assert [line["event"] for line in logs if line["event"].startswith("session.")] == ["session.not_archived"]
        assert len(await say(engine, held[0], (1,), 2)) == 2
        place.before = lambda _: None
        assert len(await asyncio.wait_for(say(engine, None, prompt(200, 1), 5), LIMIT_S)) == 5
        assert place.taken == [held[0], held[1]]


async def test_one_that_cannot_be_archived_lets_the_next_go(tmp_path: Path) -> None:
    """A session whose export is refused stays, and the next in order leaves instead."""

    async with tight(tmp_path, 8) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]

        def refuse(session: SessionId) -> None:
            if session == held[0]:
                raise ForebayError("not this one")

        place.before = refuse
        assert len(await asyncio.wait_for(say(engine, None, prompt(150, 1), 5), LIMIT_S)) == 5
        assert place.taken == held
        assert list(engine.sessions) == held[:1]


@pytest.mark.both_loops
async def test_who_is_asked_for_meanwhile_stays(tmp_path: Path) -> None:
    """A turn that comes while its session is archived runs as if nothing had been; the next one leaves instead."""
    async with tight(tmp_path, 11) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        place.gate.clear()
        waiting = asyncio.ensure_future(say(engine, None, prompt(350, 1), 5))
        await place.written.wait()
        turn = asyncio.ensure_future(say(engine, held[0], prompt(5, 3), 5))
        await asyncio.sleep(0)
        with pytest.raises(SessionBusy):
            await engine.departures.archive(held[0])
        place.gate.set()
        assert len(await asyncio.wait_for(turn, LIMIT_S)) == 5
        assert len(await asyncio.wait_for(waiting, LIMIT_S)) == 5
        assert place.taken == held
        assert list(engine.sessions) == held[:1]
        assert engine.sessions[held[0]].revision == 3


async def test_a_cut_that_comes_meanwhile_waits(tmp_path: Path) -> None:
    """A cut asked for while its session is archived comes behind that, and the session stays."""
    async with tight(tmp_path, 11) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        started = asyncio.Event()
        place.before = lambda _: started.set()
        waiting = asyncio.ensure_future(say(engine, None, prompt(350, 1), 5))
        await started.wait()
        await asyncio.sleep(0)
        assert engine._sessions[held[0]].phase is Phase.EXPORTING
        await asyncio.wait_for(engine.truncate_session(held[0], 100, revision=2), LIMIT_S)
        assert len(await asyncio.wait_for(waiting, LIMIT_S)) == 5
        assert place.taken == held[:1], "the cut made the room"
        assert len(engine.sessions[held[0]].token_ids) == 100


async def test_a_full_disk_and_a_prompt_that_begins_like_an_idle_session(tmp_path: Path) -> None:
    """With a history to begin with, who waits is refused as soon as all that could leave were tried; nobody is tried for ever."""

    def full(_: SessionId) -> None:
        raise ArchiveFailed("cannot write archive 'x': No space left on device; make room or choose another directory")

    async with tight(tmp_path, 8, prefix_cache="on") as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        place.before = full
        asked = [*engine.sessions[held[1]].token_ids, *prompt(200, 1)]
        for tries in (1, 2):
            with pytest.raises(NotAdmitted, match="No space left"):
                await asyncio.wait_for(say(engine, None, tuple(asked), 5), LIMIT_S)
            assert len(place.taken) <= 2 * tries


async def test_turns_behind_one_that_is_held_up_go_first(tmp_path: Path) -> None:
    """A prompt that lacks the room of two sessions whose turns wait behind it starts when those have ended and left."""
    async with tight(tmp_path, 8) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        said: list[int] = []

        async def turn(number: int, session: SessionId | None, rows: int) -> None:
            assert len(await say(engine, session, prompt(rows, 1), 5)) == 5
            said.append(number)

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(turn(0, None, 400))
            for number, session in enumerate(held, 1):
                group.create_task(turn(number, session, 3))
        assert said == [1, 2, 0]
        assert place.taken == held


async def test_turns_that_hold_all_memory_and_lack_more(tmp_path: Path) -> None:
    """Of two turns that each lack what the other's session has, one is told to come again; the first, and who is before both, go on."""
    async with tight(tmp_path, 8) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        async with asyncio.timeout(LIMIT_S):
            asked = [(None, 400), (held[0], 200), (held[1], 200)]
            turns = [asyncio.ensure_future(say(engine, session, prompt(rows, 1), 5)) for session, rows in asked]
            with pytest.raises(NotAdmitted, match="does not fit now") as caught:
                await turns[2]
            assert caught.value.retry_after_s
            assert [len(await turn) for turn in turns[:2]] == [5, 5]
        assert place.taken == [held[1], held[0]]


async def test_a_bug_while_one_leaves_costs_nobody_else(tmp_path: Path) -> None:
    """An archiver that raises what it should not leaves the session in memory, a traceback in the log, and the engine at work."""

    def fail(session: SessionId) -> None:
        if len(place.taken) == 1:
            raise RuntimeError("a bug")

    async with tight(tmp_path, 8) as (engine, place):
        held = [await session_of(engine, 150) for _ in range(2)]
        place.before = fail
        with capture_logs() as logs:
            assert len(await asyncio.wait_for(say(engine, None, prompt(150, 1), 5), LIMIT_S)) == 5
        assert place.taken == held
        assert list(engine.sessions) == held[:1]
        assert [line["log_level"] for line in logs if line["event"] == "session.not_archived"] == ["error"]


async def test_told_to_leave(tmp_path: Path) -> None:
    """A session archives when it is told to, right behind its last token; one in a turn, or unknown, does not."""
    async with tight(tmp_path, 8) as (engine, _):
        session = await session_of(engine, 150)
        turn = engine.generate(list(prompt(5, 3)), Sampling(temperature=0.0, ignore_eos=True, max_tokens=200), session=session)
        await anext(turn)
        with pytest.raises(SessionBusy, match="archive it between its turns"):
            await engine.departures.archive(session)
        await turn.aclose()
        assert await engine.departures.archive(session)
        with pytest.raises(UnknownSession):
            await engine.departures.archive(session)
        assert engine.stage.arena.statistics().references == 0


@both
async def test_forks_imports_and_new_sessions_find_room(tmp_path: Path, placement: str) -> None:
    """A fork, an import and a session past the most that are held wait for idle sessions to leave."""
    async with tight(tmp_path, 30 if placement == "resident" else 9, placement=placement, sessions_max=3) as (engine, place):
        first, second = await session_of(engine, 150), await session_of(engine, 150)
        await engine.departures.archive(first)
        third = await session_of(engine, 150)
        fourth = await engine.create_session()
        assert len(engine.sessions) == 3
        await place.back(first)
        assert second not in engine.sessions
        made = await engine.fork_session(first, 100)
        assert third not in engine.sessions
        await engine.close_session(fourth)
        await engine.close_session(made)
        assert len(await say(engine, first, prompt(5, 3), 3)) == 3


async def test_what_a_prompt_begins_with_leaves_last(tmp_path: Path) -> None:
    """A prompt that begins with an idle session's history is given room by another one, and its rows are reused."""
    async with tight(tmp_path, 10, prefix_cache="on") as (engine, place):
        first, second = await session_of(engine, 200), await session_of(engine, 150)
        tokens = [*engine.sessions[first].token_ids]
        generation = engine.generate([*tokens[:190], *prompt(150, 9)], Sampling(temperature=0.0, ignore_eos=True, max_tokens=3))
        usage = [chunk.usage async for chunk in generation][-1]
        assert usage.cached_tokens >= 190
        assert place.taken == [second]


@both
async def test_index_keys_go_before_histories(placement: str) -> None:
    """Where the device is short idle sessions give up their index keys, before a stored history goes; the next turn has them again."""
    async with engine_of() as roomy:
        plain = await session_of(roomy, 300)
        expected = await say(roomy, plain, prompt(5, 3), 8)
    async with engine_of(placement=placement, prefix_cache="on") as engine:
        sessions = [await session_of(engine, 300) for _ in range(3)]
        await say(engine, None, prompt(200, 7), 2)
        while engine._loop.stored.reclaim(None, device=False, drops_max=0):
            pass
        pool = engine.stage.pool
        pages = [one.memory.pages for one in (engine._sessions[session] for session in sessions) if one.memory is not None]
        missing = engine.stage.placement.needs(320).device_bytes - 2 * pages[0].store.span_bytes
        pool._budget_bytes = pool.statistics().allocated_bytes + missing
        assert len(await asyncio.wait_for(say(engine, None, prompt(300, 9), 5), LIMIT_S)) == 5
        assert [table.pages for table in pages] == [0, 0, 1]
        assert engine.statistics().stored == 2
        pool._budget_bytes = None
        for session in sessions:
            assert await say(engine, session, prompt(5, 3), 8) == expected


async def test_an_engine_that_ends_waits_for_who_is_leaving(tmp_path: Path) -> None:
    """Leaving the engine's block while a session leaves ends both; who waited for room is told."""
    async with tight(tmp_path, 8) as (engine, place):
        await session_of(engine, 150)
        place.gate.clear()
        waiting = asyncio.ensure_future(say(engine, None, prompt(400, 1), 5))
        while not place.taken:  # noqa: ASYNC110 - a list
            await asyncio.sleep(0)
        place.gate.set()
    await asyncio.wait([waiting])


async def archived_rows(engine: Engine, path: Path) -> dict[str, list[bytes]]:
    """Rows and keys of an archive, as bytes."""
    identity = await engine._archives.known()
    reader = Reader(path, identity)
    try:
        rows = reader.manifest.rows
        blocks = [numpy.zeros(identity.block_bytes, numpy.uint8) for _ in range(blocks_of(rows))]
        reader.read(0, blocks)
        return {part.kind: [unit.tobytes() for unit in unit_rows(blocks, part, rows)] for part in identity.parts}
    finally:
        reader.close()


@both
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow if seed < 5 else pytest.mark.long) for seed in range(1, 12))]
)
async def test_no_archive_has_what_was_not_mirrored(tmp_path: Path, placement: str, seed: int) -> None:
    """Under any order of completions idle archiving writes rows and keys that are in RAM: every archive is a plain run's to the byte."""
    draw = random.Random(seed)
    backend = VirtualBackend(SeededOrder(seed))
    async with engine_of() as any_:
        block_bytes = any_.stage.layout.block_bytes
    config = small(hot_rows=24, host_memory_bytes=16 * block_bytes, placement=placement, prefix_cache=draw.choice(("on", "off")))
    talks: dict[SessionId, list[tuple[tuple[int, ...], int]]] = {}
    said: dict[SessionId, list[list[int]]] = {}
    async with Engine.open("tiny", config, weights=model(), backend=backend) as engine:
        place = Place(engine, tmp_path)

        async def client(number: int, draw: random.Random) -> None:
            session = await engine.create_session()
            talks[session], said[session] = [], []
            for turn in range(3):
                asked, tokens = prompt(draw.choice((40, 63, 64, 90)), 10 * number + turn), draw.choice((1, 5, 9))
                while True:
                    await place.back(session)
                    try:
                        said[session].append(await say(engine, session, asked, tokens))
                        break
                    except UnknownSession:
                        continue
                    except NotAdmitted as error:  # others that wait hold the memory: a client comes again later
                        if error.retry_after_s is None:
                            raise
                        # It is told to wait, for the others that do: its own session has to leave for one of them.
                        while session in engine.sessions and engine._loop.waiting:  # noqa: ASYNC110
                            await asyncio.sleep(0)
                talks[session].append((asked, tokens))
                if draw.random() < 0.5 and session in engine.sessions:
                    with contextlib.suppress(SessionBusy):
                        await engine.departures.archive(session)

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(client(number, random.Random(100 * seed + number)))
        for session in list(engine.sessions):
            assert await engine.departures.archive(session)
        assert engine.stage.arena.statistics().references == 0
        found = {session: await archived_rows(engine, tmp_path / session) for session in talks}
    await backend.close()
    assert len(place.taken) > 5, f"seed {seed}: hardly anybody left"
    async with engine_of(host_memory_bytes=8 << 20) as plain:
        for session, turns in talks.items():
            alone = await plain.create_session()
            assert [await say(plain, alone, asked, tokens) for asked, tokens in turns] == said[session], f"seed {seed}"
            await plain.export_session(alone, tmp_path / f"plain-{session}")
            assert await archived_rows(plain, tmp_path / f"plain-{session}") == found[session], f"seed {seed}"
            await plain.close_session(alone)
