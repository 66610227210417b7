"""Chat clients send the whole conversation each time: what of it costs nothing when the template writes the last answer otherwise."""

import json
from contextlib import AbstractAsyncContextManager
from itertools import takewhile
from typing import Any

import aiohttp
import pytest

from engine import Engine, EngineConfig
from engine.config import ServerConfig
from engine.protocol import EngineFace
from engine.settings import resolve
from server import serve

DEMO = resolve({"demo": "true"}, {}).model_directory()
CONFIG = EngineConfig(hot_rows=256, host_memory_bytes=64 * 2**20, context_max=2_048, prefix_cache="on")
SYSTEM = "Write Python. " + "Names are whole words; every function has a docstring; no line is longer than it must be. " * 2
THINK_END = next(
    token["id"] for token in json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"] if token["content"] == "</think>"
)


async def said(
    client: aiohttp.ClientSession, messages: list[dict[str, str]], tokens: int
) -> tuple[dict[str, str], list[int], list[int], int]:
    """The answer's message, the prompt's token ids, the answer's, and how many of the prompt were cached. The model thinks to the end."""
    asked = {
        "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "logit_bias": {str(THINK_END): -100},
    }  # fmt: skip
    async with client.post("/v1/chat/completions", json=asked) as response:
        answer: dict[str, Any] = await response.json()
    assert response.status == 200, answer
    choice, usage = answer["choices"][0], answer["usage"]
    assert usage["prompt_tokens"] == len(answer["prompt_token_ids"])
    return choice["message"], answer["prompt_token_ids"], choice["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


async def second_turn(client: aiohttp.ClientSession, tokens: int, *, with_reasoning: bool) -> tuple[int, int, int]:
    """A conversation that nobody has had, up to its second turn.

    Returns: tokens of the first prompt; those that the second prompt has in common with all that had rows; those said to be cached.
    """
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"import os  # {tokens} {with_reasoning}"}]
    message, prompt, sampled, _ = await said(client, messages, tokens)
    assert message["reasoning_content"], "the answer begins behind <think>"
    answer = {"role": "assistant", "content": message["content"] or ""}
    if with_reasoning:
        answer["reasoning_content"] = message["reasoning_content"]
    _, asked, _, cached = await said(client, [*messages, answer, {"role": "user", "content": "import sys"}], 1)
    rows = [*prompt, *sampled][:-1]  # the last token sampled has none
    return len(prompt), sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(rows, asked, strict=False))), cached


@pytest.mark.slow
async def test_cached_tokens_end_where_the_template_rewrites_an_answer() -> None:
    """An answer sent back without its reasoning is not the answer that has rows: all up to `<think>` is cached; with it, all of it."""

    def open_engine() -> AbstractAsyncContextManager[EngineFace]:
        return Engine.open(DEMO, CONFIG)

    async def visit(address: str, engine: EngineFace) -> None:
        async with aiohttp.ClientSession(base_url=address) as client:
            for tokens in (24, 80):  # a tail that is cut, and one that a fork leaves
                prompt, common, cached = await second_turn(client, tokens, with_reasoning=False)
                assert common == prompt, "the template closes the empty reasoning right behind <think>"
                assert common - 2 <= cached <= common
                prompt, common, cached = await second_turn(client, tokens, with_reasoning=True)
                assert prompt + tokens // 2 < common
                assert common - 2 <= cached <= common

    await serve(open_engine, ServerConfig(port=0), visit)
