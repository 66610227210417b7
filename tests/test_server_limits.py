"""What a server lets its users take: keys and their shares, time, ends by id, pages of other origins."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.api_keys import parse_keys
from engine.errors import NotAdmitted
from tests.fake_engine import FakeEngine, words
from tests.test_server import CHAT, HELLO, served

KEYS = parse_keys("anna:ka requests=1\nbob:kb tokens_per_minute=5\n")
MESSAGES = {"messages": HELLO["messages"], "max_tokens": 5}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_each_key_has_its_own() -> None:
    """Sessions, responses and stored histories of one key are unknown to another; the log has names and no keys."""
    engine = FakeEngine([words("x")])
    with capture_logs() as lines:
        async with served(engine, api_keys=KEYS) as client:
            async with client.post("/v1/sessions", headers=bearer("ka")) as made:
                name = (await made.json())["id"]
            async with client.post("/v1/responses", json={"input": "x"}, headers=bearer("ka")) as made:
                response_id = (await made.json())["id"]
            for path in (f"/v1/sessions/{name}", f"/v1/responses/{response_id}"):
                for key, status in (("ka", 200), ("kb", 404), ("kc", 401)):
                    async with client.get(path, headers=bearer(key)) as response:
                        assert response.status == status, (path, key)
            async with client.get("/v1/sessions", headers=bearer("kb")) as response:
                assert (await response.json())["data"] == []
            async with client.post(CHAT, json=HELLO, headers=bearer("kb")) as response:
                assert response.status == 200
    assert len({call.namespace for call in engine.calls}) == 2
    finished = [line for line in lines if line["event"] == "request.finished"]
    assert [line.get("key") for line in finished] == ["anna", "anna", *["anna", "bob", None] * 2, "bob", "bob"]
    assert not any(key in str(lines) for key in ("'ka'", "'kb'", "Bearer"))


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), ("/v1/messages", MESSAGES)])
async def test_requests_at_once_are_bounded_by_key(path: str, body: Any) -> None:
    """While one runs another of the key is 429 with a time to come again, another key's is served, and afterwards all is as before."""
    gate = asyncio.Event()
    engine = FakeEngine([[*words("a", "b")[:1], gate, words("b")[0]], words("x")])
    async with served(engine, api_keys=KEYS) as client:
        first = asyncio.ensure_future(client.post(path, json=body, headers=bearer("ka")))
        await engine.started.wait()
        async with client.post(path, json=body, headers=bearer("ka")) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert "1 requests of this key" in (await response.json())["error"]["message"]
        async with client.post(path, json=body, headers=bearer("kb")) as response:
            assert response.status == 200
        gate.set()
        async with await first as response:
            assert response.status == 200
        async with client.post(path, json=body, headers=bearer("ka")) as response:
            assert response.status == 200


async def test_tokens_a_minute_are_bounded_by_key() -> None:
    """A key that has taken more than its minute has is told how long that lasts; what was refused costs nothing."""
    async with served(FakeEngine([words("x")]), api_keys=KEYS) as client:
        statuses = []
        for _ in range(3):
            async with client.post(CHAT, json=HELLO, headers=bearer("kb")) as response:
                statuses.append(response.status)
                wait_s = response.headers.get("Retry-After")
        assert statuses == [200, 200, 429]  # 4 tokens each: 3 of the prompt and one more
        assert wait_s is not None
        assert 30 < int(wait_s) <= 48


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_is_ended_by_its_id(stream: bool, begun: bool) -> None:
    """While the prompt is read and amid an answer: the generation is closed when the call returns, and the reader is told."""
    engine = FakeEngine([[*(words("a", "b")[:1] if begun else ()), asyncio.Event()]])
    async with served(engine) as client:
        asking = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "stream": stream}, headers={"X-Request-Id": "mine"}))
        await engine.started.wait()
        await engine.generations[0].paused.wait()
        async with client.post("/v1/requests/mine/cancel") as response:
            assert (response.status, await response.json()) == (200, {"id": "mine", "object": "request", "cancelled": True})
            assert engine.generations[0].closed.is_set()
        async with await asking as response:
            text = await response.text()
            assert response.status == (200 if stream and begun else 499)
            assert '"code":"request_cancelled"' in text
            assert response.headers.get("X-Should-Retry") == (None if stream and begun else "false")
            assert text.endswith("data: [DONE]\n\n") == (stream and begun)
        async with client.post("/v1/requests/mine/cancel") as response:
            assert response.status == 404
    assert engine.aborted == 1


async def test_all_choices_of_a_request_end() -> None:
    """With n every choice is closed, also when the first has not begun."""
    for before in ([], words("a", "b")[:1]):
        engine = FakeEngine([lambda before=before: [*before, asyncio.Event()]])  # type: ignore[misc]  # bound
        async with served(engine) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "n": 3}, headers={"X-Request-Id": "mine"}))
            await engine.started.wait()
            await engine.generations[-1].paused.wait()
            async with client.post("/v1/requests/mine/cancel") as response:
                assert response.status == 200
            async with await asking as response:
                assert response.status == 499
        assert all(generation.closed.is_set() for generation in engine.generations)


