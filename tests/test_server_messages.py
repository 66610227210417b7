"""/v1/messages through the `anthropic` package: text, thinking and tools, whole and as events; its errors, keys and counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from engine.chunk import Chunk, Usage
from engine.config import ServerConfig
from engine.errors import NotAdmitted, SessionBroken, TooLong
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, FakeTemplate, Item, words
from tests.test_server_chat import COUNT, READ, thinking

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"name": "read", "description": "reads", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}},
    {
        "name": "count",
        "input_schema": {"type": "object", "properties": {"to": {"type": "integer"}}},
        "cache_control": {"type": "ephemeral"},
    },
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "read", "description": "reads", "parameters": TOOLS[0]["input_schema"]}},
    {"type": "function", "function": {"name": "count", "parameters": TOOLS[1]["input_schema"]}},
]
TURN = f"hm</think>Let me see.{READ}\n{COUNT}"
ASKED: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 50}


@asynccontextmanager
async def client_of(engine: FakeEngine, *, key: str | None = None, **settings: Any) -> AsyncIterator[AsyncAnthropic]:
    service = Service(ServerConfig(port=0, api_key=key))
    service.engine = engine
    credentials = settings or {"api_key": "any"}
    async with (
        listening(service) as address,
        DefaultAsyncHttpxClient(trust_env=False) as http,
        AsyncAnthropic(base_url=address, max_retries=0, http_client=http, **credentials) as client,
    ):
        yield client


def plain(blocks: Any) -> list[dict[str, Any]]:
    """Blocks as JSON, without ids and what the package adds."""
    kept = ("type", "text", "thinking", "name", "input")
    return [{name: value for name, value in block.to_dict().items() if name in kept} for block in blocks]


WHOLE = [
    {"type": "thinking", "thinking": "hm"},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "name": "read", "input": {"path": "dir/é🙂.py"}},
    {"type": "tool_use", "name": "count", "input": {"to": 3}},
]


async def test_text_is_the_packages_own() -> None:
    """A message has its text, its stop reason and counts, cached tokens apart; system texts come first."""
    engine = FakeEngine([[Chunk("Hel", (1,), Usage(3, 1, 2)), Chunk("lo", (2,), Usage(3, 2, 2), finish_reason="stop")]])
    async with client_of(engine) as client:
        message = await client.messages.create(
            **ASKED, system=[{"type": "text", "text": "be "}, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
            stop_sequences=["END"], metadata={"user_id": "u"}, extra_body={"temperature": 0.5},
        )  # fmt: skip
    assert plain(message.content) == [{"type": "text", "text": "Hello"}]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 2, 2)
    assert list(engine.calls[0].prompt) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    sampling = engine.calls[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop) == (50, 0.5, ("END",))


@pytest.mark.parametrize("size", [1, 1000])
async def test_whole_and_streamed_say_the_same(size: int) -> None:
    """Thinking, text and calls are blocks in their order, whole and put together by the package from events of chunks of any size."""
    engine = thinking(words(*(TURN[start : start + size] for start in range(0, len(TURN), size))))
    asked = {**ASKED, "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with client_of(engine) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        raw = [event async for event in await client.messages.create(**asked, stream=True)]
    assert plain(whole.content) == plain(final.content) == WHOLE
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
    assert all(block.signature for block in (whole.content[0], final.content[0]) if block.type == "thinking")
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert len(set(ids)) == 2
    assert (raw[0].type, raw[-2].type, raw[-1].type) == ("message_start", "message_delta", "message_stop")
    open_block = -1
    for event in raw[1:-2]:
        index = getattr(event, "index", None)
        if event.type == "content_block_start":
            assert index == open_block + 1
            open_block = index
        assert index == open_block
    assert engine.calls[0].arguments == {"tools": CHAT_TOOLS, "enable_thinking": True}


async def test_the_next_turn_of_an_agent() -> None:
    """Blocks that came, sent back with the tools' results, are one assistant's turn and messages of the tools, text behind them."""
    engine = thinking(words("hm</think>I look.", READ), words("x</think>done"))
    async with client_of(engine) as client:
        first = await client.messages.create(**ASKED, tools=TOOLS)
        call: Any = first.content[-1]
        results: Any = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "tool_result", "tool_use_id": "other", "content": "failed", "is_error": True},
            {"type": "text", "text": "and now?"},
        ]
        sent: Any = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await client.messages.create(**{**ASKED, "messages": sent}, tools=TOOLS)
    assert plain(second.content)[-1] == {"type": "text", "text": "done"}
    prompt: Any = engine.calls[1].prompt
    assert [message["role"] for message in prompt] == ["user", "assistant", "tool", "tool", "user"]
    assert (prompt[1]["reasoning_content"], prompt[1]["content"]) == ("hm", "I look.")
    assert prompt[1]["tool_calls"][0]["function"] == {"name": "read", "arguments": {"path": "dir/é🙂.py"}}
    assert [(message.get("tool_call_id"), message["content"]) for message in prompt[2:]] == [
        (call.id, "ab"), ("other", "failed"), (None, "and now?"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [
        (words("cut", finish="length"), "max_tokens", None),
        ([Chunk("stopped", (1,), Usage(1, 1), finish_reason="stop", stop_reason="END")], "stop_sequence", "END"),
        ([Chunk("ended", (1,), Usage(1, 1), finish_reason="stop", stop_reason=154829)], "end_turn", None),
    ],
)
async def test_how_it_ended(script: list[Item], reason: str, sequence: str | None) -> None:
    """The length, a stop text and the model's own end have their reasons, whole and streamed."""
    async with client_of(FakeEngine([script])) as client:
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_a_call_that_breaks_off_is_not_taken_for_the_command() -> None:
    """Its text so far is under a name that no tool has, and the reason says that it was cut."""
    async with client_of(FakeEngine([words(READ[:60], finish="length")])) as client:
        message = await client.messages.create(**ASKED, tools=TOOLS)
    (block,) = plain(message.content)
    assert (block["name"], list(block["input"]), message.stop_reason) == ("read", ["arguments"], "max_tokens")


