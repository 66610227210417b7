"""Forms over HTTP with the official clients, by a random model that would write rubbish: every door leads to the same constraint."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from engine.config import ServerConfig
from engine.engine import Engine
from engine.service import Service
from server import listening
from tests.engine.grammar.random_model import random_model
from tests.engine.runs import small

LOW_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Trip(BaseModel):
    """What the client asks for by a type of its own."""

    city: Literal["Bern", "Zürich"]
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture
async def address(model: Path) -> AsyncIterator[str]:
    async with Engine.open(model, small()) as engine:
        service = Service(ServerConfig(port=0))
        service.opened(engine)
        async with listening(service) as address:
            yield address


def of_openai(address: str) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, http_client=http)


def of_anthropic(address: str) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    return anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0, http_client=http)


@pytest.mark.slow
async def test_a_chat_is_parsed_into_the_clients_own_type(address: str) -> None:
    """openai's `parse` sends its strict schema and gets an object of its type, whole and as a stream."""
    async with of_openai(address) as client:
        asked: dict[str, Any] = {"model": "random", "messages": [{"role": "user", "content": "plan"}], "max_tokens": 200, "seed": 3}
        done = await client.chat.completions.parse(**asked, response_format=Trip, extra_body=LOW_THOUGHT)
        assert done.choices[0].message.parsed is not None
        async with client.chat.completions.stream(**asked, response_format=Trip, extra_body=LOW_THOUGHT) as stream:
            streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == done.choices[0].message.parsed
    assert done.choices[0].finish_reason == "stop"


@pytest.mark.slow
async def test_a_forced_call_comes_in_each_clients_own_shape(address: str) -> None:
    """`required`, a response's named function and a message's `any` all end in a call whose arguments are of the schema."""
    function = {"name": "book", "description": "books", "parameters": PLACE}
    async with of_openai(address) as client:
        chat = await client.chat.completions.create(
            model="random", messages=[{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}],
            tool_choice="required", parallel_tool_calls=False, max_tokens=200, seed=1, extra_body=LOW_THOUGHT,
        )  # type: ignore[call-overload]  # fmt: skip
        (call,) = chat.choices[0].message.tool_calls
        assert chat.choices[0].finish_reason == "tool_calls"
        response = await client.responses.create(
            model="random", input="x", tools=[{"type": "function", **function}], tool_choice={"type": "function", "name": "book"},
            parallel_tool_calls=False, max_output_tokens=200, extra_body=LOW_THOUGHT,
        )  # type: ignore[call-overload]  # fmt: skip
        (item,) = (each for each in response.output if each.type == "function_call")
    async with of_anthropic(address) as messages:
        message = await messages.messages.create(
            model="random", messages=[{"role": "user", "content": "x"}], max_tokens=200, thinking={"type": "disabled"},
            tools=[{"name": "book", "input_schema": PLACE}], tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )  # type: ignore[call-overload]  # fmt: skip
    (block,) = (each for each in message.content if each.type == "tool_use")
    for arguments in (json.loads(call.function.arguments), json.loads(item.arguments), block.input):
        Trip.model_validate(arguments)
    assert message.stop_reason == "tool_use"


async def test_what_is_no_form_is_one_line_and_400(address: str) -> None:
    """An expression that is none is refused with the field and the reason, and the next request is served."""
    async with aiohttp.ClientSession(address) as client:
        async with client.post("/v1/completions", json={"prompt": "x", "guided_regex": "(("}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert (error["param"], error["type"]) == ("guided_regex", "invalid_request_error")
        assert "unclosed group" in error["message"]
        async with client.post("/v1/completions", json={"prompt": "x", "guided_choice": ["ok"]}) as response:
            assert (await response.json())["choices"][0]["text"] == "ok"
