"""The server over a real socket: statuses, streams, clients that leave, keys, the canonical log line."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from structlog.testing import capture_logs

from engine.config import ServerConfig
from engine.errors import BadRequest, NodeLost, NotAdmitted, SessionBroken
from engine.protocol import SyntheticHistory
from engine.sampling import Sampling
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, FakeTokenizer, Item, words

pytestmark = pytest.mark.both_loops

CHAT = "/v1/chat/completions"
HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def served(engine: FakeEngine | None, **settings: object) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server on a free port."""
    service = Service(ServerConfig(port=0, **settings))  # type: ignore[arg-type]  # a test's own keywords
    service.engine = engine
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        yield client


async def events_of(response: aiohttp.ClientResponse) -> list[str]:
    """The payloads of a whole SSE stream."""
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def error_of(response: aiohttp.ClientResponse) -> dict[str, object]:
    assert response.content_type == "application/json"
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error  # type: ignore[no-any-return]


async def test_a_chat_answer_is_whole() -> None:
    """A chat without stream gets all text, the finish reason and the usage in one body."""
    async with served(FakeEngine([words("Hel", "lo")])) as client, client.post(CHAT, json=HELLO) as response:
        assert response.status == 200
        answer = await response.json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (3, 2, 5)
    assert "token_ids" not in answer["choices"][0]


async def test_a_chat_stream_is_chunks_then_done() -> None:
    """A stream carries the role once, the text in pieces, one finish reason, the usage if asked for, and ends with [DONE]."""
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with served(FakeEngine([words("Hel", "lo", "!")])) as client, client.post(CHAT, json=body) as response:
        events = await events_of(response)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["delta"]["content"] for choice in choices) == "Hello!"
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert [choice["token_ids"] for choice in choices] == [[100], [101], [102]]
    assert chunks[0]["prompt_token_ids"] == [7, 8, 9]


async def test_a_completion_stream_and_answer_agree() -> None:
    """A completion's streamed text is the text of its whole answer; without include_usage no chunk lacks a choice."""
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2}
    async with served(FakeEngine([words("a", "b", finish="length")] * 2)) as client:
        async with client.post("/v1/completions", json=body) as response:
            whole = (await response.json())["choices"][0]
        async with client.post("/v1/completions", json={**body, "stream": True}) as response:
            events = await events_of(response)
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == "ab"
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "length"


async def test_what_was_asked_reaches_the_engine() -> None:
    """Prompt, sampling over the model's defaults, template arguments and the request's id arrive as sent."""
    engine = FakeEngine([words("x")], default_sampling=Sampling(temperature=0.7, top_p=0.9))
    body = {**HELLO, "top_p": 0.5, "max_tokens": 9, "seed": 4, "stop": "END", "chat_template_kwargs": {"enable_thinking": False}}
    async with served(engine) as client:
        await (await client.post(CHAT, json=body, headers={"X-Request-Id": "abc-1"})).read()
        await (await client.post("/v1/completions", json={"prompt": "text"})).read()
    chat, completion = engine.calls
    assert list(chat.prompt) == [{"role": "user", "content": "hi"}]
    assert chat.sampling == Sampling(temperature=0.7, top_p=0.5, max_tokens=9, seed=4, stop=("END",))
    assert chat.arguments == {"enable_thinking": False}
    assert chat.request_id == "abc-1"
    assert completion.prompt == "text"
    assert completion.sampling == Sampling(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("prompt too long", field="prompt"), 400, "invalid_request_error"),
        (NotAdmitted("the queue is full", retry_after_s=1.2), 429, "capacity_error"),
        (NotAdmitted("needs 5 GiB more RAM"), 503, "capacity_error"),
        (NodeLost("a node is away"), 503, "node_lost"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
async def test_an_error_before_the_first_chunk_has_its_status(error: Exception, status: int, kind: str, stream: bool) -> None:
    """Until the first chunk nothing has been sent, so an early error has the right status with and without stream."""
    gate = asyncio.Event()
    engine = FakeEngine([[gate, error]])
    async with served(engine) as client:
        asking = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "stream": stream}))
        await engine.started.wait()
        await engine.generations[0].paused.wait()
        gate.set()
        async with await asking as response:
            assert response.status == status
            said = await error_of(response)
            assert said["type"] == kind
            assert "secret" not in str(said["message"])
            assert response.headers.get("Retry-After") == ("2" if status == 429 or kind == "node_lost" else None)
            assert engine.generations[0].closed.is_set()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SessionBroken("layer 3 is not finite"), "layer 3"),
        (NodeLost("a node is away"), "a node is away"),
        (ValueError("secret"), "internal error"),
    ],
)
async def test_an_error_amid_a_stream_is_its_last_chunk(error: Exception, shown: str) -> None:
    """A stream that fails ends with an error chunk and [DONE]; our own bugs do not show their text."""
    async with served(FakeEngine([[words("a", "b")[0], error]])) as client, client.post(CHAT, json={**HELLO, "stream": True}) as response:
        assert response.status == 200
        events = await events_of(response)
    assert events[-1] == "[DONE]"
    assert shown in json.loads(events[-2])["error"]["message"]
    assert "secret" not in events[-2]
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == "a"


