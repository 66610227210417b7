"""Several keys in front of the real engine: each has its sessions, its folder of archives and its histories, also over a restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine import Engine, EngineConfig
from engine.api_keys import parse_keys
from engine.config import ServerConfig
from engine.service import Service
from engine.settings import resolve
from engine.shelf import open_shelves
from server import listening

DEMO = resolve({"demo": "true"}, {}).model_directory()
SMALL = EngineConfig(host_memory_bytes=64 << 20, hot_rows=256, prefix_cache="on")
KEYS = parse_keys("anna:ka\nbob:kb\n")
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    return 0\n" * 8


@asynccontextmanager
async def shelved(path: Path) -> AsyncIterator[tuple[Service, Engine, dict[str, aiohttp.ClientSession]]]:
    """The demo model served to both keys; leaving the block keeps what a drain keeps."""
    service = Service(ServerConfig(port=0, api_keys=KEYS))
    with open_shelves(str(path), [account.namespace for account in service.accounts]) as service.shelves:
        async with Engine.open(DEMO, SMALL) as engine, listening(service) as address:
            service.opened(engine)
            clients = {key: aiohttp.ClientSession(address, headers={"Authorization": f"Bearer {key}"}) for key in ("ka", "kb")}
            try:
                yield service, engine, clients
                await service.keep()
            finally:
                for client in clients.values():
                    await client.close()


async def call(client: aiohttp.ClientSession, method: str, path: str, body: object = None, status: int = 200) -> Any:
    async with client.request(method, path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


def turn(session: str | None = None) -> dict[str, object]:
    body: dict[str, object] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return body if session is None else {**body, "session": {"id": session}}


def archives(path: Path) -> list[list[str]]:
    """Names of the archives of each folder."""
    return sorted([place.name for place in folder.iterdir()] for folder in path.iterdir())


@pytest.mark.slow
async def test_each_key_keeps_its_own(tmp_path: Path) -> None:
    """Neither finds, restores, removes or reuses what is the other's, in memory, on disk and in the next server."""
    async with shelved(tmp_path) as (_, engine, clients):
        names = {}
        for key, client in clients.items():
            names[key] = (await call(client, "POST", "/v1/sessions", status=201))["id"]
            await call(client, "POST", "/v1/completions", turn(names[key]))
        await call(clients["ka"], "POST", f"/v1/sessions/{names['ka']}/archive")
        assert set(engine.sessions) == {names["kb"]}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/export")):
            for key, other in (("ka", "kb"), ("kb", "ka")):
                await call(clients[key], method, f"/v1/sessions/{names[other]}{path}", status=404)
        await call(clients["kb"], "POST", "/v1/completions", turn(names["ka"]), status=404)
        await call(clients["kb"], "POST", "/v1/sessions/import", {"id": names["ka"]}, status=404)
        reused = []
        for _ in range(2):
            usage = (await call(clients["ka"], "POST", "/v1/completions", turn()))["usage"]
            reused.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert reused[0] == 0
        assert reused[1] > 0
        await engine.departures.make_room()
        assert set(engine.sessions) == set()
    assert archives(tmp_path) == [[name] for name in sorted(names.values())]
    async with shelved(tmp_path) as (_, _, clients):
        for key, client in clients.items():
            cards = (await call(client, "GET", "/v1/sessions"))["data"]
            assert [(card["id"], card["state"]) for card in cards] == [(names[key], "archived")]
            answer = await call(client, "POST", "/v1/completions", turn(names[key]))
            assert answer["session"] == {"id": names[key], "revision": 2}
