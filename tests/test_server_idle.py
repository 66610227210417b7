"""Sessions nobody is at: they leave for the disk when memory runs short, are brought there when told, and go when their time has come."""

import asyncio
import contextlib
import errno
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.archive import writer
from engine.config import EngineConfig, ServerConfig
from engine.engine import Engine
from engine.errors import NotAdmitted
from engine.retention import Retention, read_age, write_age
from engine.service import Service
from engine.shelf import open_shelves
from server import listening
from tests.fake_engine import FakeEngine, words
from tests.test_server_sessions import DEMO, call, turn

CONFIG = EngineConfig(host_memory_bytes=64 << 20, hot_rows=256, prefix_cache="on")
LONG = "import os\n" * 90


class Clock:
    """Unix time, moved by hand; it begins far behind the time that sessions are used at, which is the machine's."""

    def __init__(self) -> None:
        self.now_s = 4e9

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def kept(
    path: Path | None, config: EngineConfig = CONFIG, clock: Clock | None = None, **server: Any
) -> AsyncIterator[tuple[Service, Engine, aiohttp.ClientSession]]:
    """The demo model served as `serve` does, but for the task that looks at ages. Leaving the block keeps nothing, as a kill does."""
    service = Service(ServerConfig(port=0, **server))
    if clock is not None:
        service.retention.now = clock
    with open_shelves(
        "" if path is None else str(path),
        [service.accounts[0].namespace],
        quota_bytes=service.config.sessions_quota_bytes,
        retention=service.retention,
    ) as service.shelves:
        async with Engine.open(DEMO, config) as engine, listening(service) as address, aiohttp.ClientSession(address) as client:
            service.opened(engine)
            yield service, engine, client


async def begun(client: aiohttp.ClientSession, text: str = "import os\n", **made_with: object) -> str:
    """A session with one turn."""
    made: str = (await call(client, "POST", "/v1/sessions", made_with or None, status=201))["id"]
    await call(client, "POST", "/v1/completions", turn(text, session={"id": made, "revision": 0}))
    return made


async def states(client: aiohttp.ClientSession) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await call(client, "GET", "/v1/sessions"))["data"]}


