"""Choices of a chat answer: reasoning, content and tool calls on the wire, streamed and whole."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.api import AnswerHead, encode, parse_chat
from engine.api.chunks import chat_answer
from engine.api.dialects import chat_choice_writer
from engine.chunk import Chunk, Usage

TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}},
}
READ = "<tool_call>read<arg_key>path</arg_key><arg_value>é/🙂.py</arg_value><arg_key>lines</arg_key><arg_value>3</arg_value></tool_call>"
PROMPT = {1: b"<|assistant|>", 2: b"<think>", 3: b"</think>", 4: b"\n"}
HEAD = AnswerHead(id="x", model="m", created=1, token_bytes=PROMPT.__getitem__)


def writer(prompt: tuple[int, ...] = (1, 2), *, tools: bool = True, **fields: object) -> Any:
    """As the server makes it for a request."""
    asked = {"messages": [{"role": "user", "content": "hi"}]} | ({"tools": [TOOL]} if tools else {}) | fields
    head = AnswerHead(id="x", model="m", created=1, token_bytes=PROMPT.__getitem__, prompt_token_ids=prompt)
    return chat_choice_writer(parse_chat(json.dumps(asked).encode()), head, 0)


def chunks(text: str, *cuts: int, finish: Any = "stop", stop: str | int | None = 7) -> list[Chunk]:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    last = len(pieces) - 1
    return [
        Chunk(piece, (place,), Usage(2, place + 1), (), finish if place == last else None, stop if place == last else None)
        for place, piece in enumerate(pieces)
    ]


def whole(writer: Any, given: list[Chunk]) -> Any:
    for chunk in given:
        writer.take(chunk)
    body = json.loads(encode(chat_answer(HEAD, [writer.choice()], given[-1].usage)))
    ChatCompletion.model_validate(body)
    return body["choices"][0]


def streamed(writer: Any, given: list[Chunk]) -> Any:
    """The stream's chunks put together as clients do."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in given:
        body = json.loads(encode(writer.event(chunk)))
        ChatCompletionChunk.model_validate(body)
        (choice,) = body["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        message["role"] = delta.get("role", message["role"])
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field, "")
        indices = [call["index"] for call in delta.get("tool_calls", ())]
        assert len(set(indices)) == len(indices), "a delta has a call once"
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": {"name": "", "arguments": ""}})
            function = message["tool_calls"][call["index"]]["function"]
            function["name"] += call["function"].get("name", "")
            function["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def test_a_turn_with_everything() -> None:
    """Reasoning, content and calls have their own fields, ids differ, and the finish reason says that there are calls."""
    choice = whole(writer(), chunks(f"hm</think>I look.{READ}\n{READ}"))
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("hm", "I look.", "tool_calls")
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    for call in message["tool_calls"]:
        assert call["function"]["name"] == "read"
        assert json.loads(call["function"]["arguments"]) == {"path": "é/🙂.py", "lines": 3}


def test_content_beside_calls_alone_is_null() -> None:
    """A turn of calls only has null content; one that says nothing has an empty one, and no fields for what it has not."""
    assert whole(writer(), chunks(f"</think>{READ}"))["message"]["content"] is None
    message = whole(writer(), chunks("only thoughts"))["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "only thoughts")
    assert "tool_calls" not in message
    assert "reasoning_content" not in whole(writer((1, 2, 3)), chunks("x"))["message"]


@pytest.mark.parametrize(
    ("prompt", "reasoning"), [((1, 2), "a"), ((2, 4), "a"), ((1, 2, 3), ""), ((1,), ""), ((), "")]
)  # fmt: skip
def test_the_prompt_says_whether_the_turn_begins_inside_reasoning(prompt: tuple[int, ...], reasoning: str) -> None:
    """An open mark at the prompt's end begins the turn inside the reasoning."""
    message = whole(writer(prompt), chunks("a"))["message"]
    assert message.get("reasoning_content", "") == reasoning
    assert message["content"] == ("" if reasoning else "a")


@pytest.mark.parametrize("fields", [{"tools": False}, {"tool_choice": "none"}])
def test_without_tools_to_call_nothing_is_a_call(fields: Any) -> None:
    """What looks like a call is text where no tool was shown."""
    choice = whole(writer((1,), **fields), chunks(READ))
    assert (choice["message"]["content"], choice["finish_reason"]) == (READ, "stop")


@pytest.mark.parametrize(
    ("text", "finish", "stop", "expected"),
    [
        (READ, "stop", 7, "tool_calls"),
        (READ, "stop", "###", "tool_calls"),  # a stop text behind a whole call
        (READ, "length", None, "length"),
        (READ + READ[:60], "length", None, "length"),
        (READ + READ[:60], "stop", "###", "stop"),  # inside a call
        (READ[:-12], "stop", 7, "tool_calls"),  # its last mark left out
        (READ[:60], "stop", 7, "tool_calls"),  # the model's own doing: the client tells it
        (READ[:20], "stop", 7, "stop"),
    ],
)
def test_finish_reasons(text: str, finish: Any, stop: Any, expected: str) -> None:
    """tool_calls where the model ended a turn with calls; its length, and a stop text inside a call, say what they are."""
    given = chunks(text, finish=finish, stop=stop)
    assert whole(writer((1,)), given)["finish_reason"] == expected
    assert streamed(writer((1,)), given)["finish_reason"] == expected


@pytest.mark.parametrize(("finish", "stop", "expected"), [("length", None, "length"), ("stop", "###", "stop"), ("stop", 7, "tool_calls")])
@pytest.mark.parametrize("kept", [60, len(READ) - 12])  # inside a value, and behind the last one
def test_the_one_call_that_is_allowed_may_be_cut(kept: int, finish: Any, stop: Any, expected: str) -> None:
    """Without parallel calls too a call that was cut says by what, whole and streamed; one that the model ended is a call."""
    for taken in (chunks(READ[:kept], finish=finish, stop=stop), chunks(READ[:kept], 30, 50, finish=finish, stop=stop)):
        choice = whole(writer((1,), parallel_tool_calls=False), taken)
        assert choice["finish_reason"] == expected
        parts = streamed(writer((1,), parallel_tool_calls=False), taken)
        assert parts["finish_reason"] == expected
        if expected != "tool_calls":
            assert choice["stop_reason"] == stop
            for answer in (choice, parts):
                with pytest.raises(json.JSONDecodeError):
                    json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("inside", [True, False])
def test_a_stop_id_inside_unfinished_reasoning(inside: bool) -> None:
    """The turn ends with reasoning alone, whatever was held back of a mark."""
    choice = whole(writer(), chunks("thinking </thin" if inside else "thinking", 3))
    assert choice["message"]["reasoning_content"].startswith("thinking")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_one_call_is_enough_where_no_more_are_allowed() -> None:
    """Without parallel calls a turn ends with its first call, wherever that ends in a chunk."""
    one = writer((1,), parallel_tool_calls=False)
    first, second = chunks(f"a{READ} b{READ}", len(READ))
    assert json.loads(encode(one.event(first)))["choices"][0]["finish_reason"] is None
    assert not one.ended
    last = json.loads(encode(one.event(second)))["choices"][0]
    assert (last["finish_reason"], last["delta"]["tool_calls"][0]["index"], one.ended) == ("tool_calls", 0, True)
    assert "content" not in last["delta"]
    alone = whole(writer((1,), parallel_tool_calls=False), chunks(READ))
    assert (alone["finish_reason"], alone.get("stop_reason", 0)) == ("tool_calls", None)
    both = writer((1,), parallel_tool_calls=True)
    assert len(whole(both, chunks(f"a{READ}{READ}"))["message"]["tool_calls"]) == 2


def test_a_stream_begins_with_a_role_and_hands_strings_on() -> None:
    """The role comes once; a call's id, type and name come with its first piece, and its string argument as it is written."""
    texts = ["hm", "</think>", "<tool_call>read<arg_key>path</arg_key><arg_value>a", "b", "</arg_value></tool_call>"]
    one = writer()
    deltas = [json.loads(encode(one.event(Chunk(text, (), Usage(1, 1)))))["choices"][0]["delta"] for text in texts]
    assert deltas[0] == {"role": "assistant", "reasoning_content": "hm"}
    assert deltas[1] == {"content": ""}
    (begun,) = deltas[2].pop("tool_calls")
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "read", "arguments": '{"path": "a'}}
    assert deltas[2] == {}
    assert deltas[3] == {"tool_calls": [{"index": 0, "function": {"arguments": "b"}}]}
    assert deltas[4] == {"tool_calls": [{"index": 0, "function": {"arguments": '"}'}}]}