@pytest.mark.parametrize(("finish", "stop", "reason"), [("length", None, "max_tokens"), ("stop", "END", "stop_sequence")])
async def test_the_one_call_of_a_turn_that_breaks_off_is_no_tool_use(finish: Any, stop: Any, reason: str) -> None:
    """Where parallel calls are off, too, the reason says what cut the call, whole and as events."""
    script: list[Item] = [Chunk(READ[:60], (1,), Usage(1, 1)), Chunk(READ[60:64], (2,), Usage(1, 2), (), finish, stop)]
    asked: Any = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    async with client_of(FakeEngine([script])) as client:
        message = await client.messages.create(**asked)
        reasons = [
            event.delta.stop_reason async for event in await client.messages.create(**asked, stream=True) if event.type == "message_delta"
        ]
    assert (message.stop_reason, message.stop_sequence, reasons) == (reason, stop, [reason])


async def test_thinking_that_cannot_be_switched_off_is_little() -> None:
    """Disabled thinking reaches a template that has the switch; for another it is the lowest effort, and no refusal."""
    engine = FakeEngine([words("x")])
    async with client_of(engine) as client:
        await client.messages.create(**ASKED, thinking={"type": "disabled"})
        engine.template = FakeTemplate()
        engine.template.variables = frozenset({"messages", "reasoning_effort"})
        await client.messages.create(**ASKED, thinking={"type": "disabled"})
        await client.messages.create(**ASKED, thinking={"type": "adaptive"}, output_config={"effort": "high"})
    wanted = [{"enable_thinking": False}, {"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "high"}]
    assert [call.arguments for call in engine.calls] == wanted


async def test_tools_are_chosen_as_far_as_they_can_be() -> None:
    """none hides the tools, auto shows them, and one call at a time ends the turn with the first."""
    engine = FakeEngine([words(READ, COUNT, "never")])
    async with client_of(engine) as client:
        await client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "none"})
        message = await client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [call.arguments for call in engine.calls] == [{}, {"tools": CHAT_TOOLS}]
    assert ([block["name"] for block in plain(message.content)], message.stop_reason) == (["read"], "tool_use")


async def test_tokens_are_counted() -> None:
    """A count is that of the rendered prompt, system and all."""
    async with client_of(FakeEngine([words("x")])) as client:
        count = await client.messages.count_tokens(model="fake", messages=MESSAGES, system="be brief", tools=TOOLS)
    assert count.input_tokens == len("<system>be brief<user>hi<assistant>")


