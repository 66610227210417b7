"""The same odd cases at every endpoint that generates: what is refused, what arrives, how streams and readers end."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from engine.chunk import Chunk, Usage
from engine.errors import BadRequest, SessionBroken
from tests.fake_engine import FakeEngine, Item, words
from tests.test_server import served
from tests.test_server_chat import READ, THINKING

CHAT, COMPLETION, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PATHS = [CHAT, COMPLETION, RESPONSES, MESSAGES]
PROMPT_FIELD = {CHAT: "messages", COMPLETION: "prompt", RESPONSES: "input", MESSAGES: "messages"}
MAX_FIELD = {CHAT: "max_completion_tokens", COMPLETION: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
JSON = {"Content-Type": "application/json"}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}],
    RESPONSES: [{"type": "function", "name": "read", "parameters": PARAMETERS}],
    MESSAGES: [{"name": "read", "input_schema": PARAMETERS}],
}


def asking(path: str, text: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A body that asks `text` of an endpoint."""
    prompt = text if path in (COMPLETION, RESPONSES) else [{"role": "user", "content": text}]
    return {"model": "fake", PROMPT_FIELD[path]: prompt, **fields}


async def refused(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    """Status and line of a refusal, which is one line in the endpoint's own shape."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data, headers=JSON) as response:
        answer = await response.json()
        assert ("request_id" in answer) == (path == MESSAGES), answer
        message: str = answer["error"]["message"]
        assert "\n" not in message
        assert len(message) <= 500
        return response.status, message


async def said(client: aiohttp.ClientSession, path: str, body: Any) -> str:
    """Everything of a stream, reasoning, text and arguments, in one string; it must have ended well."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        lines = (await response.read()).decode().splitlines()
    found = []
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            found.append(delta.get("reasoning_content", "") + (delta.get("content") or delta.get("text") or "") + calls)
        delta = event.get("delta")
        if isinstance(delta, str):
            found.append(delta)
        elif isinstance(delta, dict):
            found.append("".join(delta.get(name, "") for name in ("thinking", "text", "partial_json")))
    ends = {CHAT: "data: [DONE]", COMPLETION: "data: [DONE]", RESPONSES: '"type":"response.', MESSAGES: '"type":"message_stop"'}
    assert ends[path] in [line for line in lines if line][-1]
    return "".join(found)


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_are_refused(path: str) -> None:
    """Each is a 4xx in one line that names what is wrong, and the engine does not hear of any."""
    engine = FakeEngine([words("x")])
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    bodies: list[tuple[Any, int, str]] = [
        (b"", 400, "JSON"), (b"{", 400, "JSON"), (b"[]", 400, "body"), (b"\xff", 400, ""), (b"null", 400, "body"),
        (b'{"a":' * 100_000, 400, "nested"), (b'{"a": 1e999}', 400, ""),
        ({}, 400, PROMPT_FIELD[path]), (asking(path, None), 400, PROMPT_FIELD[path]) if path != CHAT else ({}, 400, "messages"),
        (asking(path, 5), 400, PROMPT_FIELD[path]), ({**asking(path), PROMPT_FIELD[path]: []}, 400, PROMPT_FIELD[path]),
        (asking(path, model="gpt"), 404, "gpt"), (asking(path, model="x" * 10_000), 404, "no model"),
        (asking(path, **{MAX_FIELD[path]: 0}), 400, MAX_FIELD[path]), (asking(path, **{MAX_FIELD[path]: -3}), 400, MAX_FIELD[path]),
        (asking(path, **{MAX_FIELD[path]: 1.5}), 400, MAX_FIELD[path]), (asking(path, **{MAX_FIELD[path]: 10**30}), 400, MAX_FIELD[path]),
        (asking(path, stream_options={"include_usage": True}), 400, "stream_options"),
        (asking(path, temperature=-1), 400, "temperature"), (asking(path, top_p=2), 400, "top_p"), (asking(path, seed=1.5), 400, "seed"),
        (asking(path, "y" * (16 * 4_096 + 1)), 400, "characters"),
    ]  # fmt: skip
    if path != COMPLETION:
        bodies += [
            (asking(path, chat_template_kwargs={"a": deep}), 400, "nested deeper"),
            (asking(path, chat_template_kwargs={"tools": []}), 400, "chat_template_kwargs"),
            (asking(path, tools=[{"type": "magic"}]), 400, "tools"),
        ]
    async with served(engine, body_bytes_max=2**20) as client:
        for body, status, text in bodies:
            got, message = await refused(client, path, body)
            assert (got, text in message) == (status, True), (str(body)[:100], message)
    assert engine.calls == []


async def test_both_maxima_only_where_they_agree() -> None:
    """Two names of the same limit may both come, with one value."""
    engine = FakeEngine([words("x")])
    async with served(engine) as client:
        for path in (CHAT, RESPONSES):
            status, message = await refused(client, path, asking(path, max_tokens=5, **{MAX_FIELD[path]: 6}))
            assert (status, MAX_FIELD[path] in message, "disagree" in message) == (400, True, True)
            async with client.post(path, json=asking(path, max_tokens=5, **{MAX_FIELD[path]: 5})) as response:
                assert response.status == 200
    assert [call.sampling.max_tokens for call in engine.calls] == [5, 5]


@pytest.mark.parametrize("path", PATHS)
async def test_what_arrives_at_the_engine(path: str) -> None:
    """Temperature 0 beside top_p, seeds, limits, null for what is not given, and empty content arrive as they were meant."""
    engine = FakeEngine([words("x")])
    async with served(engine) as client:
        nulls = {"temperature": None, "stream": None, "tools": None, "stop": None, "seed": None, "stream_options": None}
        for fields in ({"temperature": 0, "top_p": 0.5, "seed": -7, MAX_FIELD[path]: 9}, nulls):
            async with client.post(path, json=asking(path, **fields)) as response:
                assert response.status == 200, await response.text()
        if path in (CHAT, MESSAGES):
            async with client.post(path, json=asking(path, "")) as response:
                assert response.status == 200
    sampling = engine.calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0, 0.5, -7, 9)
    assert engine.calls[1].sampling == engine.default_sampling