TURNS = [
    f"hm</think>I look.{READ}\n{READ}", f"hm{READ}so", "a</think>b <tool_call>no</tool_call", READ[:90], "x<tool_call>a b</tool_call>",
    "only", "",
]  # fmt: skip


@settings(max_examples=200)
@given(
    st.sampled_from(TURNS), st.lists(st.integers(0, 400), max_size=12), st.sampled_from([("stop", 7), ("stop", "##"), ("length", None)]),
    st.sampled_from([(1, 2), (1,)]), st.booleans(),
)  # fmt: skip
def test_streams_and_whole_answers_say_the_same(text: str, cuts: list[int], end: Any, prompt: tuple[int, ...], parallel: bool) -> None:
    """A stream in any chunks, put together, is the whole answer of one chunk: fields, calls, arguments and finish reason."""
    finish, stop = end
    fields = {} if parallel else {"parallel_tool_calls": False}
    given = chunks(text, *(min(cut, len(text)) for cut in cuts), finish=finish, stop=stop)
    stream = writer(prompt, **fields)
    wanted = whole(writer(prompt, **fields), chunks(text, finish=finish, stop=stop))
    read = []
    for chunk in given:
        read.append(chunk)
        probe = writer(prompt, **fields)
        for each in read:
            probe.take(each)
        if probe.ended:
            break
    got = streamed(stream, read)
    message = got["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in wanted["message"].get("tool_calls", ())]
    assert calls == expected
    assert message["content"] == (wanted["message"]["content"] or "")
    assert message["reasoning_content"] == wanted["message"].get("reasoning_content", "")
    assert got["finish_reason"] == wanted["finish_reason"]
