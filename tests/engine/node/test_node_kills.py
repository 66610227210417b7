"""SIGKILL of each of two nodes, which are processes, in each phase: prompts, generations, exports, restores, joining; and of their head.

Whatever is cut off ends at once, sessions go on with the tokens of a run in which nothing happened, and whoever was not killed keeps its
process, its connection, its descriptors, and no block of a session that is closed.
"""

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from engine.archive import transfers
from engine.archive.writer import Writer
from engine.engine import Engine
from engine.errors import ArchiveRefused, NodeLost
from engine.node.head import Head
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.process_world import (
    FIRST,
    ROOT,
    SECOND,
    NodeProcess,
    Strike,
    again,
    expected,
    head_of,
    lost,
    lost_while,
    until,
)
from tests.engine.node.test_cluster import NAME, TOP_K, found, ids, tokens
from tests.engine.runs import greedy

STAGES, TIMEOUT_S = "1,1,2", 3.0
ALLOWED_S = TIMEOUT_S + 2.0  # for a loaded machine; a killed process is noticed at once
MIDDLE = (ids(200, 4), 12)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Nodes:
    """Two nodes, the second in the middle of the model."""

    def __init__(self, checkpoint: Path, key: Path) -> None:
        self.checkpoint, self.key = checkpoint, key
        self.each = [NodeProcess(checkpoint, key, "127.0.0.1", timeout_s=TIMEOUT_S, stage=stage, stages=STAGES) for stage in range(2)]

    def head(self) -> AbstractAsyncContextManager[Engine]:
        return head_of(self.checkpoint, self.key, *self.each)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    place = tmp_path_factory.mktemp("nodes")
    key = place / "key"
    key.write_text("a key for these tests alone")
    nodes = Nodes(make_checkpoint(place / "model", NAME), key)
    yield nodes
    for node in nodes.each:
        node.kill()


@pytest.fixture
def nodes(made: Nodes) -> Nodes:
    """Both of them live, whatever the test before did."""
    for node in made.each:
        if not node.lives:
            node.start()
    return made


def archive_in(engine: Engine, directory: Path) -> None:
    """Sessions have their archives there, by their names."""
    engine.departures.archive_with(lambda name: engine.export_session(name, directory / name), "", lambda name: found(directory / name))


async def nothing_left(engine: Engine) -> None:
    """All sessions are closed; then no stage has a block or a reservation of one."""
    for session in list(engine.sessions):
        await engine.close_session(session)
    await engine.stage.idle()
    await until(lambda: all(arena.references == arena.reserved == 0 for arena in engine.stage.arenas), f"{engine.stage.arenas}")


async def no_more_descriptors(nodes: Sequence[NodeProcess], before: Sequence[int]) -> None:
    """Than each had before; the last channels may be closed a moment later."""
    await until(
        lambda: all(node.descriptors <= most for node, most in zip(nodes, before, strict=True)), f"{before} descriptors became more"
    )


def rows_given(logs: list[EventDict]) -> dict[str, int]:
    """Rows that each session got back last."""
    return {log["session_id"]: log["rows"] for log in logs if log["event"] == "session.recovered"}


def met(logs: list[EventDict]) -> list[int]:
    """Stages of the nodes that the head connected to, in order."""
    return [log["stage"] for log in logs if log["event"] == "node.met"]


