"""/v1/responses through the `openai` package: text, reasoning and calls, whole and as events; responses that are kept and gone on from."""

import asyncio
import json
from typing import Any

import openai
import pytest

from engine.chunk import Chunk, Usage
from engine.errors import SessionBroken, TooLong
from tests.fake_engine import FakeEngine, Item, words
from tests.test_server_chat import COUNT, READ, THINKING, thinking
from tests.test_server_openai import client_of

TOOLS: Any = [
    {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, "strict": False},
    {"type": "function", "name": "count", "parameters": {"properties": {"to": {"type": "integer"}}}},
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": TOOLS[0]["parameters"], "strict": False}},
    {"type": "function", "function": {"name": "count", "parameters": TOOLS[1]["parameters"]}},
]
TURN = f"hm</think>Let me see.{READ}\n{COUNT}"


def pieces(text: str, size: int) -> list[Chunk]:
    return words(*(text[start : start + size] for start in range(0, len(text), size)))


def without_ids(items: Any) -> list[dict[str, Any]]:
    """Items as JSON, without what is made up anew every time and what the package's accumulator adds."""
    drop = ("id", "call_id", "parsed", "parsed_arguments")
    found = [{name: value for name, value in item.to_dict().items() if name not in drop} for item in items]
    for part in (part for item in found for part in item.get("content", ())):
        part.pop("parsed", None)
    return found


