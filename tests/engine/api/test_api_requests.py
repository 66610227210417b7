"""Bodies of requests: what is accepted, and that everything else is one line that names the field."""

import json

import pytest

from engine.api import parse_chat, parse_completion, parse_tokenize
from engine.errors import BadRequest

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT_PART = {"type": "text", "text": "a"}


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": MESSAGES} | fields).encode()


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "once"} | fields).encode()


def refused(parse: object, body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(body)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert caught.value.status == 400
    return caught.value


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def tool(name: object = "f", **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name} | fields}


def allowed(mode: str, *names: str) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


@pytest.mark.parametrize("parse", [parse_chat, parse_completion, parse_tokenize])
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"nonsense", b'{"messages": [], "prompt": "a"} {}', b'{"messages":', b"\xff\xfe", b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"anything": -Infinity}', b'{"a": 01}', b"{'a': 1}", b'{"a": 1,}',
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused(parse: object, body: bytes) -> None:
    """What is not JSON (NaN and infinities included), or not UTF-8, is refused as such."""
    assert "not valid" in str(refused(parse, body))


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"text"'])
def test_bodies_that_are_no_object_are_refused(body: bytes) -> None:
    """The body must be an object."""
    assert "the body: expected `object`" in str(refused(parse_chat, body))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_numbers_beyond_float64_are_refused(number: str) -> None:
    """A float that overflows is refused by name instead of becoming infinite."""
    error = refused(parse_chat, b'{"messages": [], "temperature": ' + number.encode() + b"}")
    assert error.field == "temperature"


@pytest.mark.parametrize(
    "body", [b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"tools": [' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]}"]
)
def test_bottomless_nesting_is_refused(body: bytes) -> None:
    """Nesting that would exhaust the decoder is a bad request, in known and unknown fields."""
    assert "nested too deeply" in str(refused(parse_chat, body))


@pytest.mark.parametrize("depth", [63, 64])
def test_nesting_up_to_the_limit_is_served(depth: int) -> None:
    """Passed-on values may be 64 levels deep."""
    assert parse_chat(chat(chat_template_kwargs=nested(depth))).chat_template_kwargs == nested(depth)


def test_nesting_past_the_limit_names_the_field() -> None:
    """65 levels are refused, in template arguments and in the arguments of earlier calls."""
    assert refused(parse_chat, chat(chat_template_kwargs=nested(65))).field == "chat_template_kwargs"
    call = {"function": {"name": "f", "arguments": nested(65)}}
    assert refused(parse_chat, chat(messages=[{"role": "assistant", "tool_calls": [call]}])).field == "messages[0].tool_calls"
    assert refused(parse_tokenize, json.dumps({"prompt": "a", "chat_template_kwargs": nested(65)}).encode()).field == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 1.0}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"model": 3}, "model"),
        ({"ignore_eos": "true"}, "ignore_eos"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"logit_bias": {"a": "b"}}, "logit_bias"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ],
)
def test_wrong_types_name_the_field(fields: dict[str, object], field: str) -> None:
    """A value of the wrong type is refused with its path on both endpoints; numbers are not text and booleans are not numbers."""
    for parse, body in ((parse_chat, chat(**fields)), (parse_completion, completion(**fields))):
        error = refused(parse, body)
        assert error.field == field
        assert field in str(error)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "robot", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[1]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -4}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "session": {"id": "a"}}, "n"),
        ({"n": 2, "synthetic_history": {"seed": 1, "rows": 1}}, "n"),
        ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "logit_bias"),
        ({"session": "a"}, "session"),
        ({"session": {}}, "session.id"),
        ({"session": {"id": "a", "revision": -1}}, "session.revision"),
        ({"session": {"id": "a", "revision": 1.5}}, "session.revision"),
        ({"session": {"id": 7}}, "session.id"),
        ({"session": {"id": "a"}, "synthetic_history": {"seed": 1, "rows": 1}}, "synthetic_history"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [tool()] * 1025}, "tools"),
        ({"tools": [tool(), {"type": "custom"}]}, "tools[1].type"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("<f>")]}, "tools[0].function.name"),
        ({"tools": [tool(3)]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=nested(70))]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": ["f"]}}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": allowed("required"), "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": allowed("any", "f"), "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": allowed("auto", "g"), "tools": [tool()]}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"thinking": "off"}, "thinking"),
        ({"guided_json": nested(70)}, "guided_json"),
        ({"response_format": {"json_schema": nested(70)}}, "response_format"),
    ],
)
def test_chats_that_cannot_be_served_name_the_field(fields: dict[str, object], field: str) -> None:
    """Each impossible or unserved chat field is refused with its path."""
    error = refused(parse_chat, chat(**fields))
    assert error.field == field
    assert field.split(".")[0].split("[")[0] in str(error)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1, 2**31]]}, "prompt[0][1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_completions_that_cannot_be_served_name_the_field(fields: dict[str, object], field: str) -> None:
    """Each impossible or unserved completion field is refused with its path."""
    assert refused(parse_completion, completion(**fields)).field == field