async def test_what_a_coding_agent_sends() -> None:
    """A body with all that agents put beside the conversation (caching, edits of the context, user ids, betas) is served."""
    engine = FakeEngine([words("done")])
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "fake", "max_tokens": 2_000, "temperature": 1, "stream": False, "service_tier": "auto",
        "metadata": {"user_id": "user_0_account__session_1"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [{"type": "text", "text": "You are an agent.", **cached}, {"type": "text", "text": " Be brief.", **cached}],
        "tools": [
            {
                "name": "Read", "description": "reads", "eager_input_streaming": True, **cached,
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
                    "properties": {"file_path": {"type": "string"}}, "required": ["file_path"],
                },
            }
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x"}, {"type": "text", "text": "hi", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "forebay"}, {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a"}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "1", "is_error": False, **cached}]},
        ],
    }  # fmt: skip
    async with client_of(engine) as client:
        raw = await client.post("/v1/messages?beta=true", body=body, cast_to=object, options={"headers": {"anthropic-beta": "a,b"}})
    assert raw["stop_reason"] == "end_turn"  # type: ignore[index]
    tools: Any = body["tools"]
    function = {"name": "Read", "description": "reads", "parameters": tools[0]["input_schema"]}
    assert engine.calls[0].arguments == {
        "enable_thinking": True, "reasoning_effort": "high", "tools": [{"type": "function", "function": function}]
    }  # fmt: skip
    assert [message["role"] for message in engine.calls[0].prompt] == ["system", "user", "assistant", "tool"]  # type: ignore[index,call-overload,union-attr]


async def test_models_are_listed() -> None:
    """The one model is in the package's own list, and can be retrieved by its name."""
    async with client_of(FakeEngine([words("x")])) as client:
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.type) for model in listed] == [("fake", "model")]
        assert (await client.models.retrieve("fake")).created_at == listed[0].created_at
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("claude")


@pytest.mark.parametrize("credentials", [{"api_key": "right"}, {"auth_token": "right"}], ids=["x-api-key", "bearer"])
async def test_keys_in_both_headers(credentials: dict[str, str]) -> None:
    """The package's own header and the bearer are both taken; a wrong key in either is its AuthenticationError."""
    (name,) = credentials
    async with client_of(FakeEngine([words("x")]), key="right", **credentials) as client:
        assert (await client.messages.create(**ASKED)).stop_reason == "end_turn"
    async with client_of(FakeEngine([words("x")]), key="right", **{name: "wrong"}) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASKED)


ERRORS: list[tuple[Exception, int, str, str]] = [
    (TooLong("prompt has 9 tokens", field="prompt"), 400, "invalid_request_error", "prompt is too long: prompt has 9 tokens"),
    (NotAdmitted("the queue is full", retry_after_s=1.2), 429, "rate_limit_error", "the queue is full"),
    (NotAdmitted("does not fit"), 503, "overloaded_error", "does not fit"),
    (RuntimeError("secret"), 500, "api_error", "internal error: see the server's log"),
]


async def test_errors_have_anthropics_shape() -> None:
    """Refusals before an answer have their status and type, and one amid a stream ends it with an error event that the package raises."""
    engine = FakeEngine([[error] for error, *_ in ERRORS])
    async with client_of(engine) as client:
        for _, status, kind, said in ERRORS:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(**ASKED)
            body: Any = caught.value.body
            assert (caught.value.status_code, body["error"], body["type"]) == (status, {"type": kind, "message": said}, "error")
            assert body["request_id"] == caught.value.response.headers["X-Request-Id"]
        engine.scripts = [[words("a", "b")[0], SessionBroken("layer 2 is not finite")], words("left", finish="abort")]
        for said in ("layer 2 is not finite", "was ended before"):
            stream = await client.messages.create(**ASKED, stream=True)
            with pytest.raises(anthropic.APIStatusError, match=said):
                [event async for event in stream]
        with pytest.raises(anthropic.APIStatusError) as ended:
            await client.messages.create(**ASKED)
        assert ended.value.status_code == 499
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**ASKED, "model": "claude"})
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": "begin"}]}, "end with the user's"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0]: blocks of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"extra_body": {"temperature": -1}}, "temperature"),
    ({"stop_sequences": ["x"] * 1000}, "stop_sequences holds 1000"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: tools of type 'web_search_20250305'"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].function.name"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": 5}, "thinking"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
    ({"extra_body": {"container": "x"}}, "container"),
    ({"extra_body": {"n": 2}}, "n must be 1"),
]


async def test_what_cannot_be_served_is_refused_by_name() -> None:
    """Each is a 400 in one line that names it, and the engine does not hear of it."""
    engine = FakeEngine([words("x")])
    async with client_of(engine) as client:
        for fields, said in REFUSED:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**{**ASKED, **fields})
            assert said in caught.value.body["error"]["message"], fields  # type: ignore[index,call-overload]
    assert not engine.calls


async def test_leaving_a_stream_aborts_the_generation() -> None:
    """Closing the stream after its first text closes the generation."""
    engine = FakeEngine([[words("a", "b")[0], asyncio.Event()]])
    async with client_of(engine) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        await engine.generations[0].closed.wait()
    assert engine.aborted == 1