async def test_text_is_the_packages_own() -> None:
    """A text in, a text out, with the counts, and settings as they were asked for."""
    engine = FakeEngine([[Chunk("Hel", (1,), Usage(3, 1, 2)), Chunk("lo", (2,), Usage(3, 2, 2), finish_reason="stop")]])
    async with client_of(engine) as client:
        response = await client.responses.create(
            model="fake", input="hi", instructions="be brief", max_output_tokens=5, temperature=0.5, top_p=0.9, metadata={"a": "b"}
        )
    assert (response.output_text, response.status, response.error, response.incomplete_details) == ("Hello", "completed", None, None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
    assert (response.usage.input_tokens_details.cached_tokens, response.usage.output_tokens_details.reasoning_tokens) == (2, 0)
    assert (response.instructions, response.max_output_tokens, response.temperature, response.metadata) == ("be brief", 5, 0.5, {"a": "b"})
    assert list(engine.calls[0].prompt) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (engine.calls[0].sampling.max_tokens, engine.calls[0].sampling.temperature) == (5, 0.5)


async def test_reasoning_and_calls_are_items() -> None:
    """Reasoning, text and calls are items in the order they were made; functions reach the template in the chat's shape."""
    engine = thinking(words("hm</think>Let ", "me see.", READ, COUNT))
    async with client_of(engine) as client:
        response = await client.responses.create(
            model="fake", input="hi", tools=TOOLS, reasoning={"effort": "low"}, include=["reasoning.encrypted_content"]
        )
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["hm"]
    assert reasoning.encrypted_content
    assert message.type == "message"
    assert response.output_text == "Let me see."
    assert [(call.type, call.name, json.loads(call.arguments), call.status) for call in calls] == [  # type: ignore[union-attr]  # calls
        ("function_call", "read", {"path": "dir/é🙂.py"}, "completed"), ("function_call", "count", {"to": 3}, "completed"),
    ]  # fmt: skip
    assert len({item.id for item in response.output}) == 4
    assert engine.calls[0].arguments == {"tools": CHAT_TOOLS, "reasoning_effort": "low"}


@pytest.mark.parametrize("size", [1, 7])
async def test_a_stream_of_any_chunks_comes_to_the_same(size: int) -> None:
    """The package's own accumulator takes the events of chunks of any size; they are numbered, and each item is told whole in order."""
    async with client_of(thinking(pieces(TURN, size))) as client:
        async with client.responses.stream(model="fake", input="hi", tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        raw = await client.responses.create(model="fake", input="hi", tools=TOOLS, stream=True)
        plain = [event async for event in raw]
        whole = await client.responses.create(model="fake", input="hi", tools=TOOLS)
    assert without_ids(final.output) == without_ids(whole.output)
    assert [item["type"] for item in without_ids(whole.output)] == ["reasoning", "message", "function_call", "function_call"]
    assert [event.sequence_number for event in plain] == list(range(len(plain)))
    assert [event.type for event in plain[:2]] == ["response.created", "response.in_progress"]
    assert (plain[-1].type, events[-1].type) == ("response.completed", "response.completed")
    last: Any = plain[-1]
    done: Any = [event for event in plain if event.type == "response.output_item.done"]
    assert [event.item.to_dict() for event in done] == [item.to_dict() for item in last.response.output]
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    added: Any = [event.item for event in plain if event.type == "response.output_item.added"]
    assert all(not (item.arguments if item.type == "function_call" else item.content) for item in added)
    for kind, found in (("reasoning_text", "hm"), ("output_text", "Let me see.")):
        deltas: Any = [event for event in plain if event.type == f"response.{kind}.delta"]
        assert "".join(event.delta for event in deltas) == found
    arguments: Any = [event for event in plain if event.type == "response.function_call_arguments.delta"]
    for index, wanted in ((2, {"path": "dir/é🙂.py"}), (3, {"to": 3})):
        assert json.loads("".join(event.delta for event in arguments if event.output_index == index)) == wanted


async def test_an_agents_loop_sends_everything_back() -> None:
    """What a client that keeps its own history sends (items as they came, outputs of calls) is one assistant's turn and its answers."""
    engine = thinking(words("hm</think>I look.", READ), words("x</think>done"))
    async with client_of(engine) as client:
        for sealed in (False, True):
            include: Any = ["reasoning.encrypted_content"] if sealed else []
            engine.scripts = [words("hm</think>I look.", READ)]
            first = await client.responses.create(model="fake", input="hi", tools=TOOLS, store=False, include=include)
            items: Any = [item.to_dict() for item in first.output]
            if sealed:  # as clients do that never send the reasoning's own text
                del items[0]["content"]
            sent: Any = [
                {"role": "developer", "content": "be brief"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
                *items,
                {"type": "function_call_output", "call_id": items[2]["call_id"], "output": [{"type": "input_text", "text": "text"}]},
            ]
            engine.scripts = [words("x</think>done")]
            second = await client.responses.create(model="fake", input=sent, tools=TOOLS, store=False)
            assert second.output_text == "done"
            prompt: Any = engine.calls[-1].prompt
            assert [message["role"] for message in prompt] == ["system", "user", "assistant", "tool"]
            assert prompt[1]["content"] == "hi"
            assert (prompt[2]["reasoning_content"], prompt[2]["content"]) == ("hm", "I look.")
            assert prompt[2]["tool_calls"][0]["function"] == {"name": "read", "arguments": {"path": "dir/é🙂.py"}}
            assert (prompt[3]["tool_call_id"], prompt[3]["content"]) == (items[2]["call_id"], "text")


async def test_a_response_is_gone_on_from_by_its_tokens() -> None:
    """previous_response_id continues the very tokens, whoever else does too; other instructions render the conversation anew."""
    engine = FakeEngine([words("a", "b")], prompt_ids=(7, 8))
    async with client_of(engine) as client:
        first = await client.responses.create(model="fake", input="one", instructions="be brief")
        engine.prompt_ids = (7, 8, 100, 101, 9)
        same: Any = {"model": "fake", "instructions": "be brief", "previous_response_id": first.id}
        second = await client.responses.create(input="two", **same)
        branch = await client.responses.create(input="three", **same)
        engine.prompt_ids = (*engine.prompt_ids, 100, 101, 5)
        await client.responses.create(input="four", **{**same, "previous_response_id": second.id})
        anew = await client.responses.create(model="fake", input="five", previous_response_id=branch.id)
    assert [list(call.after) for call in engine.calls] == [[], [7, 8, 100, 101], [7, 8, 100, 101], [7, 8, 100, 101, 9, 100, 101], []]
    assert [list(call.prompt) for call in engine.calls[1:4]] == [[{"role": "user", "content": text}] for text in ("two", "three", "four")]
    assert [(message["role"], message["content"]) for message in engine.calls[4].prompt] == [  # type: ignore[index,call-overload,union-attr]
        ("user", "one"), ("assistant", "ab"), ("user", "three"), ("assistant", "ab"), ("user", "five"),
    ]  # fmt: skip
    assert anew.previous_response_id == branch.id


async def test_kept_responses_are_read_listed_and_deleted() -> None:
    """What is kept comes back as it was; with store false, once deleted, or under another key there is none."""
    async with client_of(FakeEngine([words("a")])) as client:
        made = await client.responses.create(model="fake", input=[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])
        assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
        listed: Any = [item async for item in client.responses.input_items.list(made.id, order="asc", limit=1)]
        assert [(item.role, item.content[0].text) for item in listed] == [("user", "x"), ("user", "y")]
        await client.responses.delete(made.id)
        dropped = await client.responses.create(model="fake", input="x", store=False)
        for name in (made.id, dropped.id, "resp_none"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(name)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(model="fake", input="x", previous_response_id=name)
            assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    ("script", "status", "why"),
    [
        (words("cut", finish="length"), "incomplete", "max_output_tokens"),
        (words("left", finish="abort"), "cancelled", None),
        ([Chunk("stopped", (1,), Usage(1, 1), finish_reason="stop", stop_reason="END")], "completed", None),
    ],
)
async def test_how_it_ended(script: list[Item], status: str, why: str | None) -> None:
    """A cut answer is incomplete and says why; a stop text completes it; streams say the same."""
    async with client_of(FakeEngine([script])) as client:
        response = await client.responses.create(model="fake", input="x", extra_body={"stop": "END"})
        events = [event async for event in await client.responses.create(model="fake", input="x", stream=True)]
    assert response.status == status
    assert (response.incomplete_details and response.incomplete_details.reason) == why
    last: Any = events[-1]
    assert (last.type, last.response.status) == (f"response.{status if status != 'cancelled' else 'failed'}", status)
    item: Any = response.output[0]
    assert item.status == ("completed" if status == "completed" else "incomplete")


async def test_a_call_that_the_cap_cuts_is_incomplete() -> None:
    """What came of the call is there, says so, and is no whole JSON."""
    async with client_of(FakeEngine([words(READ[:60], finish="length")])) as client:
        response = await client.responses.create(model="fake", input="x", tools=TOOLS)
    call: Any = response.output[0]
    assert (call.type, call.status, response.status) == ("function_call", "incomplete", "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)


async def test_an_error_amid_a_stream_is_a_failed_response() -> None:
    """The stream ends with response.failed and our message, and nothing is kept of it; before the stream an error has its status."""
    script: list[Item] = [words("a", "b")[0], SessionBroken("layer 2 is not finite")]
    async with client_of(FakeEngine([script, [TooLong("too long", field="messages")]])) as client:
        events = [event async for event in await client.responses.create(model="fake", input="x", stream=True)]
        last: Any = events[-1]
        assert (last.type, last.response.error.code) == ("response.failed", "server_error")
        assert "layer 2 is not finite" in last.response.error.message
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake", input="x", stream=True)
        assert caught.value.code == "context_length_exceeded"


async def test_leaving_a_stream_aborts_the_generation() -> None:
    """Closing the stream after its first text closes the generation."""
    engine = FakeEngine([[words("a", "b")[0], asyncio.Event()]])
    async with client_of(engine) as client:
        stream = await client.responses.create(model="fake", input="x", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await engine.generations[0].closed.wait()
    assert engine.aborted == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -5}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "x", "call_id": "c", "arguments": "[]"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": 5}, "input"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"temperature": -1}, "temperature"),
    ({"extra_body": {"n": 2}}, "n"),
    ({"extra_body": {"session": {"id": "s"}, "previous_response_id": "r"}}, "previous_response_id"),
    ({"stream_options": {}}, "stream_options"),
]


async def test_what_cannot_be_served_is_refused_by_name() -> None:
    """Each is a 400 in one line that names the field, and the engine does not hear of it."""
    engine = FakeEngine([words("x")])
    async with client_of(engine) as client:
        for fields, field in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{"model": "fake", "input": "x", **fields})
            assert caught.value.param == field
    assert not engine.calls


async def test_what_a_coding_agent_sends() -> None:
    """A body with all that agents put beside the conversation is served, and its answer has what they keep of reasoning."""
    engine = thinking(words("hm</think>done"))
    body: Any = {
        "model": "fake", "instructions": "You are an agent.", "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "Zm9yZWJheTpobQ=="},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        ],
        "tools": [{"type": "function", "name": "shell", "description": "runs", "strict": False, "parameters": {"type": "object"}}],
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"},
        "prompt_cache_key": "key", "service_tier": "auto", "extra_body": {"client_metadata": {"x": "y"}},
    }  # fmt: skip
    async with client_of(engine) as client:
        events: Any = [event async for event in await client.responses.create(stream=True, **body)]
    assert events[-1].response.output[0].encrypted_content == "Zm9yZWJheTpobQ=="
    prompt: Any = engine.calls[0].prompt
    assert [message["role"] for message in prompt] == ["system", "system", "user", "assistant", "tool"]
    assert prompt[3]["reasoning_content"] == "hm"
    assert engine.calls[0].arguments is not None
    assert engine.calls[0].arguments["reasoning_effort"] == "high"


async def test_a_turn_of_a_session_is_kept_by_the_session_alone() -> None:
    """Its input is not the whole conversation, so nobody can go on from the response; it says where it left the session."""
    engine = FakeEngine([words("a")])
    await engine.create_session()
    async with client_of(engine) as client:
        response = await client.responses.create(model="fake", input="x", extra_body={"session": {"id": "s0", "revision": 3}})
        assert response.model_extra is not None
        assert response.model_extra["session"] == {"id": "s0", "revision": 4}
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
    assert (engine.calls[0].session, engine.calls[0].revision, engine.calls[0].after) == ("s0", 3, ())


async def test_parallel_calls_off_ends_the_turn_with_one() -> None:
    """The generation is left after the first call, and the response has that alone."""
    engine = FakeEngine([words(READ, COUNT, "never")], prompt_ids=THINKING[:1])
    async with client_of(engine) as client:
        response = await client.responses.create(model="fake", input="x", tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["function_call"]
    assert (response.status, response.parallel_tool_calls, engine.aborted) == ("completed", False, 1)


async def test_the_one_call_of_a_turn_that_the_length_cuts_is_incomplete() -> None:
    """Where parallel calls are off, too, the response and its call are incomplete, whole and as events."""
    engine = FakeEngine([words(READ[:50], READ[50:60], finish="length")], prompt_ids=THINKING[:1])
    asked: Any = {"model": "fake", "input": "x", "tools": TOOLS, "parallel_tool_calls": False}
    async with client_of(engine) as client:
        whole = await client.responses.create(**asked)
        *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, [getattr(item, "status", None) for item in response.output]) == ("incomplete", ["incomplete"])
