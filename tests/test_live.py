"""`/v1/live`, and the page's files: what a watcher is told and for how long, and that nobody is watched for nobody."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from yarl import URL

from engine import watch_routes
from engine.config import ServerConfig
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, words

pytestmark = pytest.mark.both_loops


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots follow one another at once."""
    monkeypatch.setattr(watch_routes, "EVERY_S", 0.0)


@asynccontextmanager
async def served(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        yield client


def _service(engine: FakeEngine | None, **settings: Any) -> Service:
    service = Service(ServerConfig(port=0, **settings))
    if engine is not None:
        service.opened(engine)
    return service


async def told(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next snapshot."""
    line = await response.content.readline()
    assert line.startswith(b"data: ")
    assert await response.content.readline() == b"\n"
    return json.loads(line.removeprefix(b"data: "))  # type: ignore[no-any-return]


async def test_a_watcher_is_told_what_the_machine_does() -> None:
    """Counts, memory, its own sessions with their tiers, and the bins of every stream, again and again."""
    engine = FakeEngine([words("x")])
    async with served(_service(engine)) as client, client.get("/v1/live") as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        first, second = await told(response), await told(response)
        assert engine.instruments.watching == 1
    assert first.keys() == second.keys()
    assert first["state"] == "ready"
    assert first["engine"] == {"model": "fake", "context_max": 4096, "placement": "offload", "decode_batch_limit": 8}
    counts = first["counts"]
    assert (counts["generated_tokens"], counts["hits"], counts["misses"], counts["decoding"]) == (60, 750, 250, 3)
    assert first["memory"]["arena"] == {"total": 8192, "used": 2048, "reserved": 1024}
    assert [session["id"] for session in first["sessions"]] == ["mine"]
    mine = first["sessions"][0]
    assert (mine["rows"], mine["ram"], mine["ring"], mine["ring_max"], mine["hot"], mine["hot_max"]) == (199, 128, 71, 256, 40, 64)
    lanes = {lane["name"]: lane for lane in first["streams"]["lanes"]}
    assert lanes["stage0.compute"]["busy"] == [0, 50, 100]
    assert lanes["stage0.compute"]["kinds"] == {"step": 0.03}
    assert lanes["stage0.copyback"]["busy"] == []
    assert first["streams"]["bin_ms"] == 20.0


async def test_nothing_is_watched_once_the_watcher_has_left() -> None:
    """Streams are observed while somebody reads, and no longer."""
    engine = FakeEngine([words("x")])
    async with served(_service(engine)) as client:
        assert engine.instruments.watching == 0
        async with client.get("/v1/live") as response:
            await told(response)
            assert engine.instruments.watching == 1
        await engine.instruments.unwatched.wait()
        assert engine.instruments.watching == 0


async def test_a_watcher_of_a_server_that_loads_sees_it_become_ready() -> None:
    """Before the engine is open there is a state and nothing else; then everything, on the same stream."""
    service = _service(None)
    async with served(service) as client, client.get("/v1/live") as response:
        assert (await told(response))["state"] == "loading"
        service.opened(FakeEngine([words("x")]))
        while "engine" not in (seen := await told(response)):
            assert seen.keys() == {"at", "uptime_s", "state", "loop_lag_ms"}
        assert seen["state"] == "ready"


@pytest.mark.parametrize("how", ["drain", "closed"])
async def test_the_stream_ends_with_the_server(how: str) -> None:
    """A drain does not wait for watchers, and a closed engine is not read: the stream says so and ends."""
    engine = FakeEngine([words("x")])
    service = _service(engine)
    async with served(service) as client, client.get("/v1/live") as response:
        await told(response)
        if how == "drain":
            async with asyncio.timeout(10):
                await service.drain()
        else:
            engine.instruments.open = False
        last: dict[str, Any] = {}
        async for line in response.content:
            last = json.loads(line.removeprefix(b"data: ")) if line.strip() else last
    assert last == {"state": "draining"}
    assert engine.instruments.watching == 0


async def test_sessions_of_another_key_are_not_listed() -> None:
    """With a key, what was made without one is another's: in the sums, and not in the list."""
    service = _service(FakeEngine([words("x")]), api_key="k")
    async with served(service) as client, client.get("/v1/live", headers={"Authorization": "Bearer k"}) as response:
        seen = await told(response)
    assert seen["sessions"] == []
    assert seen["counts"]["sessions"] == {"held": 4, "request": 1, "stored": 5}


async def test_too_many_watchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the most gets 429, and a place when another has left."""
    monkeypatch.setattr(watch_routes, "WATCHERS_MAX", 1)
    async with served(_service(FakeEngine([words("x")]))) as client:
        async with client.get("/v1/live") as response:
            await told(response)
            async with client.get("/v1/live") as refused:
                assert refused.status == 429
                assert "Retry-After" in refused.headers
        for _ in range(1_000):
            async with client.get("/v1/live") as again:
                if again.status == 200:
                    return
        raise AssertionError("the place was not given back")


async def test_the_page_is_open_and_strict() -> None:
    """Files of the page need no key, name their types, and forbid scripts, frames and connections of others; nothing else is there."""
    async with served(_service(FakeEngine([words("x")]), api_key="k")) as client:
        for path, kind in (("/", "text/html"), ("/page/page.css", "text/css"), ("/page/page.js", "text/javascript")):
            async with client.get(path) as response:
                assert response.status == 200
                assert response.content_type == kind
                policy = response.headers["Content-Security-Policy"]
                assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
        for path, status in (("/page/nothing.js", 404), ("/page/..%2F..%2Fserver.py", 401), ("/page/", 404), ("/page/a/b", 401)):
            async with client.get(URL(path, encoded=True)) as response:
                assert response.status == status, path


def test_the_page_names_no_outside_address() -> None:
    """No file of the page loads, links or talks to another address, and none has a style or script inside its markup."""
    for path in watch_routes._PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, path.name
        assert "https:" not in text, path.name
        assert " style=" not in text, path.name
        assert "onclick=" not in text, path.name
