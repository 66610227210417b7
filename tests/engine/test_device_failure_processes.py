"""A device that fails under a command: its process ends with 70 and one line, and sessions come back in the next one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.engine.losing import REPORTED
from tests.engine.model.parity import make_checkpoint
from tests.engine.node.process_world import FIRST, ROOT, SECOND, NodeProcess, again, expected, head_of, lost
from tests.engine.node.test_cluster import NAME, TOP_K, found, ids, tokens
from tests.engine.runs import greedy

TURNS = FIRST, SECOND


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME)


@asynccontextmanager
async def served(sessions: Path, *words: object) -> AsyncIterator[tuple[asyncio.subprocess.Process, aiohttp.ClientSession]]:
    """The command as a process, once it is ready."""
    command = [sys.executable, ROOT / "tests/engine/losing.py", "serve", *words, "--port", "0", "--sessions-dir", sessions]
    command += ["--log-format", "json"]
    process = await asyncio.create_subprocess_exec(*map(str, command), cwd=ROOT, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = {"event": ""}
        while line["event"] != "server.opened":
            line = json.loads(await process.stderr.readline())
        async with aiohttp.ClientSession(line["address"]) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.slow
async def test_the_command_ends_with_70_and_its_sessions_come_back(checkpoint: Path, tmp_path: Path) -> None:
    """One line says why; sessions go on in the next process, from their archives or from what RAM had of them."""
    whole, sessions = await expected(checkpoint, *TURNS), dict[str, str]()
    words = checkpoint, "--device", "cpu", "--host-memory", "64MiB", "--hot-rows", TOP_K, "--row-format", "f32"

    async def turn(client: aiohttp.ClientSession, session: str, number: int) -> list[int]:
        prompt, count = TURNS[number]
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with client.post("/v1/completions", json={**body, "session": {"id": session}}) as response:
            assert response.status == 200, await response.text()
            said: list[int] = (await response.json())["choices"][0]["token_ids"]
            return said

    async with served(tmp_path, *words) as (process, client):
        for session in ("archived", "never archived"):
            async with client.post("/v1/sessions") as response:
                sessions[session] = (await response.json())["id"]
            assert await turn(client, sessions[session], 0) == whole[:12]
            if session == "archived":
                async with client.post(f"/v1/sessions/{sessions[session]}/export") as response:
                    assert response.status == 200
        cut_off = asyncio.ensure_future(turn(client, sessions["archived"], 1))
        os.kill(process.pid, signal.SIGUSR1)
        _, said = await process.communicate()
        assert process.returncode == 70
        *lines, last = said.decode().splitlines()
        assert last == f"forebay: {REPORTED}"
        assert {json.loads(line)["event"] for line in lines} <= {"request.finished", "session.exported"}
        await asyncio.wait([cut_off])
        cut_off.exception()
    async with served(tmp_path, *words) as (_, client):
        for session in sessions.values():
            assert await turn(client, session, 1) == whole[12:]


@pytest.mark.slow
async def test_a_node_whose_device_fails_ends_and_is_taken_back(checkpoint: Path, tmp_path: Path) -> None:
    """The head hears at once, the process ends with 70; started again it has its part of the sessions back from their archives."""
    key = tmp_path / "key"
    key.write_text("a key for these tests alone")
    whole = await expected(checkpoint)
    before = (sys.executable, str(ROOT / "tests/engine/losing.py"))
    node = NodeProcess(checkpoint, key, "127.0.0.1", before)
    try:
        async with head_of(checkpoint, key, node) as engine:
            engine.departures.archive_with(
                lambda name: engine.export_session(name, tmp_path / name), "", lambda name: found(tmp_path / name)
            )
            session = await engine.create_session()
            assert await tokens(engine, session, *TURNS[0]) == whole[:12]
            await engine.export_session(session, tmp_path / session)
            cut_off = engine.generate(ids(40, 7), greedy(2000))
            await anext(cut_off)
            os.kill(node.pid, signal.SIGUSR1)
            assert await lost(cut_off) < 2.0
            assert await asyncio.to_thread(node.ended) == 70
            node.start()
            async with asyncio.timeout(60):
                await again(engine)
            assert await tokens(engine, session, *TURNS[1]) == whole[12:]
    finally:
        node.kill()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("harm", "says"), [(signal.SIGUSR1, "reported an error near"), (signal.SIGUSR2, "has ended nothing for 3 s, the oldest being harm")]
)
async def test_a_card_that_fails_ends_the_command(tmp_path: Path, harm: signal.Signals, says: str) -> None:
    """A kernel that reads from nowhere, and one without end: the stream ends with the error, the session is archived, the exit code 70."""
    async with served(tmp_path, "--demo", "--device", "cuda", "--host-memory", "1GiB", "--context-max", "65536") as (process, client):
        async with client.post("/v1/sessions") as response:
            session = (await response.json())["id"]
        body = {"prompt": "import os\n" * 60, "max_tokens": 60_000, "temperature": 0, "ignore_eos": True, "session": {"id": session}}
        async with client.post("/v1/completions", json={**body, "stream": True}) as response:
            lines = [await response.content.readline() for _ in range(200)]
            os.kill(process.pid, harm)
            async with asyncio.timeout(30):
                lines += [line async for line in response.content]
        assert any(b"device_failed" in line for line in lines), lines[-4:]
        assert process.stderr is not None
        said: list[str] = []
        try:
            async with asyncio.timeout(30):
                async for line in process.stderr:
                    said.append(line.decode())
                await process.wait()
        except TimeoutError:
            pytest.fail("it did not end:\n" + "".join(said))
    assert process.returncode == 70
    last = said[-1]
    assert last.startswith("forebay: cuda")
    assert says in last
    manifest = json.loads((tmp_path / session / "manifest.json").read_bytes())
    assert manifest["rows"] >= 128