async def room_for(sessions: float) -> EngineConfig:
    """Memory for so many sessions that began with LONG."""
    async with kept(None) as (_, engine, client):
        made = await begun(client, LONG)
        blocks = -(-(await call(client, "GET", f"/v1/sessions/{made}"))["tokens"] // 64)
        host_bytes = int(sessions * blocks) * engine.stage.layout.block_bytes
    return EngineConfig(host_memory_bytes=host_bytes, hot_rows=256, prefix_cache="on")


async def test_idle_sessions_leave_and_come_back(tmp_path: Path) -> None:
    """Of three sessions that memory has room for two of, the one used longest ago is on disk; each goes on as if it had never left."""
    async with kept(None) as (_, _, client):
        plain = await begun(client, LONG)
        expected = (await call(client, "POST", "/v1/completions", turn("import re\n", session={"id": plain})))["choices"][0]["token_ids"]
    async with kept(tmp_path, await room_for(2.5)) as (_, engine, client):
        made = [await begun(client, LONG) for _ in range(3)]
        assert await states(client) == {made[0]: "archived", made[1]: "ready", made[2]: "ready"}
        for each in made:
            said = await call(client, "POST", "/v1/completions", turn("import re\n", session={"id": each, "revision": 1}))
            assert said["choices"][0]["token_ids"] == expected
        assert sorted((await states(client)).values()) == ["archived", "ready", "ready"]
        for each in made:
            await call(client, "DELETE", f"/v1/sessions/{each}")
        assert os.listdir(tmp_path) == []
        engine._loop.stored.close()
        assert engine.stage.arena.statistics().references == 0


async def test_two_imports_at_once_with_room_for_one(tmp_path: Path) -> None:
    """Both are answered: the second waits until the first, idle by then, has left again; so do four turns at once in two sessions."""
    async with kept(tmp_path) as (_, _, client):
        made = [await begun(client, LONG) for _ in range(2)]
        for each in made:
            await call(client, "POST", f"/v1/sessions/{each}/archive")
    async with kept(tmp_path, await room_for(1.5)) as (_, _, client):
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for each in made:
                group.create_task(call(client, "POST", "/v1/sessions/import", {"id": each}))
        assert sorted((await states(client)).values()) == ["archived", "ready"]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for each in made * 2:
                group.create_task(call(client, "POST", "/v1/completions", turn("x", session={"id": each}, max_tokens=2)))
        assert [(await call(client, "GET", f"/v1/sessions/{each}"))["revision"] for each in made] == [3, 3]


async def test_a_restore_waits_for_an_export_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the session that has the room is exported, and so cannot leave, a restore waits; then that one leaves, and it is served."""
    config, real, may_write = await room_for(1.5), writer.write_all, threading.Event()

    def slow(*arguments: Any) -> None:
        assert may_write.wait(60)
        real(*arguments)

    async with kept(tmp_path, config) as (_, engine, client):
        away = await begun(client, LONG)
        await call(client, "POST", f"/v1/sessions/{away}/archive")
        held = await begun(client, LONG)
        take, refused = engine._archives.take, asyncio.Event()

        async def watched(*arguments: Any) -> Any:
            try:
                return await take(*arguments)
            except NotAdmitted:
                refused.set()
                raise

        monkeypatch.setattr(writer, "write_all", slow)
        monkeypatch.setattr(engine._archives, "take", watched)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(2):  # the second comes behind the first
                group.create_task(call(client, "POST", f"/v1/sessions/{held}/export"))
            while not engine.departures.unsettled:  # noqa: ASYNC110 - a count
                await asyncio.sleep(0.001)
            group.create_task(call(client, "POST", "/v1/sessions/import", {"id": away}))
            await refused.wait()
            may_write.set()
        assert await states(client) == {away: "ready", held: "archived"}


async def test_a_session_told_to_leave(tmp_path: Path) -> None:
    """`/archive` answers the archived card, at once behind a turn and again; a turn brings it back; in a turn it is 409, unknown 404."""
    async with kept(tmp_path) as (_, engine, client):
        made = await begun(client)
        for _ in range(2):
            card = await call(client, "POST", f"/v1/sessions/{made}/archive")
            assert (card["state"], card["bytes"]["host"], card["revision"]) == ("archived", 0, 1)
        assert not engine.sessions
        async with client.post("/v1/completions", json=turn("def", session={"id": made}, max_tokens=4000, stream=True)) as streaming:
            await streaming.content.readline()
            assert "between its turns" in (await call(client, "POST", f"/v1/sessions/{made}/archive", status=409))["error"]["message"]
        await call(client, "POST", f"/v1/sessions/{'0' * 16}/archive", status=404)
    service, fake = Service(ServerConfig(port=0)), FakeEngine([words("a")])
    service.engine = fake
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        refused = await call(client, "POST", f"/v1/sessions/{await fake.create_session()}/archive", status=400)
        assert "--sessions-dir" in refused["error"]["message"]


async def test_a_full_disk_is_said_to_whoever_needed_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that lacks room while the disk is full is refused in one line that says both; the idle session lives on in memory."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with kept(tmp_path, await room_for(1.5)) as (_, _, client):
        made = await begun(client, LONG)
        with monkeypatch.context() as patched:
            patched.setattr(writer, "write_all", full)
            refused = await call(client, "POST", "/v1/completions", turn("def main():\n" * 70), status=503)
        message = refused["error"]["message"]
        assert "host memory missing" in message
        assert "No space left on device; make room" in message
        assert str(tmp_path) not in message
        assert await states(client) == {made: "ready"}
        await call(client, "POST", "/v1/completions", turn("x", session={"id": made, "revision": 1}))
        await call(client, "POST", "/v1/completions", turn("def main():\n" * 70))
        assert await states(client) == {made: "archived"}


async def test_a_quota_of_archives(tmp_path: Path) -> None:
    """What would take the archives past their quota is 403 in one line, and writes nothing; the session lives on; a deletion makes room."""
    async with kept(tmp_path) as (_, _, client):
        made = await begun(client, LONG)
        one = (await call(client, "POST", f"/v1/sessions/{made}/export"))["bytes"]["disk"]
    async with kept(tmp_path, sessions_quota_bytes=int(1.5 * one)) as (_, engine, client):
        other = await begun(client, LONG)
        for action in ("export", "archive"):
            refused = await call(client, "POST", f"/v1/sessions/{other}/{action}", status=403)
            assert refused["error"]["type"] == "quota_error"
            assert "delete sessions, or raise --sessions-quota" in refused["error"]["message"]
            assert not (tmp_path / other).exists()
        await call(client, "POST", "/v1/completions", turn("x", session={"id": made, "revision": 1}))
        again = await call(client, "POST", f"/v1/sessions/{made}/export")
        assert one < again["bytes"]["disk"] < 1.5 * one, "its own archive counts once"
        await call(client, "DELETE", f"/v1/sessions/{made}")
        await call(client, "POST", f"/v1/sessions/{other}/archive")
        assert list(engine.sessions) == []
    async with kept(tmp_path, await room_for(1.5), sessions_quota_bytes=int(1.5 * one)) as (_, _, client):
        held = await begun(client, LONG)
        refused = await call(client, "POST", "/v1/completions", turn("def main():\n" * 70), status=503)
        assert "raise --sessions-quota" in refused["error"]["message"]
        assert await states(client) == {held: "ready", other: "archived"}


async def test_two_archives_at_once_share_the_quota(tmp_path: Path) -> None:
    """Of two exports at once that have room for one by the quota, one is refused before it writes."""
    async with kept(tmp_path) as (_, _, client):
        one = (await call(client, "POST", f"/v1/sessions/{await begun(client, LONG)}/export"))["bytes"]["disk"]
    async with kept(tmp_path / "other", sessions_quota_bytes=int(1.5 * one)) as (_, _, client):
        made = [await begun(client, LONG) for _ in range(2)]

        async def export(session: str) -> int:
            async with client.post(f"/v1/sessions/{session}/export") as response:
                return response.status

        assert sorted(await asyncio.gather(*map(export, made))) == [200, 403]


@pytest.mark.parametrize("on_disk", [True, False])
async def test_a_session_goes_when_its_time_has_come(tmp_path: Path, on_disk: bool) -> None:
    """Its own age goes before the server's; 0 is for ever; a fork has its source's; held or archived, what is due is gone, files too."""
    clock = Clock()
    async with kept(tmp_path if on_disk else None, clock=clock, session_ttl_s=3e9) as (service, _, client):
        brief = await begun(client, ttl=60)
        for_ever = await begun(client, ttl=0)
        usual = await begun(client)
        fork = (await call(client, "POST", f"/v1/sessions/{brief}/fork", status=201))["id"]
        kept_longer = (await call(client, "POST", f"/v1/sessions/{brief}/fork", {"ttl": 0}, status=201))["id"]
        cards = {card["id"]: card for card in (await call(client, "GET", "/v1/sessions"))["data"]}
        assert cards[brief]["expires_at"] - 60 >= cards[brief]["last_used"]
        assert "expires_at" not in cards[for_ever]
        whole = await call(client, "GET", f"/v1/sessions/{brief}?include=tokens")
        assert whole["expires_at"] == cards[brief]["expires_at"], "shown with the tokens too"
        if on_disk:
            for each in (brief, usual, kept_longer):
                await call(client, "POST", f"/v1/sessions/{each}/archive")
            assert json.loads((tmp_path / brief / "retention.json").read_text()) == {"ttl": 60}
            assert not (tmp_path / usual / "retention.json").exists()
        await service.expire()
        assert set(await states(client)) == {brief, for_ever, usual, kept_longer}, "the fork has not been used since long before"
        assert fork not in await states(client)
        clock.now_s += 60
        await service.expire()
        assert set(await states(client)) == {for_ever, usual, kept_longer}
        clock.now_s = 9e9
        await service.expire()
        assert set(await states(client)) == {for_ever, kept_longer}
        await call(client, "GET", f"/v1/sessions/{brief}", status=404)
        if on_disk:
            assert os.listdir(tmp_path) == [kept_longer]


async def test_an_age_outlives_the_server(tmp_path: Path) -> None:
    """The next server knows an archive's age and last use, and removes what is due before anybody asks; a restore counts as a use."""
    clock = Clock()
    async with kept(tmp_path) as (_, _, client):
        made = [await begun(client, ttl=3e9) for _ in range(2)]
        for each in made:
            await call(client, "POST", f"/v1/sessions/{each}/archive")
        used = (await call(client, "GET", f"/v1/sessions/{made[0]}"))["last_used"]
    clock.now_s = used + 2.9e9
    async with kept(tmp_path, clock=clock) as (service, engine, client):
        assert (await call(client, "GET", f"/v1/sessions/{made[0]}"))["expires_at"] == used + 3_000_000_000
        await call(client, "POST", "/v1/sessions/import", {"id": made[1]})
        await engine.close_session(next(iter(engine.sessions)))  # as a kill would: what lies there was used when it was restored
        clock.now_s = used + 3.1e9
        await service.expire()
        assert await states(client) == {made[1]: "archived"}


async def test_a_turn_is_not_cut_by_an_age(tmp_path: Path) -> None:
    """A session whose time comes while it decodes stays; its age counts from the end of the turn."""
    clock = Clock()
    async with kept(tmp_path, clock=clock) as (service, engine, client):
        made = await begun(client, ttl=1000)
        async with client.post("/v1/completions", json=turn("def", session={"id": made}, max_tokens=60, stream=True)) as streaming:
            await streaming.content.readline()
            clock.now_s += 2000
            await service.expire()
            assert list(engine.sessions) == [made]
            await streaming.read()
        await service.expire()
        clock.now_s += 999
        await service.expire()
        assert list(engine.sessions) == [made]
        clock.now_s += 1
        await service.expire()
        assert not engine.sessions


async def test_the_server_looks_by_itself(tmp_path: Path) -> None:
    """While `tended` runs, what is due goes without anybody asking; its end ends the task, and errors of the block leave as they are."""
    clock = Clock()
    async with kept(tmp_path, clock=clock) as (service, engine, client):
        await begun(client, ttl=1)
        clock.now_s += 1
        async with asyncio.timeout(20), service.tended():
            while engine.sessions:  # noqa: ASYNC110 - what a client would see
                await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="as it was"):
            async with service.tended():
                raise ValueError("as it was")