@pytest.mark.parametrize(
    ("before", "stream"),
    [([], True), ([], False), (words("a", "b")[:1], True), (words("a", "b")[:1], False)],
    ids=["reading, stream", "reading, whole", "decoding, stream", "decoding, whole"],
)
async def test_a_client_that_leaves_ends_its_generation(before: list[Item], stream: bool) -> None:
    """Leaving while the prompt is read or while tokens come closes the generation, and the next request is served as ever."""
    engine = FakeEngine([[*before, asyncio.Event()], words("fine")])
    async with served(engine) as client:
        asking = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "stream": stream}))
        await engine.started.wait()
        await engine.generations[0].paused.wait()
        with capture_logs() as logs:
            if before and stream:
                (await asking).close()
            else:
                asking.cancel()
            await engine.generations[0].closed.wait()
            async with client.post(CHAT, json=HELLO) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "fine"
    assert engine.aborted == 1
    left = next(line for line in logs if line["event"] == "request.finished")
    assert (left["status"], left["finish_reason"], left["session_id"]) == (499, "abort", "fresh")


async def test_a_slow_reader_holds_up_only_itself() -> None:
    """While one client does not read its 32 MB stream, the generation behind it waits and another client is answered."""
    chunks = words(*["x" * 16_000] * 2_000)
    engine = FakeEngine([chunks, words("quick")])
    async with served(engine) as client, client.post(CHAT, json={**HELLO, "stream": True}) as slow:
        async with client.post(CHAT, json=HELLO) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "quick"
        assert engine.generations[0].produced < len(chunks)
        slow.close()
        await engine.generations[0].closed.wait()


REFUSED = [
    ("POST", CHAT, JSON, b"{", 400, "invalid_request_error"),
    ("POST", CHAT, JSON, b"", 400, "invalid_request_error"),
    ("POST", CHAT, JSON, b"[]", 400, "invalid_request_error"),
    ("POST", CHAT, JSON, b"\xff\xfe", 400, "invalid_request_error"),
    ("POST", CHAT, JSON, b"[" * 100_000, 400, "invalid_request_error"),
    ("POST", CHAT, JSON, b'{"messages": [], "model": "fake"}', 400, "invalid_request_error"),
    ("POST", CHAT, JSON, b'{"messages": "hi"}', 400, "invalid_request_error"),
    ("POST", CHAT, {"Content-Type": "text/plain"}, json.dumps(HELLO).encode(), 415, "invalid_request_error"),
    ("POST", CHAT, {"Content-Type": "application/x-www-form-urlencoded"}, b"a=b", 415, "invalid_request_error"),
    ("POST", CHAT, JSON, json.dumps({**HELLO, "model": "gpt"}).encode(), 404, "not_found_error"),
    ("POST", "/v1/nothing", JSON, b"{}", 404, "not_found_error"),
    ("GET", CHAT, {}, b"", 405, "invalid_request_error"),
    ("DELETE", "/v1/models", {}, b"", 405, "invalid_request_error"),
    ("GET", "/v1/models/gpt", {}, b"", 404, "not_found_error"),
    ("POST", CHAT, JSON, b" " * 5_000, 413, "invalid_request_error"),
]


