"""Any JSON in the fields that agents send: one line that names a field, or a request that can be answered."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import AnswerHead, parse_chat, template_arguments, to_messages, to_samplings
from engine.api.dialects import chat_choice_writer
from engine.chunk import Chunk, Usage
from engine.errors import BadRequest

READ = "<tool_call>read<arg_key>path</arg_key><arg_value>1</arg_value></tool_call>"
NAMES = st.sampled_from(["read", "", "a b", "type", "function", "name", "path"])
WORDS = st.sampled_from(
    [
        "function",
        "type",
        "name",
        "parameters",
        "properties",
        "path",
        "read",
        "string",
        "integer",
        "object",
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "$ref",
        "$defs",
        "#",
        "#/properties/path",
        "nullable",
        "additionalProperties",
        "auto",
        "none",
        "required",
        "mode",
        "allowed_tools",
        "tools",
        "disabled",
        "arguments",
        "tool_calls",
        "content",
        "role",
        "assistant",
        "tool",
        "id",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)
SCHEMAS = st.fixed_dictionaries(
    {"properties": st.dictionaries(st.just("path"), VALUES, max_size=1)}, optional={"$defs": VALUES, "type": VALUES}
)
FUNCTION = st.fixed_dictionaries({"name": NAMES, "parameters": SCHEMAS | VALUES})
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=3)
MESSAGE = st.fixed_dictionaries({"role": WORDS}, optional={"content": VALUES, "tool_calls": VALUES})
ODD: dict[str, st.SearchStrategy[Any]] = {"tools": TOOLS | VALUES, "messages": st.lists(MESSAGE, max_size=3) | VALUES} | dict.fromkeys(
    ("tool_choice", "parallel_tool_calls", "thinking", "reasoning_effort", "chat_template_kwargs", "logit_bias", "n", "response_format",
     "functions", "modalities", "seed", ), VALUES,
)  # fmt: skip
SCHEMED = st.fixed_dictionaries({"name": st.just("read"), "parameters": SCHEMAS})
EVEN = {"tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": SCHEMED}), max_size=3)}
# A few odd fields at a time: of many one is always refused.
FIELDS = st.lists(st.sampled_from(sorted(ODD)), max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries(EVEN | {name: ODD[name] for name in names})
)


@settings(max_examples=300, deadline=None)
@given(FIELDS)
def test_any_json_is_refused_in_a_line_or_answered(fields: dict[str, Any]) -> None:
    """Nothing but BadRequest, with one line of at most 500 characters, comes of what clients send; what is taken gives an answer."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode("utf-8", "replace")
    refused: BadRequest | None = None
    try:
        asked = parse_chat(body)
        samplings = to_samplings(asked)
        to_messages(asked)
        template_arguments(asked, {"messages"})
    except BadRequest as error:
        refused = error
    if refused is not None:
        assert "\n" not in str(refused)
        assert len(str(refused)) <= 500
        return
    head = AnswerHead(id="x", model="m", created=1)
    for index in range(len(samplings)):
        writer = chat_choice_writer(asked, head, index)
        writer.take(Chunk(f"a{READ}", (1,), Usage(1, 1), finish_reason="stop"))
        choice = writer.choice()
        assert choice.index == index
        for call in choice.message.tool_calls or ():
            assert json.loads(call.function.arguments) in ({"path": 1}, {"path": "1"})
