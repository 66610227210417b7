"""Sessions on disk: exported, listed, restored by whoever names them, refused when damaged, and there after a restart."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs
from yarl import URL

from engine.archive import writer
from engine.config import EngineConfig, ServerConfig
from engine.engine import Engine
from engine.errors import BadSetting
from engine.protocol import EngineFace
from engine.service import Service
from engine.shelf import Shelf, open_shelves
from server import listening, serve
from tests.fake_engine import FakeEngine, words
from tests.test_server_sessions import DEMO, call, turn

CONFIG = EngineConfig(host_memory_bytes=64 << 20, hot_rows=256, prefix_cache="on")
SERVER = Path(__file__).resolve().parents[1] / "server.py"
ABSENT = "0123456789abcdef"


@asynccontextmanager
async def shelved(path: Path, config: EngineConfig = CONFIG, key: str | None = None) -> AsyncIterator[tuple[Engine, aiohttp.ClientSession]]:
    """The demo model served with a directory of archives. Leaving the block keeps nothing, as a kill does."""
    service = Service(ServerConfig(port=0, api_key=key))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with open_shelves(str(path), [service.accounts[0].namespace]) as service.shelves:
        async with (
            Engine.open(DEMO, config) as engine,
            listening(service) as address,
            aiohttp.ClientSession(address, headers=headers) as client,
        ):
            service.engine = engine
            yield engine, client


async def begun(client: aiohttp.ClientSession, text: str = "import os\n") -> str:
    """A session with one turn."""
    made: str = (await call(client, "POST", "/v1/sessions", status=201))["id"]
    await call(client, "POST", "/v1/completions", turn(text, session={"id": made, "revision": 0}))
    return made


async def states(client: aiohttp.ClientSession) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await call(client, "GET", "/v1/sessions"))["data"]}


async def test_an_exported_session_goes_on_in_another_server(tmp_path: Path) -> None:
    """What was exported is listed by the next server with tokens and revision, and a turn in it gives the tokens of the first server."""
    shelf = tmp_path / "made" / "if absent"
    async with shelved(shelf) as (_, client):
        made = await begun(client, "import os\n" * 30)
        card = await call(client, "POST", f"/v1/sessions/{made}/export")
        assert card["bytes"]["disk"] == sum(file.stat().st_size for file in (shelf / made).iterdir()) > 0
        whole = await call(client, "GET", f"/v1/sessions/{made}?include=tokens")
        (listed,) = (await call(client, "GET", "/v1/sessions"))["data"]
        read = await call(client, "GET", f"/v1/sessions/{made}")
        assert [each["bytes"] for each in (whole, listed, read)] == [card["bytes"]] * 3, "what is on disk shows beside memory"
        second = await call(client, "POST", "/v1/completions", turn("import sys\n", session={"id": made, "revision": 1}))
        again = await call(client, "POST", f"/v1/sessions/{made}/export")
        assert again["bytes"]["disk"] > card["bytes"]["disk"]
        await call(client, "POST", f"/v1/sessions/{made}/truncate", {"tokens": whole["tokens"], "revision": 2})
        await call(client, "POST", f"/v1/sessions/{made}/export", {})
    async with shelved(shelf) as (engine, client):
        (listed,) = (await call(client, "GET", "/v1/sessions"))["data"]
        assert (listed["id"], listed["state"], listed["tokens"], listed["revision"]) == (made, "archived", whole["tokens"], 3)
        assert listed["bytes"]["disk"] > 0
        read = await call(client, "GET", f"/v1/sessions/{made}?include=tokens")
        assert read["bytes"] == listed["bytes"]
        assert (read["token_ids"], read["text"], read["state"]) == (whole["token_ids"], whole["text"], "archived")
        assert not engine.sessions, "a look restored it"
        back = await call(client, "POST", "/v1/completions", turn("import sys\n", session={"id": made, "revision": 3}))
        assert back["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        assert back["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole["tokens"] - 2
        assert await states(client) == {made: "ready"}


async def test_import_brings_back_and_delete_removes(tmp_path: Path) -> None:
    """An import answers the session's card once; a fork and a cut restore by themselves; a deletion takes the archive too."""
    async with shelved(tmp_path) as (_, client):
        made = [await begun(client) for _ in range(3)]
        for each in made:
            await call(client, "POST", f"/v1/sessions/{each}/export")
        refused = await call(client, "POST", "/v1/sessions/import", {"id": made[0]}, status=409)
        assert "held already" in refused["error"]["message"]
    async with shelved(tmp_path) as (_, client):
        card = await call(client, "POST", "/v1/sessions/import", {"id": made[0]})
        assert (card["id"], card["state"], card["revision"]) == (made[0], "ready", 1)
        assert (await call(client, "POST", f"/v1/sessions/{made[1]}/fork", status=201))["tokens"] == card["tokens"]
        cut = await call(client, "POST", f"/v1/sessions/{made[2]}/truncate", {"tokens": 2, "revision": 1})
        assert (cut["tokens"], cut["revision"]) == (2, 2)
        for each in made:
            await call(client, "DELETE", f"/v1/sessions/{each}")
            await call(client, "GET", f"/v1/sessions/{each}", status=404)
            await call(client, "DELETE", f"/v1/sessions/{each}", status=404)
        assert os.listdir(tmp_path) == []