@pytest.mark.parametrize(("method", "path", "headers", "body", "status", "kind"), REFUSED)
async def test_a_bad_request_is_refused_in_our_shape(
    method: str, path: str, headers: dict[str, str], body: bytes, status: int, kind: str
) -> None:
    """Whatever is wrong with a request, it gets a 4xx and an OpenAI-shaped error, and the engine never hears of it."""
    engine = FakeEngine([words("x")])
    size = 4_096 if status == 413 else 2**20
    async with served(engine, body_bytes_max=size) as client, client.request(method, path, data=body, headers=headers) as response:
        assert response.status == status
        assert (await error_of(response))["type"] == kind
        assert len(response.headers["X-Request-Id"]) == 32
        assert ("Allow" in response.headers) == (status == 405)
    assert not engine.calls


async def test_a_large_body_without_a_length_is_refused_too() -> None:
    """A chunked body is cut off at the limit although it never named its size."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1_000

    async with served(FakeEngine([words("x")]), body_bytes_max=4_096) as client, client.post(CHAT, data=pieces(), headers=JSON) as response:
        assert response.status == 413
        assert "4096 bytes" in str((await error_of(response))["message"])


async def test_the_key_is_asked_for() -> None:
    """With a key every path but /health and /ready needs it, and a wrong one is as good as none."""
    engine = FakeEngine([words("x")])
    async with served(engine, api_key="s3cret-ü") as client:
        for sent in ({}, {"Authorization": "Bearer s3cret"}, {"Authorization": "s3cret-ü"}, {"Authorization": "Basic s3cret-ü"}):
            async with client.post(CHAT, json=HELLO, headers=sent) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await error_of(response))["code"] == "invalid_api_key"
        async with client.get("/no/such/route") as response:
            assert response.status == 401
        for path in ("/health", "/ready"):
            async with client.get(path) as response:
                assert response.status == 200
        assert not engine.calls
        async with client.post(CHAT, json=HELLO, headers={"Authorization": "Bearer s3cret-ü"}) as response:
            assert response.status == 200


@pytest.mark.parametrize(("sent", "kept"), [("abc.1:2_3-4", True), ("a b", False), ("x" * 129, False), ("", False)])
async def test_the_request_id_is_echoed_or_made(sent: str, kept: bool) -> None:
    """A tame x-request-id comes back in the header and in the answer's id; any other is replaced."""
    async with served(FakeEngine([words("x")])) as client, client.post(CHAT, json=HELLO, headers={"X-Request-Id": sent}) as response:
        name = response.headers["X-Request-Id"]
        assert (name == sent) == kept
        assert (await response.json())["id"] == f"chatcmpl-{name}"


async def test_one_canonical_line_a_request() -> None:
    """A request writes one line with its counts and times, and nothing for its tokens; probes write nothing."""
    with capture_logs() as logs:
        async with served(FakeEngine([words(*"abcdefgh")])) as client:
            async with client.post(CHAT, json={**HELLO, "stream": True}) as response:
                await response.read()
            async with client.get("/health") as response:
                await response.read()
    lines = [line for line in logs if line["log_level"] != "debug"]
    assert len(lines) == 1
    line = lines[0]
    assert line["event"] == "request.finished"
    assert (line["method"], line["path"], line["status"], line["session_id"]) == ("POST", CHAT, 200, "fresh")
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (3, 8, "stop")
    assert 0 <= line["first_token_ms"] <= line["duration_ms"]
    assert 0 <= line["decode_ms"] <= line["duration_ms"]
    assert "hi" not in [value for value in line.values() if isinstance(value, str)]


async def test_loading_says_503_and_health_says_ok() -> None:
    """Before the engine is open the process is healthy and not ready, and requests are told to come again."""
    async with served(None) as client:
        async with client.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        async with client.get("/ready") as response:
            assert (response.status, await response.json()) == (503, {"status": "loading"})
        for path, method in ((CHAT, "POST"), ("/v1/models", "GET")):
            async with client.request(method, path, json=HELLO) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert "loading" in str((await error_of(response))["message"])


async def test_models_are_listed() -> None:
    """The one model is listed with its context, and found by its name."""
    async with served(FakeEngine([words("x")], model_name="org/model")) as client:
        async with client.get("/v1/models") as response:
            listed = (await response.json())["data"]
        async with client.get("/v1/models/org/model") as response:
            assert await response.json() == listed[0]
    assert (listed[0]["id"], listed[0]["max_model_len"]) == ("org/model", 4096)