async def test_a_response_is_ended_by_its_own_id_and_by_nobody_else() -> None:
    """The id that response.created told ends it; another key's holder does not find it; the stream says that it was cancelled."""
    engine = FakeEngine([[*words("a", "b")[:1], asyncio.Event()]])
    async with (
        served(engine, api_keys=KEYS) as client,
        client.post("/v1/responses", json={"input": "x", "stream": True}, headers=bearer("ka")) as stream,
    ):
        name = (await stream.content.readuntil(b'"status"')).split(b'"id":"')[1].split(b'"')[0].decode()
        async with client.post(f"/v1/responses/{name}/cancel", headers=bearer("kb")) as response:
            assert response.status == 404
        async with client.post(f"/v1/responses/{name}/cancel", headers=bearer("ka")) as response:
            assert (await response.json())["status"] == "cancelled"
        assert b'"status":"cancelled"' in (await stream.read()).split(b"event: response.failed")[1]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, HELLO, '"code":"request_timeout"'),
        ("/v1/responses", {"input": "x"}, "took longer"),
        ("/v1/messages", MESSAGES, '"type":"timeout_error"'),
    ],
)
async def test_a_request_has_its_time(path: str, body: dict[str, Any], said: str, begun: bool) -> None:
    """One that takes longer is 504 before its first chunk, and a stream then ends with the error; the generation is closed."""
    engine = FakeEngine([[*(words("a", "b")[:1] if begun else ()), asyncio.Event()]])
    async with (
        served(engine, request_timeout_s=0.05) as client,
        client.post(path, json={**body, "stream": True}) as response,
    ):
        assert response.status == (200 if begun else 504)
        assert said in await response.text()
        await engine.generations[0].closed.wait()
    assert engine.aborted == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), ("/v1/responses", {"input": "x"}), ("/v1/messages", MESSAGES)])
async def test_a_stream_that_waits_long_begins_with_comments(path: str, body: dict[str, Any], fails: bool) -> None:
    """While a prompt is read the reader hears so again and again; then comes the whole answer, or its error in the stream's way."""
    gate = asyncio.Event()
    engine = FakeEngine([[gate, NotAdmitted("nobody made room", retry_after_s=1.0)] if fails else [gate, *words("Hel", "lo")]])
    async with served(engine, keep_alive_s=0.01) as client, client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": the prompt is read\n\n"
        gate.set()
        rest = await response.text()
        async with client.post(path, json=body) as whole:
            assert whole.status == (429 if fails else 200)
    said = [line for line in rest.splitlines() if line and not line.startswith(":")]
    if path != CHAT:
        assert "response.created" in said[0] or "message_start" in said[0]
    assert ("nobody made room" in rest) == fails
    assert ("Hel" in rest) == (not fails)


async def test_a_reader_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a request's time and its grace the connection ends, and with it the generation that waited for its reader."""
    monkeypatch.setattr("engine.generating._GRACE_S", 0.05)
    chunks = words(*["x" * 16_000] * 2_000)
    engine = FakeEngine([chunks])
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(served(engine, request_timeout_s=0.2))
        slow = await client.post(CHAT, json={**HELLO, "stream": True})
        await engine.generations[0].closed.wait()
        slow.close()
    assert engine.generations[0].produced < len(chunks)


async def test_pages_of_other_origins() -> None:
    """Only origins that were named may ask, before with OPTIONS and without a key, and answers and refusals say so; by default none."""
    page = {"Origin": "https://chat.example"}
    before = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    engine = FakeEngine([words("x")])
    async with served(engine, origins=("https://chat.example",), api_keys=KEYS) as client:
        async with client.options(CHAT, headers=before) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for headers, status in (({**page, **bearer("kb")}, 200), (page, 401)):
            async with client.post(CHAT, json={**HELLO, "stream": True}, headers=headers) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
                assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        for origin in ("https://evil.example", "https://chat.example.evil", "null"):
            async with client.options(CHAT, headers={**before, "Origin": origin}) as response:
                assert response.status == 401
                assert "Access-Control-Allow-Origin" not in response.headers
                assert response.headers["Vary"] == "Origin"
    async with served(engine, origins=("*",)) as client, client.get("/v1/models", headers=page) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"
    async with served(engine) as client, client.options(CHAT, headers=before) as response:
        assert (response.status, "Access-Control-Allow-Origin" in response.headers) == (405, False)


async def test_headers_are_bounded() -> None:
    """A header larger than 8 KiB is a 400 before anything is done with it."""
    async with (
        served(FakeEngine([words("x")])) as client,
        client.get("/v1/models", headers={"X-Long": "x" * 10_000}) as response,
    ):
        assert response.status == 400


async def test_a_hundred_megabytes_are_refused_by_their_length() -> None:
    """Nothing of such a body is read: the refusal comes while it has not been sent."""

    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages"):
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: x",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {100 * 2**20}",
        )
        head = "".join(f"{line}\r\n" for line in (*lines, ""))
        async with served(FakeEngine([words("x")])) as client:
            assert client._base_url is not None
            reader, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
            writer.write(head.encode())
            answer = await reader.readuntil(b"larger than 33554432 bytes")
            writer.close()
            await writer.wait_closed()
        assert answer.split()[1] == b"413"
