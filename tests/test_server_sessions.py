"""Sessions over HTTP: made, continued, forked, cut, deleted; stale and unknown ones; what a client that left leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.config import EngineConfig, ServerConfig
from engine.engine import Engine
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, words

DEMO = Path(__file__).resolve().parents[1] / "engine" / "demo_model"
CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


@asynccontextmanager
async def served(engine: Any, key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    service = Service(ServerConfig(port=0, api_key=key))
    service.engine = engine
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with listening(service) as address, aiohttp.ClientSession(address, headers=headers) as client:
        yield client


@asynccontextmanager
async def demo() -> AsyncIterator[tuple[Engine, aiohttp.ClientSession]]:
    config = EngineConfig(host_memory_bytes=64 << 20, hot_rows=256, prefix_cache="on")
    async with Engine.open(DEMO, config) as engine, served(engine) as client:
        yield engine, client


async def call(client: aiohttp.ClientSession, method: str, path: str, body: object = None, status: int = 200) -> dict[str, Any]:
    """One request and the JSON it got; with no body at all where `body` is None."""
    async with client.request(method, path, **({} if body is None else {"json": body})) as response:
        assert response.status == status, await response.text()
        return await response.json()  # type: ignore[no-any-return]


def turn(text: str, **more: object) -> dict[str, object]:
    return {"prompt": text, **GREEDY, **more}


async def test_a_conversation_sends_only_what_is_new() -> None:
    """Two turns of a session give the tokens of one prompt that holds both; each answer says where it left the session."""
    async with demo() as (_, client):
        made = await call(client, "POST", "/v1/sessions", status=201)
        assert (made["object"], made["revision"], made["tokens"], made["state"]) == ("session", 0, 0, "new")
        ref = {"id": made["id"], "revision": 0}
        first = await call(client, "POST", "/v1/completions", turn("import os\n", session=ref))
        assert first["session"] == {"id": made["id"], "revision": 1}
        second = await call(client, "POST", "/v1/completions", turn("import sys\n", session=first["session"]))
        assert second["session"]["revision"] == 2
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1
        whole = (await call(client, "GET", f"/v1/sessions/{made['id']}?include=tokens"))["token_ids"]
        assert whole[-6:] == second["choices"][0]["token_ids"]
        plain = await call(client, "POST", "/v1/completions", {**turn(""), "prompt": whole[:-6]})
        assert plain["choices"][0]["token_ids"] == whole[-6:]
        assert "session" not in plain


async def test_a_chat_continues_in_a_session() -> None:
    """Messages of a later turn are rendered without what the template writes before the first; a stream says the session with its end."""
    async with demo() as (_, client):
        made = await call(client, "POST", "/v1/sessions", {}, status=201)
        body = {"messages": [{"role": "user", "content": "def"}], **GREEDY, "session": {"id": made["id"]}}
        async with client.post(CHAT, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            events = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
        assert '"session":{"id":' in events[-2]
        assert not any('"session"' in event for event in events[:-2])
        again = await call(client, "POST", CHAT, {**body, "session": {"id": made["id"], "revision": 1}})
        assert again["session"]["revision"] == 2


async def test_a_stale_revision_is_told_the_present_one() -> None:
    """Another revision, and one whose turn still runs, get 409 with the present revision; an unknown id gets 404; nothing changes."""
    async with demo() as (_, client):
        made = (await call(client, "POST", "/v1/sessions", status=201))["id"]
        await call(client, "POST", "/v1/completions", turn("import os\n", session={"id": made, "revision": 0}))
        for revision in (0, 2, 2**40):
            refused = await call(client, "POST", "/v1/completions", turn("x", session={"id": made, "revision": revision}), status=409)
            assert refused["revision"] == 1
            assert (refused["error"]["type"], refused["error"]["param"]) == ("conflict_error", "session.revision")
            await call(client, "POST", f"/v1/sessions/{made}/truncate", {"tokens": 1, "revision": revision}, status=409)
            await call(client, "POST", f"/v1/sessions/{made}/fork", {"revision": revision}, status=409)
        assert (await call(client, "GET", f"/v1/sessions/{made}"))["revision"] == 1
        assert len((await call(client, "GET", "/v1/sessions"))["data"]) == 1
        running = {"id": made, "revision": 1}
        async with client.post("/v1/completions", json=turn("y", session=running, max_tokens=400, stream=True)) as streaming:
            await streaming.content.readline()
            assert (await call(client, "POST", "/v1/completions", turn("x", session=running), status=409))["revision"] == 1
            await call(client, "POST", f"/v1/sessions/{made}/truncate", {"tokens": 1}, status=409)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/truncate")):
            body = {"tokens": 1} if path == "/truncate" else None
            await call(client, method, f"/v1/sessions/nobody{path}", body, status=404)
        await call(client, "POST", "/v1/completions", turn("x", session={"id": "nobody"}), status=404)


async def test_the_revision_moves_once_when_the_client_leaves() -> None:
    """A turn left in the middle moves the revision by one; what it generated is there to be read, and the next turn goes on from it."""
    async with demo() as (engine, client):
        made = (await call(client, "POST", "/v1/sessions", status=201))["id"]
        async with client.post("/v1/completions", json=turn("import os\n", session={"id": made}, max_tokens=5000, stream=True)) as leaving:
            for _ in range(6):
                await leaving.content.readline()
        async with asyncio.timeout(20):
            while (await call(client, "GET", f"/v1/sessions/{made}"))["state"] != "ready":  # noqa: ASYNC110 - as a client does
                await asyncio.sleep(0.01)
        left = await call(client, "GET", f"/v1/sessions/{made}?include=tokens")
        assert left["revision"] == 1
        prompt = len(engine.tokenizer.encode("import os\n"))
        assert prompt + 2 <= left["tokens"] < 5000
        assert left["text"] == engine.tokenizer.decode(left["token_ids"])
        assert left["text"].startswith("import os\n")
        after = await call(client, "POST", "/v1/completions", turn("\n", session={"id": made, "revision": 1}))
        assert after["session"]["revision"] == 2
        assert after["usage"]["prompt_tokens"] == left["tokens"] + len(engine.tokenizer.encode("\n"))


async def test_turns_right_after_one_another_are_not_stale() -> None:
    """A client that sends the next turn the moment it has the last chunk finds the revision that the chunk named."""
    async with demo() as (_, client):
        ref: dict[str, object] = {"id": (await call(client, "POST", "/v1/sessions", status=201))["id"], "revision": 0}
        for number in range(5):
            got = await call(client, "POST", "/v1/completions", turn("a", session=ref, max_tokens=3))
            ref = got["session"]
            assert ref["revision"] == number + 1


async def test_forks_and_cuts() -> None:
    """A fork begins with the tokens asked for and goes its own way; a cut moves the revision; both cost less than reading again."""
    async with demo() as (engine, client):
        made = (await call(client, "POST", "/v1/sessions", status=201))["id"]
        text = "import os\n" * 60
        await call(client, "POST", "/v1/completions", turn(text, session={"id": made}))
        whole = await call(client, "GET", f"/v1/sessions/{made}?include=tokens")
        forked = await call(client, "POST", f"/v1/sessions/{made}/fork", {"tokens": 100}, status=201)
        assert (forked["tokens"], forked["revision"]) == (100, 0)
        assert 97 <= forked["rows"] <= 100
        copied = await call(client, "POST", f"/v1/sessions/{made}/fork", status=201)
        assert copied["tokens"] == whole["tokens"]
        cut = await call(client, "POST", f"/v1/sessions/{made}/truncate", {"tokens": 100, "revision": 1})
        assert (cut["tokens"], cut["revision"]) == (100, 2)
        assert cut["bytes"]["host"] > 0
        same = [await call(client, "POST", "/v1/completions", turn("x = ", session={"id": each})) for each in (forked["id"], made)]
        assert same[0]["choices"][0]["token_ids"] == same[1]["choices"][0]["token_ids"]
        ids = [*whole["token_ids"][:100], *engine.tokenizer.encode("x = ")]
        plain = await call(client, "POST", "/v1/completions", {**turn(""), "prompt": ids})
        assert plain["choices"][0]["token_ids"] == same[0]["choices"][0]["token_ids"]
        for each in (forked["id"], made, copied["id"]):
            assert await call(client, "DELETE", f"/v1/sessions/{each}") == {"id": each, "object": "session", "deleted": True}
        assert (await call(client, "GET", "/v1/sessions"))["data"] == []
        await call(client, "GET", f"/v1/sessions/{made}", status=404)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("truncate", {}, "tokens"),
        ("truncate", {"tokens": -1}, "tokens"),
        ("truncate", {"tokens": "1"}, "tokens"),
        ("truncate", {"tokens": 4}, None),
        ("fork", {"tokens": 2**60}, "tokens"),
        ("fork", {"revision": "a"}, "revision"),
        ("fork", [], None),
    ],
)
async def test_bodies_that_are_not_served(path: str, body: object, field: str | None) -> None:
    """A body of another shape is refused by its field, and the engine is not asked."""
    engine = FakeEngine([words("a")])
    session = await engine.create_session()
    async with served(engine) as client:
        if body == {"tokens": 4}:
            async with client.post(f"/v1/sessions/{session}/truncate", data="{'tokens': 4}", headers={"Content-Type": "text/plain"}) as got:
                assert got.status == 415
        else:
            refused = await call(client, "POST", f"/v1/sessions/{session}/{path}", body, status=400)
            assert refused["error"]["param"] == field
    assert engine.forks == engine.truncations == []


async def test_sessions_of_another_key_are_unknown() -> None:
    """A session that was made in another namespace is neither listed, read, forked, cut nor deleted; the server's own are."""
    engine = FakeEngine([words("a")])
    others = await engine.create_session("somebody else's")
    async with served(engine, key="secret") as client:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/truncate")):
            body = {"tokens": 1} if path == "/truncate" else None
            await call(client, method, f"/v1/sessions/{others}{path}", body, status=404)
        mine = await call(client, "POST", "/v1/sessions", status=201)
        assert [each["id"] for each in (await call(client, "GET", "/v1/sessions"))["data"]] == [mine["id"]]
        await call(client, "POST", CHAT, {"messages": [{"role": "user", "content": "hi"}], "session": {"id": "s7", "revision": 3}})
    assert engine.closed_sessions == []
    assert (engine.calls[0].session, engine.calls[0].revision) == ("s7", 3)
    assert engine.calls[0].namespace == engine.sessions[mine["id"]].namespace != ""
    assert "secret" not in engine.calls[0].namespace


async def test_what_a_read_may_include() -> None:
    """`include=tokens` gives ids and text; anything else is refused by name; without it neither is there."""
    engine = FakeEngine([words("a")])
    session = await engine.create_session()
    async with served(engine) as client:
        plain = await call(client, "GET", f"/v1/sessions/{session}")
        assert plain == {
            "id": session, "object": "session", "revision": 3, "state": "ready", "tokens": 3, "rows": 2,
            "bytes": {"host": 4096, "device": 512}, "last_used": 1_000_000_000,
        }  # fmt: skip
        assert (await call(client, "GET", f"/v1/sessions/{session}?include=tokens"))["token_ids"] == [1, 2, 3]
        refused = await call(client, "GET", f"/v1/sessions/{session}?include=rows", status=400)
        assert refused["error"]["param"] == "include"