async def test_tokenize_counts_text_and_messages() -> None:
    """/tokenize encodes a text as it stands and messages as the template renders them."""
    messages = [{"role": "user", "content": "é"}]
    async with served(FakeEngine([words("x")])) as client:
        async with client.post("/tokenize", json={"prompt": "é!"}) as response:
            assert await response.json() == {"count": 3, "max_model_len": 4096, "tokens": [0xC3, 0xA9, 0x21]}
        async with client.post("/tokenize", json={"messages": messages, "return_token_strs": True}) as response:
            answer = await response.json()
        async with client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}) as response:
            assert bytes((await response.json())["tokens"]) == "<user>é".encode()
    assert bytes(answer["tokens"]) == "<user>é<assistant>".encode()
    assert len(answer["token_strs"]) == answer["count"]


async def test_a_model_without_a_tokenizer_is_the_clients_problem() -> None:
    """Asking for what this model directory lacks is a 400 that says so, not a server error."""
    engine = FakeEngine([words("x")], tokenizer=FakeTokenizer(available=False))
    async with served(engine) as client, client.post("/tokenize", json={"prompt": "x"}) as response:
        assert response.status == 400
        assert "token ids" in str((await error_of(response))["message"])


async def test_requests_side_by_side_do_not_mix() -> None:
    """Sixteen streams at once each get their own text and nothing else."""

    def script(name: str) -> Iterator[Item]:
        yield from words(*[f"{name}."] * 20)

    engine = FakeEngine([words("unused")])
    engine.scripts = [script(str(index)) for index in range(16)]
    async with served(engine) as client:

        async def ask() -> tuple[str, str]:
            async with client.post(CHAT, json={**HELLO, "stream": True}) as response:
                events = [json.loads(event) for event in (await events_of(response))[:-1]]
            return events[0]["id"], "".join(event["choices"][0]["delta"]["content"] for event in events)

        answers = await asyncio.gather(*(ask() for _ in range(16)))
    assert len({name for name, _ in answers}) == 16
    assert sorted(text for _, text in answers) == sorted(f"{index}." * 20 for index in range(16))


async def test_statistics_are_counts() -> None:
    """/statistics answers with the engine's counts as one JSON object, wants the key, and says 503 before the engine is open."""
    async with served(FakeEngine([words("x")])) as client, client.get("/statistics") as response:
        counts = await response.json()
        assert (counts["hits"], counts["misses"], counts["ring_reads"], counts["steps"]) == (750, 250, 40, 12)
    async with served(None) as client, client.get("/statistics") as response:
        assert response.status == 503
    async with served(FakeEngine([words("x")]), api_key="k") as client, client.get("/statistics") as response:
        assert response.status == 401


@pytest.mark.parametrize(("allowed", "status"), [(True, 200), (False, 400)])
async def test_a_synthetic_history_needs_the_servers_word(allowed: bool, status: int) -> None:
    """Made-up rows reach the engine from a server started for them, and are refused by name by any other."""
    engine = FakeEngine([words("x")])
    body = {**HELLO, "synthetic_history": {"seed": 3, "rows": 500}}
    async with served(engine, synthetic_history=allowed) as client, client.post(CHAT, json=body) as response:
        assert response.status == status
        if not allowed:
            assert (await error_of(response))["param"] == "synthetic_history"
    assert [call.history for call in engine.calls] == ([SyntheticHistory(3, 500)] if allowed else [])


@pytest.mark.parametrize("history", [{"seed": -1, "rows": 1}, {"seed": 0, "rows": 0}, {"rows": 1}, "much"])
async def test_a_bad_synthetic_history_is_a_bad_request(history: object) -> None:
    """A history without a seed or a row is refused, and the engine is not asked."""
    engine = FakeEngine([words("x")])
    async with (
        served(engine, synthetic_history=True) as client,
        client.post(CHAT, json={**HELLO, "synthetic_history": history}) as response,
    ):
        assert response.status == 400
        assert "synthetic_history" in str((await error_of(response))["param"])
    assert engine.calls == []
