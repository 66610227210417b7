"""Chat that agents use, through the `openai` package: reasoning, tool calls, choices, and the edges of streams."""

import json
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from engine.api import AnswerHead, parse_chat
from engine.api.dialects import CHAT
from engine.choices import Choices
from engine.chunk import Chunk, Usage
from engine.config import ServerConfig
from engine.errors import BadRequest, SessionBroken
from engine.generating import events
from engine.request_record import RequestRecord
from engine.sampling import Sampling
from engine.service import Service
from server import listening
from tests.fake_engine import FakeEngine, FakeTemplate, Item, words
from tests.test_server_openai import client_of

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "count", "parameters": {"properties": {"to": {"type": "integer"}}}}},
]
READ = "<tool_call>read<arg_key>path</arg_key><arg_value>dir/é🙂.py</arg_value></tool_call>"
COUNT = "<tool_call>count<arg_key>to</arg_key><arg_value>3</arg_value></tool_call>"
THINKING = tuple(b"<think>")  # the tokenizer's ids are bytes


def thinking(*scripts: Any) -> FakeEngine:
    """An engine whose prompts end inside the reasoning."""
    return FakeEngine(list(scripts), prompt_ids=THINKING)


async def put_together(stream: Any) -> dict[str, Any]:
    """A stream as its reader sees it in the end."""
    whole: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}, "finish": None}
    async for chunk in stream:
        for choice in chunk.choices:
            whole["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
            whole["content"] += choice.delta.content or ""
            whole["finish"] = choice.finish_reason or whole["finish"]
            for call in choice.delta.tool_calls or ():
                entry = whole["calls"].setdefault(call.index, [call.id, call.function.name, ""])
                entry[2] += call.function.arguments
    return whole


async def test_reasoning_and_calls_are_the_packages_own() -> None:
    """Reasoning, content and calls arrive in the package's fields, and the engine got messages and tools for its template."""
    engine = thinking(words("hm", "m</thi", "nk>Let me see.", READ[:20], READ[20:] + COUNT))
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, reasoning_effort="medium")
    (choice,) = answer.choices
    assert choice.message.model_extra == {"reasoning_content": "hmm"}
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    calls: Any = choice.message.tool_calls
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "read", {"path": "dir/é🙂.py"}), ("function", "count", {"to": 3}),
    ]  # fmt: skip
    assert calls[0].id != calls[1].id
    assert engine.calls[0].arguments == {"tools": TOOLS, "reasoning_effort": "high"}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_stream_of_any_chunks_says_the_same(size: int) -> None:
    """Streamed in chunks of any size, with usage, the parts come to the same whole."""
    text = f"hm</think>a{READ}\n{COUNT}"
    engine = thinking(words(*(text[start : start + size] for start in range(0, len(text), size))))
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )  # fmt: skip
        whole = await put_together(stream)
    assert (whole["reasoning"], whole["content"], whole["finish"]) == ("hm", "a", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in whole["calls"].values()] == [
        ("read", {"path": "dir/é🙂.py"}), ("count", {"to": 3}),
    ]  # fmt: skip
    assert all(call_id.startswith("call_") for call_id, _, _ in whole["calls"].values())


async def test_the_packages_stream_accumulator_takes_it() -> None:
    """The package's own accumulator of streams ends with the parsed calls."""
    async with (
        client_of(thinking(words("x</think>", READ, COUNT))) as client,
        client.chat.completions.stream(model="fake", messages=MESSAGES, tools=TOOLS) as stream,
    ):
        final = await stream.get_final_completion()
    assert [json.loads(call.function.arguments) for call in final.choices[0].message.tool_calls or ()] == [
        {"path": "dir/é🙂.py"},
        {"to": 3},
    ]


async def test_the_next_turn_of_an_agent() -> None:
    """What an agent sends back (its calls, null content, the tools' answers in parts) reaches the template with objects for arguments."""
    engine = FakeEngine([words("done")])
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "é"}'}}
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with client_of(engine) as client:
        await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    sent: Any = engine.calls[0].prompt
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["tool_calls"][0]["function"] == {"name": "read", "arguments": {"path": "é"}}
    assert (sent[2]["content"], sent[2]["reasoning_content"], sent[3]["content"]) == ("", "hm", "ab")