@pytest.mark.parametrize("ttl", [-1, "a day", True, 1e300])
async def test_a_bad_age_is_refused(ttl: object) -> None:
    """An age that is no number of seconds is 400 that names the field; no session is made."""
    service, engine = Service(ServerConfig(port=0)), FakeEngine([words("a")])
    service.engine = engine
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        refused = await call(client, "POST", "/v1/sessions", {"ttl": ttl}, status=400)
        assert "ttl" in refused["error"]["message"]
    assert not engine.made_sessions


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ttl": -1}', '{"ttl": "nan"}', '{"ttl": 1e999}', '{"other": 1}', "\0" * 5000])
def test_an_age_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    """What is not an age as we write them is as if there were none; neither is one behind a link."""
    (tmp_path / "retention.json").write_text(text)
    assert read_age(tmp_path) is None
    write_age(tmp_path, 7.5)
    assert read_age(tmp_path) == 7.5
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "retention.json").symlink_to(tmp_path / "retention.json")
    assert read_age(tmp_path / "there") is None
    write_age(tmp_path / "there", None)
    assert os.listdir(tmp_path / "there") == []
    assert read_age(tmp_path) == 7.5


def test_how_soon_somebody_looks_again() -> None:
    """A tenth of the shortest age, at least a second and at most a minute."""
    ages = Retention(0.0)
    assert (ages.any_age, ages.look_again_s) == (False, 60.0)
    for given, wanted in ((86_400.0, 60.0), (300.0, 30.0), (0.0, 30.0), (2.0, 1.0)):
        ages.give(str(given), given)
        assert ages.look_again_s == wanted
    with contextlib.suppress(KeyError):
        ages.forget("2.0")
    assert ages.look_again_s == 30.0