@pytest.mark.parametrize("path", PATHS)
async def test_text_that_lags_behind_its_tokens(path: str) -> None:
    """Half characters, emoji in arguments and chunks without text lose nothing, whatever they are cut into."""
    text = "naïve 🙂" if path == COMPLETION else f"hm</think>naïve 🙂{READ}"
    pieces = [piece for letter in text for piece in ("", letter)]
    chunks = [Chunk(piece, (place,), Usage(3, place + 1)) for place, piece in enumerate(pieces)]
    chunks.append(Chunk("", (9,), Usage(3, len(pieces) + 1), finish_reason="stop", stop_reason=154829))
    engine = FakeEngine([chunks], prompt_ids=THINKING if path != COMPLETION else (1,))
    async with served(engine) as client:
        found = await said(client, path, asking(path, **({"tools": TOOLS[path]} if path in TOOLS else {})))
    assert found.startswith("naïve 🙂" if path == COMPLETION else "hmnaïve 🙂")
    if path != COMPLETION:
        assert json.loads(found.removeprefix("hmnaïve 🙂")) == {"path": "dir/é🙂.py"}


@pytest.mark.parametrize(("text", "inside"), [("still thin", "reasoning"), (f"a</think>{READ[:60]}", "call"), ("a</think>b", "text")])
@pytest.mark.parametrize(("finish", "stop"), [("stop", "END"), ("stop", 154829), ("length", None)])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_turns_that_end_anywhere(path: str, text: str, inside: str, finish: Any, stop: Any) -> None:
    """A stop text, a stop id and the cap inside reasoning, a call and text: what came is there, and the reason is the true one."""
    engine = FakeEngine([[Chunk(text, (1,), Usage(3, 1), finish_reason=finish, stop_reason=stop)]], prompt_ids=THINKING)
    async with served(engine) as client:
        async with client.post(path, json=asking(path, tools=TOOLS[path])) as response:
            body = await response.json()
        found = await said(client, path, asking(path, tools=TOOLS[path]))
    assert found.startswith(text.split("<")[0])
    whole = inside == "call" and stop == 154829  # models leave the last mark out
    if path == CHAT:
        reason = body["choices"][0]["finish_reason"]
        assert reason == ("tool_calls" if whole else finish)
    elif path == RESPONSES:
        assert body["status"] == ("incomplete" if finish == "length" else "completed")
        assert (body["output"][-1]["status"] == "incomplete") == (finish == "length" or (inside == "call" and not whole))
    else:
        named = {"END": "stop_sequence", 154829: "tool_use" if whole else "end_turn", None: "max_tokens"}[stop]
        assert (body["stop_reason"], body["stop_sequence"]) == (named, "END" if stop == "END" else None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", [0, 1])
async def test_errors_have_their_place(path: str, before: int) -> None:
    """A template that raises is a 400 before anything was sent; a session that breaks amid a stream ends it in the endpoint's way."""
    error: Exception = SessionBroken("layer 2 is not finite") if before else BadRequest("the chat template refused it", field="messages")
    script: list[Item] = [*words("a", "b")[:before], error]
    async with (
        served(FakeEngine([script])) as client,
        client.post(path, json=asking(path, stream=True)) as response,
    ):
        text = await response.text()
        assert response.status == (200 if before else 400)
    assert ("layer 2 is not finite" if before else "template refused") in text
    assert text.endswith("data: [DONE]\n\n") == (bool(before) and path in (CHAT, COMPLETION))


@pytest.mark.parametrize("path", PATHS)
async def test_readers_that_leave(path: str) -> None:
    """Before the first token, amid the answer, and after its end: a generation is aborted exactly where it had not ended."""
    engine = FakeEngine([[asyncio.Event()], [*words("a", "b")[:1], asyncio.Event()], words("a", "b")])
    async with served(engine) as client:
        first = asyncio.ensure_future(client.post(path, json=asking(path, stream=True)))
        await engine.started.wait()
        await engine.generations[0].paused.wait()
        first.cancel()
        await engine.generations[0].closed.wait()
        second = await client.post(path, json=asking(path, stream=True))
        await engine.generations[1].paused.wait()
        second.close()
        await engine.generations[1].closed.wait()
        assert engine.aborted == 2
        third = await client.post(path, json=asking(path, stream=True))
        await third.read()
        third.close()
        await engine.generations[2].closed.wait()
    assert engine.aborted == 2
