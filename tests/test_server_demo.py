"""The server in front of the real engine and the packaged model, driven by the `openai` package."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from structlog.testing import capture_logs

from engine import Engine, EngineConfig, Sampling
from engine.config import ServerConfig
from engine.protocol import EngineFace
from engine.settings import resolve
from server import serve

DEMO = resolve({"demo": "true"}, {}).model_directory()
SMALL = EngineConfig(hot_rows=256, host_memory_bytes=64 * 2**20, context_max=2_048)
PROMPT = "import os\n\n\ndef main(argv):\n"


async def library_text(engine: EngineFace, prompt: str, tokens: int) -> str:
    """What the library gives for the same prompt, greedily."""
    async with engine.generate(prompt, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)) as generation:
        return "".join([chunk.text async for chunk in generation])


async def converse(client: AsyncOpenAI, engine: EngineFace) -> None:
    """Everything a client may do, in one visit: opening the model is what costs."""
    greedy = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    model = (await client.models.list()).data[0].id
    whole = await client.completions.create(model=model, prompt=PROMPT, max_tokens=6, **greedy)  # type: ignore[call-overload]
    assert whole.choices[0].text == await library_text(engine, PROMPT, 6)
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].token_ids) == whole.usage.completion_tokens == 6

    by_id = await client.completions.create(model=model, prompt=whole.choices[0].prompt_token_ids, max_tokens=6, **greedy)  # type: ignore[call-overload]
    assert by_id.choices[0].text == whole.choices[0].text

    options = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}, **greedy}
    stream = await client.completions.create(model=model, prompt=PROMPT, **options)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage

    chat = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3, logprobs=True, top_logprobs=2, seed=3
    )
    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert 1 <= len(tokens) <= 3
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)

    await talk(client, model)
    await leave_early(client, engine, model)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=model, prompt=[10**6])
    assert caught.value.param == "prompt"


async def talk(client: AsyncOpenAI, model: str) -> None:
    """A question in several choices: reasoning and content apart, streamed as whole; a bias that leaves no choice; an echo."""
    asked: Any = {
        "model": model, "messages": [{"role": "user", "content": "What does bisect do?"}], "temperature": 0, "max_completion_tokens": 40
    }  # fmt: skip
    whole = await client.chat.completions.create(n=2, **asked)
    texts = [(choice.message.content, (choice.message.model_extra or {}).get("reasoning_content", "")) for choice in whole.choices]
    assert texts[0] == texts[1]
    assert texts[0][0]
    assert "</think>" not in "".join(texts[0])
    parts = ["", ""]
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        delta = chunk.choices[0].delta
        parts[0] += delta.content or ""
        parts[1] += (delta.model_extra or {}).get("reasoning_content", "")
    assert tuple(parts) == texts[0]
    off = await client.chat.completions.create(extra_body={"chat_template_kwargs": {"enable_thinking": False}}, **asked)
    assert "reasoning_content" not in (off.choices[0].message.model_extra or {})
    forced = await client.completions.create(
        model=model, prompt="x", max_tokens=3, logit_bias={"97": 100}, temperature=0, echo=True, extra_body={"return_token_ids": True}
    )
    assert forced.choices[0].token_ids == [97] * 3  # type: ignore[attr-defined]
    assert forced.choices[0].text.startswith("x")


async def leave_early(client: AsyncOpenAI, engine: EngineFace, model: str) -> None:
    """A client that leaves after one token: its generation ends long before its 1,500 tokens, and nothing of it stays."""
    with capture_logs() as logs:
        stream = await client.completions.create(model=model, prompt=PROMPT, max_tokens=1_500, stream=True, extra_body={"ignore_eos": True})
        async for _ in stream:
            break
        await stream.close()
        while engine.statistics().running or not logs:  # noqa: ASYNC110 - one look a turn of the loop
            await asyncio.sleep(0)
    line = next(line for line in logs if line["event"] == "request.finished")
    assert line["finish_reason"] == "abort"
    assert 1 <= line["completion_tokens"] < 100
    assert engine.statistics().sessions == 0


async def test_the_openai_package_drives_the_real_engine() -> None:
    """Completions, streams, chat, logprobs, an abort and an error behave over HTTP as the library does, and the server ends cleanly."""

    def open_engine() -> AbstractAsyncContextManager[EngineFace]:
        return Engine.open(DEMO, SMALL)

    async def visit(address: str, engine: EngineFace) -> None:
        async with (
            DefaultAsyncHttpxClient(trust_env=False) as http,
            AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, http_client=http) as client,
        ):
            await converse(client, engine)

    await serve(open_engine, ServerConfig(port=0), visit)