async def test_requests_at_once_restore_a_session_once(tmp_path: Path) -> None:
    """Eight turns that name an archived session at once all run in the one that comes back, one after the other."""
    async with shelved(tmp_path) as (_, client):
        made = await begun(client)
        await call(client, "POST", f"/v1/sessions/{made}/export")
    async with shelved(tmp_path) as (engine, client):
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(call(client, "POST", "/v1/completions", turn("a", session={"id": made}, max_tokens=2)))
        assert list(engine.sessions) == [made]
        assert (await call(client, "GET", f"/v1/sessions/{made}"))["revision"] == 9


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e%2f%2e%2e%2fetc", "a%2fb", "%00", "0123456789abcdef%0a", "0123456789ABCDEF", "x" * 4000, ABSENT]
)
async def test_names_that_are_no_ids_reach_no_file(tmp_path: Path, name: str) -> None:
    """A name that could be a path, one that is nearly an id, and one that nobody has are 404 on every route; nothing is made or removed."""
    shelf, kept = tmp_path / "a" / "shelf", tmp_path / "a" / "manifest.json"
    async with shelved(shelf) as (_, client):
        kept.write_text("{}")
        plain = {"..": "..", "%00": "\0"}.get(name, name.replace("%2f", "/").replace("%2e", ".").replace("%0a", "\n"))
        await call(client, "POST", "/v1/sessions/import", {"id": plain}, status=404)
        await call(client, "POST", "/v1/completions", turn("x", session={"id": plain}), status=404)
        if name != "..":
            for method, route in (("GET", ""), ("DELETE", ""), ("POST", "/export"), ("POST", "/archive"), ("POST", "/fork")):
                async with client.request(method, URL(f"/v1/sessions/{name}{route}", encoded=True)) as response:
                    assert response.status == 404, await response.text()
    assert list(shelf.iterdir()) == []
    assert kept.exists()


async def test_without_a_directory_both_say_which_flag() -> None:
    """A server that was given no directory answers 400 that names --sessions-dir, and asks the engine nothing."""
    engine, service = FakeEngine([words("a")]), Service(ServerConfig(port=0))
    service.engine, session = engine, await engine.create_session()
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        for path, body in ((f"/v1/sessions/{session}/export", None), ("/v1/sessions/import", {"id": ABSENT})):
            refused = await call(client, "POST", path, body, status=400)
            assert "--sessions-dir" in refused["error"]["message"]
    assert engine.exports == []


def flip(path: Path) -> None:
    file = next(path.glob("rows-*.bin"))
    file.write_bytes(file.read_bytes()[:100] + bytes([file.read_bytes()[100] ^ 1]) + file.read_bytes()[101:])


def shorten(path: Path) -> None:
    file = next(path.glob("keys-*.bin"))
    file.write_bytes(file.read_bytes()[:-1])


def scribble(path: Path) -> None:
    (path / "manifest.json").write_text('{"format":')