def test_missing_fields_are_named() -> None:
    """A body without its one required field says which."""
    assert str(refused(parse_chat, b"{}")) == "messages is required"
    assert str(refused(parse_completion, b"{}")) == "prompt is required"
    assert "exactly one of prompt and messages" in str(refused(parse_tokenize, b"{}"))


def test_tokenize_takes_one_of_both() -> None:
    """A text or messages, not both, and messages are checked as a chat's are."""
    assert parse_tokenize(b'{"prompt": ""}').prompt == ""
    assert parse_tokenize(json.dumps({"messages": MESSAGES}).encode()).messages is not None
    assert refused(parse_tokenize, json.dumps({"messages": MESSAGES, "prompt": "a"}).encode()).field == "prompt"
    assert refused(parse_tokenize, b'{"messages": []}').field == "messages"


def test_unknown_fields_are_ignored() -> None:
    """Fields we do not know, on any level, do not matter."""
    body = chat(user="me", metadata={"a": [1]}, store=True, messages=[{"role": "user", "content": "hi", "refusal": None, "x": {}}])
    assert parse_chat(body).messages[0].content == "hi"
    assert parse_completion(completion(user="me")).prompt == "once"


def test_null_is_not_given() -> None:
    """Null in every optional field is the same as leaving it out."""
    request = parse_chat(chat())
    optional = {field: None for field in request.__struct_fields__ if field != "messages"}
    assert parse_chat(chat(**optional)) == request
    bare = parse_completion(completion())
    assert parse_completion(completion(**{field: None for field in bare.__struct_fields__ if field != "prompt"})) == bare


def test_harmless_values_of_unserved_fields_are_accepted() -> None:
    """Clients send defaults: n and best_of 1, no bias, echo off, text format, empty tools, text as the only modality."""
    parse_chat(
        chat(n=1, logit_bias={}, response_format={"type": "text"}, tools=[], tool_choice="auto", max_tokens=5, max_completion_tokens=5)
    )
    parse_chat(chat(modalities=["text"], parallel_tool_calls=True, thinking={"type": "enabled", "budget_tokens": 5}))
    parse_completion(completion(n=2, best_of=2))
    parse_chat(chat(stream=True, stream_options={}))
    parse_chat(chat(logprobs=False, top_logprobs=0))
    parse_completion(completion(n=1, best_of=1, echo=False, suffix=""))


@pytest.mark.parametrize("choice", [None, "none", "auto", allowed("auto", "f"), allowed("auto")])
def test_choices_of_tools_that_can_be_kept(choice: object) -> None:
    """No choice, none, auto, and auto among some of the tools are served."""
    assert parse_chat(chat(tools=[tool(), tool("g", parameters={}, description="d", strict=True)], tool_choice=choice)).tools


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_roles_that_are_known(role: str) -> None:
    """Every role of the chat endpoint is accepted, with null and absent content."""
    for message in ({"role": role}, {"role": role, "content": None}, {"role": role, "content": ""}, {"role": role, "content": []}):
        assert parse_chat(chat(messages=[message])).messages[0].role == role


def test_a_long_prompt_of_token_ids_is_accepted() -> None:
    """A million token ids are one prompt."""
    assert len(parse_completion(b'{"prompt": [' + b"7," * 999_999 + b"7]}").prompt) == 1_000_000