@pytest.mark.parametrize("streamed", [True, False])
async def test_without_parallel_calls_the_turn_ends_with_one(streamed: bool) -> None:
    """The generation is left after the first call: nothing of a second one comes, and the engine does not go on."""
    engine = FakeEngine([words(READ, COUNT, "never")])
    async with client_of(engine) as client:
        asked: Any = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
        if streamed:
            whole = await put_together(await client.chat.completions.create(stream=True, **asked))
            assert ([name for _, name, _ in whole["calls"].values()], whole["finish"]) == (["read"], "tool_calls")
        else:
            answer = await client.chat.completions.create(**asked)
            assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["read"]
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("tool_calls", 1)
    assert (engine.aborted, engine.generations[0].produced) == (1, 1)


async def test_a_session_moves_on_by_a_turn_that_was_left() -> None:
    """The revision is told with the end that the call made."""
    engine = FakeEngine([words(READ, "never")])
    await engine.create_session()
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False, extra_body={"session": {"id": "s0"}}
        )
    assert answer.model_extra == {"session": {"id": "s0", "revision": 4}}


async def test_a_turn_is_left_before_its_end_is_told() -> None:
    """Whoever hears of the end may ask for the next turn at once: the generation is closed by then. The log calls it a stop."""
    engine, record = FakeEngine([words(READ, "never")]), RequestRecord("r")
    asked = parse_chat(json.dumps({"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "stream": True}).encode())
    head = AnswerHead(id="x", model="fake", created=1)
    async with Choices(engine.generate, "hi", [Sampling()]) as choices:
        first = await anext(choices)
        parts = events(CHAT.writer(asked, head, 1), first, choices, record)
        assert b'"tool_calls"' in await anext(parts)
        assert engine.generations[0].closed.is_set()
        assert [part async for part in parts] == [b"data: [DONE]\n\n"]
    assert record.finish_reason == "stop"


@pytest.mark.parametrize(
    ("texts", "finish", "reasoning", "content"),
    [
        (("still ", "thinking"), "length", "still thinking", ""),  # the cap inside the reasoning
        (("still ", "thinking </th"), "stop", "still thinking </th", ""),  # a stop id inside it
        (("a</think>", "b<tool_call>re"), "length", "a", "b<tool_call>re"),  # the cap inside a call's name
    ],
)
async def test_turns_that_break_off(texts: tuple[str, ...], finish: Any, reasoning: str, content: str) -> None:
    """A turn that ends in the middle of something has what came of it, and says how it ended."""
    async with client_of(thinking(words(*texts, finish=finish))) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, stream=True)
        assert await put_together(stream) == {"reasoning": reasoning, "content": content, "calls": {}, "finish": finish}
    message = answer.choices[0].message
    assert ((message.model_extra or {})["reasoning_content"], message.content) == (reasoning, content)
    assert answer.choices[0].finish_reason == finish


async def test_a_call_that_the_cap_cuts_is_no_whole_json() -> None:
    """What came of the call is there, and no reader can take it for the whole."""
    async with client_of(FakeEngine([words(READ[:60], finish="length")])) as client:
        answer: Any = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("read", "length")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


async def test_an_error_amid_a_call_ends_the_stream_with_an_error() -> None:
    """The package raises our error; what was streamed of the call before it stays a part."""
    script: list[Item] = [words(READ[:60], "x")[0], SessionBroken("layer 2 is not finite")]
    async with client_of(FakeEngine([script])) as client:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, stream=True)
        with pytest.raises(openai.APIError, match="layer 2 is not finite"):
            await put_together(stream)


async def choices_of(client: AsyncOpenAI, endpoint: str, **fields: Any) -> Any:
    if endpoint == "chat":
        return await client.chat.completions.create(model="fake", messages=MESSAGES, **fields)
    return await client.completions.create(model="fake", prompt="x", **fields)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_several_choices(endpoint: str) -> None:
    """n choices come with their indices, seeds that count up, and a prompt that counts once; streamed, each is whole."""
    scripts = [words("a", "b"), words("c"), words("d", "e", "f")]
    async with client_of(FakeEngine(list(scripts))) as client:
        engine = FakeEngine(list(scripts))
        answer = await choices_of(client, endpoint, n=3, seed=5)
    texts = [choice.message.content if endpoint == "chat" else choice.text for choice in answer.choices]
    assert ([choice.index for choice in answer.choices], texts) == ([0, 1, 2], ["ab", "c", "def"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    async with client_of(engine) as client:
        stream = await choices_of(client, endpoint, n=3, stream=True, seed=5)
        got, ends, roles = ["", "", ""], {}, []
        async for chunk in stream:
            (choice,) = chunk.choices
            assert choice.index not in ends
            got[choice.index] += (choice.delta.content if endpoint == "chat" else choice.text) or ""
            if endpoint == "chat" and choice.delta.role:
                roles.append(choice.index)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert (got, ends) == (["ab", "c", "def"], dict.fromkeys(range(3), "stop"))
    assert endpoint != "chat" or sorted(roles) == [0, 1, 2]
    assert [call.sampling.seed for call in engine.calls] == [5, 6, 7]


async def test_echo_repeats_the_prompt() -> None:
    """A completion begins with its prompt's text, also that of token ids, once a choice."""
    engine = FakeEngine([words("b", "c")])
    async with client_of(engine) as client:
        whole = await client.completions.create(model="fake", prompt="a", echo=True, n=2)
        by_id = await client.completions.create(model="fake", prompt=[0x78, 0xE9], echo=True)
        stream = await client.completions.create(model="fake", prompt="a", echo=True, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert ([choice.text for choice in whole.choices], by_id.choices[0].text, pieces) == (["abc", "abc"], "xébc", ["ab", "c"])
        engine.tokenizer.available = False
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            await client.completions.create(model="fake", prompt=[1], echo=True)


async def test_what_is_not_served_says_so() -> None:
    """Forms that are none, best_of and embeddings are each refused in a line that names the field."""
    async with client_of(FakeEngine([words("x")])) as client:
        refusals: list[dict[str, Any]] = [
            {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ]  # fmt: skip
        for fields in refusals:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, **fields)
            assert caught.value.param == next(iter(fields))
        with pytest.raises(openai.BadRequestError, match="best_of is not served"):
            await client.completions.create(model="fake", prompt="x", best_of=3)
        with pytest.raises(openai.NotFoundError, match="embeddings are not served"):
            await client.embeddings.create(model="fake", input="x")


async def test_reasoning_that_the_template_cannot_switch_off() -> None:
    """A template without the switch refuses it; one that has it gets it."""
    engine = FakeEngine([words("x")])
    off: Any = {"model": "fake", "messages": MESSAGES, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    async with client_of(engine) as client:
        await client.chat.completions.create(**off)
        assert engine.calls[0].arguments == {"enable_thinking": False}
        engine.template = FakeTemplate()
        engine.template.variables = frozenset({"messages", "reasoning_effort"})
        with pytest.raises(openai.BadRequestError, match="cannot be switched off"):
            await client.chat.completions.create(**off)
    assert len(engine.calls) == 1


async def test_a_template_that_raises() -> None:
    """A template's own refusal is a bad request before anything was streamed."""
    async with client_of(FakeEngine([[BadRequest("messages: the chat template refused them: no such role", field="messages")]])) as client:
        with pytest.raises(openai.BadRequestError, match="refused them") as caught:
            await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    assert caught.value.param == "messages"


async def test_characters_split_across_chunks() -> None:
    """Chunks whose text lags behind their tokens, as half a character makes it, change nothing of reasoning and calls."""
    texts = ["h", "", "é</think>", "", READ[:45], "", READ[45:]]
    chunks = [Chunk(text, (place,), Usage(3, place + 1)) for place, text in enumerate(texts)]
    chunks.append(Chunk("", (9,), Usage(3, 8), finish_reason="stop", stop_reason=154829))
    async with client_of(thinking(chunks)) as client:
        whole = await put_together(await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, stream=True))
    assert (whole["reasoning"], whole["finish"]) == ("hé", "tool_calls")
    assert json.loads(whole["calls"][0][2]) == {"path": "dir/é🙂.py"}


async def test_tokenize_counts_the_tools() -> None:
    """/tokenize renders the tools with the messages, so that its count is the prompt's."""
    engine = FakeEngine([words("x")])
    seen: list[Any] = []

    class Telling(FakeTemplate):
        def render(self, messages: Any, /, tools: Any = None, add_generation_prompt: bool = True, **arguments: Any) -> str:
            seen.append(tools)
            return "four"

    engine.template = Telling()
    service = Service(ServerConfig(port=0))
    service.engine = engine
    async with (
        listening(service) as address,
        aiohttp.ClientSession() as client,
        client.post(f"{address}/tokenize", json={"messages": MESSAGES, "tools": TOOLS}) as response,
    ):
        assert (await response.json())["count"] == 4
    assert seen == [TOOLS]