def rename(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    assert text.count(path.name) == 1
    (path / "manifest.json").write_text(text.replace(path.name, ABSENT))


@pytest.mark.parametrize("harm", [flip, shorten, scribble, rename])
async def test_damage_is_a_line(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """A damaged archive is 422 for whoever names it, in one line without a path; nothing is held of it, and it can be deleted."""
    async with shelved(tmp_path) as (_, client):
        made = await begun(client)
        await call(client, "POST", f"/v1/sessions/{made}/export")
    harm(tmp_path / made)
    async with shelved(tmp_path) as (engine, client):
        before = engine.statistics().host_bytes
        for path, body in (
            ("completions", turn("x", session={"id": made})),
            ("sessions/import", {"id": made}),
            (f"sessions/{made}/fork", {}),
        ):
            message = (await call(client, "POST", f"/v1/{path}", body, status=422))["error"]["message"]
            assert made in message
            assert str(tmp_path) not in message
            assert "\n" not in message
        assert (dict(engine.sessions), engine.statistics().host_bytes) == ({}, before)
        expected = "archived" if harm in (flip, shorten) else "damaged"
        assert await states(client) == {made: expected}
        await call(client, "DELETE", f"/v1/sessions/{made}")
        assert await states(client) == {}
        await begun(client)


async def test_an_archive_under_another_name_is_refused(tmp_path: Path) -> None:
    """A directory that was renamed to another id, and a link, are not taken for that session."""
    async with shelved(tmp_path) as (_, client):
        made = await begun(client)
        await call(client, "POST", f"/v1/sessions/{made}/export")
    (tmp_path / made).rename(tmp_path / ABSENT)
    (tmp_path / made).symlink_to(tmp_path / ABSENT)
    async with shelved(tmp_path) as (engine, client):
        await call(client, "POST", "/v1/completions", turn("x", session={"id": ABSENT}), status=422)
        await call(client, "POST", "/v1/completions", turn("x", session={"id": made}), status=404)
        assert not engine.sessions
        assert await states(client) == {ABSENT: "damaged"}


async def test_a_full_disk_is_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export to a full disk answers 507 in one line; the session goes on, and nothing of the export is left."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with shelved(tmp_path) as (_, client):
        made = await begun(client)
        with monkeypatch.context() as patched:
            patched.setattr(writer, "write_all", full)
            refused = await call(client, "POST", f"/v1/sessions/{made}/export", status=507)
        assert "make room" in refused["error"]["message"]
        assert str(tmp_path) not in refused["error"]["message"]
        assert list((tmp_path / made).iterdir()) == []
        await call(client, "POST", "/v1/completions", turn("x", session={"id": made, "revision": 1}))
        await call(client, "POST", f"/v1/sessions/{made}/export")


async def test_a_restore_waits_for_memory(tmp_path: Path) -> None:
    """A session that does not fit while a request runs comes back when that has ended; with nobody to wait for it is refused with 429."""
    small = EngineConfig(host_memory_bytes=CONFIG.host_memory_bytes, hot_rows=256, sessions_max=1)
    async with shelved(tmp_path) as (_, client):
        made = await begun(client)
        await call(client, "POST", f"/v1/sessions/{made}/export")
    async with shelved(tmp_path, small) as (_, client):
        other = (await call(client, "POST", "/v1/sessions", status=201))["id"]
        await call(client, "POST", "/v1/sessions/import", {"id": made}, status=429)
        async with client.post("/v1/completions", json=turn("y", session={"id": other}, max_tokens=4000, stream=True)) as streaming:
            await streaming.content.readline()
            async with asyncio.TaskGroup() as group:
                coming = group.create_task(call(client, "POST", "/v1/completions", turn("x", session={"id": made})))
                while not (await call(client, "GET", "/statistics"))["running"]:  # noqa: ASYNC110 - as a client does
                    await asyncio.sleep(0.01)
                await call(client, "DELETE", f"/v1/sessions/{other}")
            assert coming.result()["session"]["revision"] == 2


async def test_another_key_sees_none_of_it(tmp_path: Path) -> None:
    """Archives of one key are neither listed nor found by a server with another key, and come back with the first."""
    async with shelved(tmp_path, key="one") as (_, client):
        made = await begun(client)
        await call(client, "POST", f"/v1/sessions/{made}/export")
    for key in ("two", None):
        async with shelved(tmp_path, key=key) as (_, client):
            assert await states(client) == {}
            await call(client, "POST", "/v1/sessions/import", {"id": made}, status=404)
    async with shelved(tmp_path, key="one") as (_, client):
        assert await states(client) == {made: "archived"}


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """A file, a directory below one, and one that another server has are refused in one line that names the flag."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadSetting, match=r"--sessions-dir: cannot write .*; choose another"), open_shelves(str(path)):
            pass
    with open_shelves(str(tmp_path)), pytest.raises(BadSetting, match="another server uses"), open_shelves(str(tmp_path)):
        pass
    with open_shelves("") as none:
        assert none == {}


def test_what_a_killed_first_export_left_is_swept(tmp_path: Path) -> None:
    """Parts without a manifest go when the next server begins; an archive, and what is not ours, stay."""
    for name, file in (
        (ABSENT, "rows-0123456789abcdef.part"),
        ("f" * 16, "rows-" + "0" * 32 + ".bin"),
        ("e" * 16, "mine.txt"),
        ("notes", "x"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("x")
    (tmp_path / ("d" * 16)).mkdir()
    (tmp_path / ("d" * 16) / "manifest.json").write_text("x")
    with open_shelves(str(tmp_path)) as shelves:
        assert isinstance(shelves[""], Shelf)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d" * 16, "e" * 16, "notes"]
    assert (tmp_path / ("e" * 16) / "mine.txt").exists()


async def test_a_signal_brings_the_sessions_to_disk(tmp_path: Path) -> None:
    """After SIGTERM every session with tokens is archived, also one whose turn the drain cut; the next server has them."""
    addresses: asyncio.Queue[tuple[str, EngineFace]] = asyncio.Queue()

    async def announce(address: str, engine: EngineFace) -> None:
        addresses.put_nowait((address, engine))
        await asyncio.Event().wait()

    config = ServerConfig(port=0, sessions_dir=str(tmp_path), drain_timeout_s=2.0)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(lambda: Engine.open(DEMO, CONFIG), config, announce))
        address, _ = await addresses.get()
        async with aiohttp.ClientSession(address) as client:
            made, cut = await begun(client), await begun(client)
            empty = (await call(client, "POST", "/v1/sessions", status=201))["id"]
            body = turn("def", session={"id": cut, "revision": 1}, max_tokens=5000, stream=True)
            async with client.post("/v1/completions", json=body) as streaming:
                await streaming.content.readline()
                os.kill(os.getpid(), signal.SIGTERM)
                await serving
    assert empty not in os.listdir(tmp_path)
    async with shelved(tmp_path) as (_, client):
        assert await states(client) == {made: "archived", cut: "archived"}
        revisions = {card["id"]: card["revision"] for card in (await call(client, "GET", "/v1/sessions"))["data"]}
        assert revisions == {made: 1, cut: 2}
        for each in (made, cut):
            await call(client, "POST", "/v1/completions", turn("x", session={"id": each, "revision": revisions[each]}))


async def test_what_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose export fails is a line in the log, and the others are kept; so is one that there was no time for."""
    engine: Any = FakeEngine([words("a")])
    shelf, tried = Shelf(tmp_path), []

    async def export(engine: EngineFace, session_id: str) -> int:
        tried.append(session_id)
        if session_id == "s0":
            raise BadSetting("the disk is full")
        if session_id == "s2":
            await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(shelf, "export", export)
    for _ in range(4):
        await engine.create_session()
    with capture_logs() as logs:
        await shelf.keep(engine, 0.01)
    assert tried == ["s0", "s1", "s2"]
    assert [(line["event"], line.get("session_id"), line.get("sessions")) for line in logs] == [
        ("session.not_archived", "s0", None),
        ("sessions.not_archived", None, 2),
    ]


async def test_two_at_once_with_room_for_one(tmp_path: Path) -> None:
    """Of two sessions that memory has room for one of, one comes back and the other is 429; once the first is deleted it comes too."""
    async with shelved(tmp_path) as (engine, client):
        made = [await begun(client, "import os\n" * 250) for _ in range(2)]
        for each in made:
            await call(client, "POST", f"/v1/sessions/{each}/export")
        block_bytes = engine.stage.layout.block_bytes
        blocks = -(-(await call(client, "GET", f"/v1/sessions/{made[0]}"))["tokens"] // 64)
    small = EngineConfig(host_memory_bytes=(blocks + blocks // 2) * block_bytes, hot_rows=256, prefix_cache="on")
    async with shelved(tmp_path, small) as (engine, client):

        async def bring(session: str) -> int:
            async with client.post("/v1/sessions/import", json={"id": session}) as response:
                return response.status

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            found = [group.create_task(bring(each)) for each in made]
        assert sorted(each.result() for each in found) == [200, 429]
        held, other = made if found[0].result() == 200 else made[::-1]
        assert await states(client) == {held: "ready", other: "archived"}
        await call(client, "DELETE", f"/v1/sessions/{held}")
        assert await bring(other) == 200
        assert list(engine.sessions) == [other]


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03])
async def test_a_killed_server_leaves_a_whole_archive(tmp_path: Path, delay_s: float) -> None:
    """A server killed in the middle of its second export leaves the first archive or the second, and the next one goes on from it."""
    words_ = ["serve", "--demo", "--port", "0", "--host-memory", "64MiB", "--sessions-dir", str(tmp_path), "--log-format", "json"]
    process = await asyncio.create_subprocess_exec(sys.executable, str(SERVER), *words_, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    while b'"server.opened"' not in (line := await process.stderr.readline()):
        assert line, "the server ended before it listened"
    async with aiohttp.ClientSession(json.loads(line)["address"]) as client, asyncio.TaskGroup() as group:
        made = await begun(client, "import os\n" * 100)
        await call(client, "POST", f"/v1/sessions/{made}/export")
        await call(client, "POST", "/v1/completions", turn("import re\n" * 100, session={"id": made, "revision": 1}))

        async def export() -> None:
            with contextlib.suppress(aiohttp.ClientError):
                await call(client, "POST", f"/v1/sessions/{made}/export")

        group.create_task(export())
        await asyncio.sleep(delay_s)
        process.kill()
        await process.communicate()
    async with shelved(tmp_path) as (_, client):
        (card,) = (await call(client, "GET", "/v1/sessions"))["data"]
        assert card["state"] == "archived"
        assert card["revision"] in (1, 2)
        await call(client, "POST", "/v1/completions", turn("x", session={"id": made, "revision": card["revision"]}))
