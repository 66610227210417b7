"""/v1/responses and /v1/messages in front of the real engine and the packaged model, driven by the official packages."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from engine import Engine, EngineConfig
from engine.config import ServerConfig
from engine.protocol import EngineFace
from engine.settings import resolve
from server import serve

DEMO = resolve({"demo": "true"}, {}).model_directory()
SMALL = EngineConfig(hot_rows=256, host_memory_bytes=64 * 2**20, context_max=2_048, prefix_cache="on", decode_batch_limit=1)
QUESTION = "What does bisect do?"
SCHEMA: Any = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 5}},
    "required": ["path"],
    "additionalProperties": False,
}


async def respond(client: AsyncOpenAI, engine: EngineFace, model: str) -> None:
    """A response, streamed as whole; the next turn goes on from its tokens and finds its rows; each branch has its own."""
    asked: Any = {"model": model, "temperature": 0, "max_output_tokens": 12}
    first = await client.responses.create(input=QUESTION * 10, **asked)
    assert first.usage is not None
    assert first.output_text or first.output
    last: Any = [event async for event in await client.responses.create(input=QUESTION * 10, stream=True, **asked)][-1]
    assert [item.to_dict() for item in last.response.output] != []
    assert last.response.output_text == first.output_text
    held = first.usage.total_tokens
    nexts = [
        await client.responses.create(input=text, previous_response_id=first.id, **asked) for text in ("And heapq?", "And heapq?", "Why?")
    ]
    for found in nexts:
        assert found.usage is not None
        assert found.usage.input_tokens > held
        assert found.usage.input_tokens_details.cached_tokens >= held - 64  # but a tail of less than a block
    assert nexts[0].output_text == nexts[1].output_text
    third = await client.responses.create(input="Go on.", previous_response_id=nexts[2].id, **asked)
    assert third.usage is not None
    assert nexts[2].usage is not None
    assert third.usage.input_tokens > nexts[2].usage.total_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(input=QUESTION * 1_000, model=model)
    assert caught.value.code == "context_length_exceeded"


async def converse(client: AsyncAnthropic, model: str) -> None:
    """A message, streamed as whole, with as many prompt tokens as are counted; a tool that is forced is called with whole arguments."""
    settings = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    long = [{"role": "user", "content": QUESTION * 10}]
    asked: Any = {"model": model, "messages": long, "max_tokens": 12, "extra_body": settings}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert whole.content
    count = await client.messages.count_tokens(model=model, messages=asked["messages"], extra_body=settings)
    read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert count.input_tokens == read
    assert (streamed.usage.cache_read_input_tokens or 0) > 0
    tool: Any = {"name": "read", "input_schema": SCHEMA}
    one: Any = {"type": "tool", "name": "read", "disable_parallel_tool_use": True}
    called = await client.messages.create(**{**asked, "max_tokens": 200}, tools=[tool], tool_choice=one)
    block = called.content[-1]
    assert (block.type, called.stop_reason) == ("tool_use", "tool_use")
    assert isinstance(block.input["path"], str)  # type: ignore[union-attr]
    results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "text"}]  # type: ignore[union-attr]
    sent = [*asked["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    after = await client.messages.create(**{**asked, "messages": sent}, tools=[tool])
    assert after.usage.output_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await client.messages.create(**{**asked, "messages": [{"role": "user", "content": QUESTION * 1_000}]})


async def end_anywhere(address: str, engine: EngineFace, *, leaves: bool) -> None:
    """Ended by id, or left, while it waits behind another, and while that one decodes: nothing of either stays."""
    path, endless = "/v1/completions", {"max_tokens": 1_000, "temperature": 0, "ignore_eos": True}
    names = {"waits": [7] * 500, "decodes": "x"}  # the second one decodes, and the batch has room for no other
    async with aiohttp.ClientSession(address) as client:
        asked = {}
        before = engine.statistics().steps
        for name, prompt in reversed(names.items()):
            asked[name] = asyncio.ensure_future(client.post(path, json={"prompt": prompt, **endless}, headers={"X-Request-Id": name}))
            while engine.statistics().running + engine.statistics().waiting < len(asked) or engine.statistics().steps == before:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for name in names:
            if leaves:
                asked[name].cancel()
                continue
            async with client.post(f"/v1/requests/{name}/cancel") as response:
                assert response.status == 200, name
            async with await asked[name] as response:
                assert response.status == 499
        while engine.statistics().running + engine.statistics().waiting:  # noqa: ASYNC110 - one look a turn of the loop
            await asyncio.sleep(0)
    assert engine.statistics().steps < before + 500


async def end_while_reading(address: str, engine: EngineFace) -> None:
    """Ended by id while a long prompt is read: no step is ever made for it."""
    steps = engine.statistics().steps
    async with aiohttp.ClientSession(address) as client:
        asked = asyncio.ensure_future(
            client.post("/v1/completions", json={"prompt": [9] * 2_000, "max_tokens": 9}, headers={"X-Request-Id": "reads"})
        )
        while not engine.statistics().running:  # noqa: ASYNC110 - one look a turn of the loop
            await asyncio.sleep(0)
        async with client.post("/v1/requests/reads/cancel") as response:
            assert response.status == 200
        async with await asked as response:
            assert response.status == 499
    assert (engine.statistics().steps, engine.statistics().running) == (steps, 0)


async def ask_for_too_much(address: str) -> None:
    """More tokens than the context holds behind the prompt are refused with its numbers, at every endpoint."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2_048}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2_048}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2_048}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2_048}),
    ]
    async with aiohttp.ClientSession(address) as client:
        for path, body in asked:
            async with client.post(path, json={**body, "stream": True}) as response:
                assert (response.status, "exceed the context of 2048 tokens" in await response.text()) == (400, True)


async def two_turns_at_once(address: str) -> None:
    """Two requests that name the same revision of a session: one is served and the other told of the conflict; without one, in turn."""
    async with aiohttp.ClientSession(address) as client:
        async with client.post("/v1/sessions") as response:
            name = (await response.json())["id"]

        async def turn(revision: int | None) -> tuple[int, Any]:
            session = {"id": name} if revision is None else {"id": name, "revision": revision}
            body = {"prompt": "import os\n", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "session": session}
            async with client.post("/v1/completions", json=body) as response:
                return response.status, await response.json()

        outcomes = await asyncio.gather(turn(0), turn(0))
        assert sorted(status for status, _ in outcomes) == [200, 409]
        both = await asyncio.gather(turn(None), turn(None))
        assert [status for status, _ in both] == [200, 200]
        assert sorted(body["session"]["revision"] for _, body in both) == [2, 3]


@pytest.mark.slow
async def test_the_packages_drive_the_real_engine() -> None:
    """Everything in one visit: opening the model is what costs."""

    def open_engine() -> AbstractAsyncContextManager[EngineFace]:
        return Engine.open(DEMO, SMALL)

    async def visit(address: str, engine: EngineFace) -> None:
        async with (
            DefaultAsyncHttpxClient(trust_env=False) as http,
            AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, http_client=http) as client,
        ):
            await respond(client, engine, engine.model_name)
        async with (
            anthropic.DefaultAsyncHttpxClient(trust_env=False) as http,
            AsyncAnthropic(base_url=address, api_key="any", max_retries=0, http_client=http) as client,
        ):
            await converse(client, engine.model_name)
        await end_anywhere(address, engine, leaves=False)
        await end_anywhere(address, engine, leaves=True)
        await end_while_reading(address, engine)
        await ask_for_too_much(address)
        await two_turns_at_once(address)

    await serve(open_engine, ServerConfig(port=0), visit)
