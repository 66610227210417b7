"""Kills serving processes while their idle sessions leave for the disk, at random moments and in the middle of an export.

After each kill it looks at what lies there.

usage: kill_departures.py DIRECTORY KILLS SEED

Every session has the same turns, so its revision says what it must be to the byte. This process starts no thread and no loop, so that it
may fork: engines live in children.
"""

import asyncio
import itertools
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from engine.archive.identity import Identity
from engine.archive.reader import Reader
from engine.archive.writer import Writer
from engine.engine import Engine
from engine.protocol import SessionId
from engine.search.tiny import prompt
from engine.shelf import open_shelves
from memory.append import blocks_of
from tests.engine.archive.archive_world import unit_rows
from tests.engine.archive.engines import engine_of, model, say
from tests.engine.archive.engines import held as holdings

TURNS, SESSIONS, BLOCKS = 5, 4, 9  # the fifth turn takes a session to five blocks: two fit beside what is being read


class Reference:
    """What a session is after each turn."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.tokens: list[list[int]] = [[]]
        self.parts: dict[str, Any] = {}  # of the last turn; a row never changes

    def check(self, path: Path) -> int:
        """Assert that an archive is a session after some turn, whole; returns the turn."""
        reader = Reader(path, self.identity)
        try:
            manifest = reader.manifest
            assert list(manifest.tokens) == self.tokens[manifest.revision], f"{path.name}: tokens of turn {manifest.revision}"
            blocks = [numpy.zeros(self.identity.block_bytes, numpy.uint8) for _ in range(blocks_of(manifest.rows))]
            reader.read(0, blocks)
        finally:
            reader.close()
        for part in self.identity.parts:
            found = unit_rows(blocks, part, manifest.rows)
            assert numpy.array_equal(found, self.parts[part.kind][:, : manifest.rows]), (
                f"{path.name}: {part.kind}, turn {manifest.revision}"
            )
        return manifest.revision


async def turn(engine: Engine, session: SessionId) -> None:
    """The session's next turn."""
    revision = engine.sessions[session].revision
    await say(engine, session, prompt(50, revision), 5)


async def refer(path: Path) -> bytes:
    """The reference, made by one session that nothing ever happens to."""
    async with engine_of() as engine:
        made = Reference(await engine._archives.known())
        session = await engine.create_session()
        for _ in range(TURNS):
            await turn(engine, session)
            made.tokens.append(list(engine.sessions[session].token_ids))
        await engine.export_session(session, path)
        reader, rows = Reader(path, made.identity), engine.sessions[session].rows
        blocks = [numpy.zeros(made.identity.block_bytes, numpy.uint8) for _ in range(blocks_of(rows))]
        reader.read(0, blocks)
        reader.close()
        made.parts = {part.kind: unit_rows(blocks, part, rows) for part in made.identity.parts}
    return pickle.dumps(made)


def die_at(segment: int) -> None:
    """Kill this process where it has written that segment of one archive, or of several one after another, and ends it."""
    end, ended = Writer.end_segment, itertools.count()

    def end_segment(writer: Writer) -> None:
        if next(ended) == segment:
            os.kill(os.getpid(), signal.SIGKILL)
        end(writer)

    Writer.end_segment = end_segment  # type: ignore[method-assign]  # in a process that ends so


async def work(path: Path, seed: int, ready: int, block_bytes: int, dies: bool) -> bytes:
    """Turns in sessions that memory has too little room for, for ever. Args: dies: by itself, in the middle of an export."""
    draw = random.Random(seed)
    if dies:
        die_at(draw.randrange(2, 6))
    with open_shelves(str(path)) as shelves:
        shelf = shelves[""]
        async with engine_of(host_memory_bytes=BLOCKS * block_bytes) as engine:

            async def archive(session: SessionId) -> None:
                os.write(ready, b".")
                await shelf.export(engine, session)

            engine.departures.archive_with(archive, "")
            known = [one.view.id for one in await shelf.archived()]
            while True:
                if len(known) < SESSIONS:
                    known.append(await engine.create_session())
                session = draw.choice(known)
                await shelf.restore(lambda: engine, session)
                if engine.sessions[session].revision == TURNS:
                    await shelf.remove(engine, session)
                    known.remove(session)
                else:
                    await turn(engine, session)


async def restart(path: Path, reference: Reference) -> bytes:
    """Every archive comes back into a fresh engine and goes on; closed, nothing of it is held; exported, its directory has nothing else."""
    with open_shelves(str(path)) as shelves:
        shelf = shelves[""]
        async with engine_of() as engine:
            before = holdings(engine)
            for one in await shelf.archived():
                assert one.view.phase == "archived", one
                session = one.view.id
                assert await shelf.restore(lambda: engine, session)
                if one.view.revision < TURNS:
                    await turn(engine, session)
                    assert list(engine.sessions[session].token_ids) == reference.tokens[one.view.revision + 1]
                await shelf.export(engine, session)
                await engine.close_session(session)
                reader = Reader(path / session, reference.identity)
                names = {segment.name for segment in reader.manifest.segments}
                reader.close()
                assert set(os.listdir(path / session)) == {"manifest.json", *names}, "leftovers of killed exports stayed"
            await engine.stage.streams.idle()
            assert holdings(engine) == before, "memory is held of sessions that are closed"
    return b""


def child(work_: Callable[[], Awaitable[bytes]], out: int) -> int:
    """Run something in a process of its own; what it returns is written to `out`. Returns its id."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            with os.fdopen(out, "wb") as file:
                file.write(asyncio.run(work_()))  # type: ignore[arg-type]  # a coroutine
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return number


def result(work_: Callable[[], Awaitable[bytes]]) -> bytes:
    """What a child returns."""
    source, sink = os.pipe()
    number = child(work_, sink)
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        found = file.read()
    assert os.waitpid(number, 0)[1] == 0, "see its traceback above"
    return found


def _parts(path: Path) -> set[tuple[Path, int]]:
    """Files of exports that have not ended, and when each was written."""
    return {(part, part.stat().st_mtime_ns) for part in path.glob("*/*.part")}


def main(path: Path, kills: int, seed: int) -> None:
    """Raises AssertionError when something that lies there is not a session after one of its turns, whole."""
    draw = random.Random(seed)
    model()
    reference: Reference = pickle.loads(result(partial(refer, path.with_name("reference"))))
    seen, caught = 0, 0
    for number in range(kills):
        source, sink = os.pipe()
        dies, parts = number % 2 == 1, _parts(path)
        killed = child(partial(work, path, 1000 * seed + number, sink, reference.identity.block_bytes, dies), sink)
        os.close(sink)
        began = os.read(source, 1)  # a session is leaving
        if not dies:
            time.sleep(draw.uniform(0, 0.12))
            os.kill(killed, signal.SIGKILL)
        _, status = os.waitpid(killed, 0)
        os.close(source)
        assert began, "it ended before anybody left"
        assert os.WIFSIGNALED(status), f"it failed by itself: {status}"
        for place in path.iterdir():
            if (place / "manifest.json").exists():
                seen += reference.check(place) > 0
        cut_off = bool(_parts(path) - parts)  # its own, not what an earlier one left
        assert cut_off or not dies, "it was killed in an export, and nothing of that lies there"
        caught += cut_off
    assert seen >= kills // 4, f"{seen} archives in {kills} kills prove nothing"
    result(partial(restart, path, reference))
    print(f"{kills} kills, {caught} with an export cut off behind them, {seen} archives looked at")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