async def test_either_of_two_nodes_is_killed_in_a_prompt_and_in_a_generation(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was not killed is not met anew, and has as many descriptors as before; sessions go on from their archives."""
    whole, strike = await expected(nodes.checkpoint), Strike(monkeypatch)
    async with nodes.head() as engine:
        archive_in(engine, tmp_path)
        for victim in range(2):
            killed, stays = nodes.each[victim], nodes.each[1 - victim]
            for in_prompt in (True, False):
                kept, other = await engine.create_session(), await engine.create_session()
                assert await tokens(engine, kept, *FIRST) == whole[:12]
                await engine.export_session(kept, tmp_path / kept)
                pid, descriptors = stays.pid, stays.descriptors
                with capture_logs() as logs:
                    if in_prompt:
                        strike.at("append.units", victim, killed.restart, nth=8)
                        assert await lost(engine.generate(ids(2000, 5), greedy(10), session=other)) < ALLOWED_S
                        assert strike.struck.pop() == "append.units"
                    else:
                        assert await lost_while(engine, other, ids(70, 5), killed.restart, 3) < ALLOWED_S
                    await again(engine)
                assert met(logs) == [victim], "who lives was met anew"
                assert rows_given(logs) == {kept: 161, other: 0}
                assert await tokens(engine, kept, *SECOND) == whole[12:]
                assert stays.lives
                assert stays.pid == pid
                await no_more_descriptors([stays], [descriptors])
                await nothing_left(engine)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
async def test_a_node_killed_between_two_segments_of_an_export(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Two exports are under way, one over an archive, one the session's first: the archive is what it was, to the byte, the first one is
    none. Both sessions go on as if nothing had happened, and can be exported again."""
    killed, turns = nodes.each[victim], (FIRST, MIDDLE, SECOND)
    whole = await expected(nodes.checkpoint, *turns)
    both_in_second = threading.Barrier(2, killed.restart, timeout=60)
    begun: dict[Writer, int] = {}
    begin = Writer.begin_segment

    def begin_segment(writer: Writer, first: int, rows: int) -> None:
        begun[writer] = begun.get(writer, 0) + 1
        if begun[writer] == 2:
            both_in_second.wait()
        begin(writer, first, rows)

    async with nodes.head() as engine:
        archive_in(engine, tmp_path)
        kept, other = await engine.create_session(), await engine.create_session()
        for session in (kept, other):
            assert await tokens(engine, session, *FIRST) == whole[:12]
        await engine.export_session(kept, tmp_path / kept)
        before = contents(tmp_path / kept)
        assert await tokens(engine, kept, *MIDDLE) == whole[12:24]
        monkeypatch.setattr(transfers, "SEGMENT_BYTES", 1)  # a segment a block
        monkeypatch.setattr(Writer, "begin_segment", begin_segment)
        with capture_logs() as logs:
            exports = [engine.export_session(session, tmp_path / session) for session in (kept, other)]
            async with asyncio.timeout(60):
                ended = await asyncio.gather(*exports, return_exceptions=True)
            assert [type(error) for error in ended] == [NodeLost] * 2
            assert contents(tmp_path / kept) == before
            await again(engine)
        monkeypatch.undo()
        with pytest.raises(ArchiveRefused):
            await engine.import_session(tmp_path / other)
        assert rows_given(logs) == {kept: 161, other: 0}
        assert await tokens(engine, kept, *SECOND) == whole[24:]
        assert await tokens(engine, other, *MIDDLE) == whole[12:24]
        for session in (kept, other):
            assert (await engine.export_session(session, tmp_path / session)).rows == engine.sessions[session].rows
        await nothing_left(engine)


async def test_nodes_killed_while_rows_come_back_and_while_they_are_joined(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import is cut off, and leaves no session; what it cost comes back from archives, and that is cut off by the other node; that one
    is found again, and killed when the first is to connect to it. In the end both sessions have their archives' rows."""
    whole, strike = await expected(nodes.checkpoint), Strike(monkeypatch)
    first, second = nodes.each

    def at_import() -> None:
        first.restart()
        strike.at("image.take", 1, at_return, nth=2)

    def at_return() -> None:
        second.restart()
        strike.at("join", 0, second.restart)

    async with nodes.head() as engine:
        archive_in(engine, tmp_path)
        sessions = [await engine.create_session() for _ in range(2)]
        for session in sessions:
            assert await tokens(engine, session, *FIRST) == whole[:12]
            await engine.export_session(session, tmp_path / session)
        shutil.copytree(tmp_path / sessions[0], tmp_path / "copy")
        with capture_logs() as logs:
            strike.at("image.take", 0, at_import, nth=2)
            with pytest.raises(NodeLost):
                await engine.import_session(tmp_path / "copy")
            assert time.monotonic() - strike.at_s < ALLOWED_S
            assert list(engine.sessions) == sessions
            await again(engine)
        assert strike.struck == ["image.take", "image.take", "join"]
        assert met(logs) == [0, 1, 1]
        assert rows_given(logs) == dict.fromkeys(sessions, 161)
        assert [engine.sessions[session].rows for session in sessions] == [161, 161]
        imported = await engine.import_session(tmp_path / "copy")
        for session in (*sessions, imported):
            assert await tokens(engine, session, *SECOND) == whole[12:]
        await nothing_left(engine)


async def test_nodes_killed_while_a_head_opens(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second when its channel is open and nothing was asked of it: the head looks for it however long, and ends at once when it is
    given up, leaving the first to the next head. That one waits for the second, and for the first, which is killed when both are joined."""
    whole, strike = await expected(nodes.checkpoint), Strike(monkeypatch)
    first, second = nodes.each
    tried: list[int] = []
    meet = Head._meet

    async def counted(head: Head, stage: int) -> None:
        tried.append(stage)
        await meet(head, stage)

    monkeypatch.setattr(Head, "_meet", counted)
    strike.at("begin", 1, second.kill)
    opening = asyncio.ensure_future(nodes.head().__aenter__())
    await until(lambda: tried.count(1) >= 3, "the head does not look for the node again")
    assert strike.struck == ["begin"]
    assert not opening.done()
    opening.cancel()
    async with asyncio.timeout(ALLOWED_S):
        await asyncio.wait((opening,))
    assert opening.cancelled()
    second.start()
    strike.at("joined", 1, first.restart)
    with capture_logs() as logs:
        async with nodes.head() as engine:
            assert strike.struck == ["begin", "joined"]
            await until(lambda: met(logs) == [0, 1, 0], "the head does not take the first again")  # or it was lost behind its last answer
            await again(engine)
            session = await engine.create_session()
            assert await tokens(engine, session, *FIRST) == whole[:12]
            await nothing_left(engine)


class HeadProcess:
    """`forebay serve` over two nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self.model = nodes.checkpoint.name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        words = ["serve", nodes.checkpoint, "--nodes", ",".join(str(node.address) for node in nodes.each), "--stages", STAGES]
        words += ["--key-file", nodes.key, "--peer-timeout", TIMEOUT_S, "--device", "cpu", "--row-format", "f32"]
        words += ["--append-chunk-rows", 64, "--host-memory", "64MiB", "--hot-rows", TOP_K, "--port", port]
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "server.py"), *map(str, words), "--log-format", "json"], stdout=subprocess.DEVNULL, cwd=ROOT
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def cut_off(head: HeadProcess) -> None:
    """A stream of tokens that ends with its server."""
    body = {"model": head.model, "prompt": ids(70, 5), "max_tokens": 2000, "temperature": 0, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{head.address}/ready") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)
        async with http.post(f"{head.address}/v1/completions", json=body) as response:
            assert response.status == 200
            for _ in range(5):
                assert (await response.content.readline()) != b""
            head.kill()
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()


async def test_a_head_that_is_killed_leaves_its_nodes_as_they_were(nodes: Nodes) -> None:
    """In the middle of a generation: both keep their process, let go of every block, and the next head finds them so, with no descriptor
    more than before."""
    whole = await expected(nodes.checkpoint)
    pids, descriptors = [node.pid for node in nodes.each], []
    for killed in (False, True):
        if killed:
            head = HeadProcess(nodes)
            try:
                async with asyncio.timeout(60):
                    await cut_off(head)
            finally:
                head.kill()
        async with nodes.head() as engine:
            assert [(arena.references, arena.reserved) for arena in engine.stage.arenas] == [(0, 0)] * 3
            assert await tokens(engine, await engine.create_session(), *FIRST) == whole[:12]
            if not killed:
                descriptors = [node.descriptors for node in nodes.each]
            await no_more_descriptors(nodes.each, descriptors)
            await nothing_left(engine)
    assert [node.pid for node in nodes.each if node.lives] == pids
