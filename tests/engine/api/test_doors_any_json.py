"""/v1/responses and /v1/messages against any JSON: a refusal in a line, or a whole answer and its stream that say the same."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import AnswerHead, to_messages, to_samplings
from engine.api.dialects import AnswerWriter
from engine.api.message_requests import message_arguments, parse_messages
from engine.api.message_writer import MessageWriter
from engine.api.response_requests import parse_responses
from engine.api.response_turns import KeptResponses, kept_turn, response_prompt
from engine.api.response_writer import ResponseWriter
from engine.api.translate import template_arguments
from engine.chunk import Chunk, Usage
from engine.errors import BadRequest

READ = "<tool_call>read<arg_key>path</arg_key><arg_value>1</arg_value></tool_call>"
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "text", "format", "schema"]), inner, max_size=2)
    ),
    max_leaves=5,
)
TYPES = st.sampled_from(
    ["text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "message", "reasoning", "function_call",
     "function_call_output", "function", "custom", "allowed_tools", "auto", "any", "tool", "none", "disabled", "json_schema", "image"]
)  # fmt: skip
NAMES = (
    "id",
    "role",
    "content",
    "text",
    "name",
    "input",
    "arguments",
    "output",
    "call_id",
    "tool_use_id",
    "thinking",
    "encrypted_content",
    "summary",
)
PARTS = st.fixed_dictionaries({"type": TYPES}, optional=dict.fromkeys(("text", "thinking", "name", "id", "input"), VALUES))
ITEMS = st.fixed_dictionaries(
    {"type": TYPES}, optional={name: VALUES | st.lists(PARTS, max_size=2) | st.text(max_size=3) for name in NAMES}
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
TURNS = st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=3) | st.lists(ITEMS, max_size=3)})
TOOLS = st.lists(
    st.fixed_dictionaries({"type": TYPES}, optional={"name": VALUES, "input_schema": VALUES, "parameters": VALUES}), max_size=2
)
CHOICES = st.fixed_dictionaries({"type": TYPES}, optional={"name": VALUES, "mode": VALUES, "tools": VALUES}) | VALUES
ODD: dict[str, st.SearchStrategy[Any]] = {"tools": TOOLS | VALUES, "tool_choice": CHOICES} | dict.fromkeys(
    ("system", "instructions", "thinking", "reasoning", "output_config", "text", "metadata", "include", "stop_sequences", "store", "n",
     "max_tokens", "max_output_tokens", "previous_response_id", "chat_template_kwargs", "parallel_tool_calls", "response_format",
     "seed"), VALUES,
)  # fmt: skip
FIELDS = st.lists(st.sampled_from(sorted(ODD)), max_size=1).flatmap(
    lambda names: st.fixed_dictionaries({name: ODD[name] for name in names})
)
GOOD_ITEMS = st.lists(
    st.sampled_from(
        [
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]}, {"type": "reasoning", "encrypted_content": "zz"},
            {"type": "function_call", "name": "read", "call_id": "c", "arguments": '{"path": 1}'},
            {"type": "function_call", "name": "read", "call_id": "c", "arguments": '{"pa'},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ]
    ), min_size=1, max_size=5,
)  # fmt: skip
CALL = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
GOOD_TURNS = st.lists(
    st.sampled_from(
        [
            {"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "o"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, CALL]},
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking"}]},
        ]
    ), max_size=4,
).map(lambda turns: [*turns, {"role": "user", "content": "and now?"}])  # fmt: skip
CHUNKS = [Chunk("a", (1,), Usage(1, 1)), Chunk("", (2,), Usage(1, 2)), Chunk(READ, (3,), Usage(1, 3), finish_reason="stop")]
HEAD = AnswerHead(id="x", model="m", created=1, prompt_token_ids=(5,))


def check_refusal(error: BadRequest) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) <= 500


def said(writers: tuple[AnswerWriter, AnswerWriter]) -> tuple[Any, str]:
    """A whole answer, and the last event of a stream."""
    whole, stream = writers
    events = stream.begin(CHUNKS[0].usage)
    for chunk in CHUNKS:
        whole.take(0, chunk)
        events += stream.event(0, chunk)
    events += stream.end(CHUNKS[-1].usage)
    for line in events.decode().split("\n"):
        assert not line.startswith("data: ") or json.loads(line.removeprefix("data: "))["type"]
    return json.loads(whole.whole(CHUNKS[-1].usage)), events.decode().split("event: ")[-1]


@settings(max_examples=100, deadline=None)
@given(FIELDS, GOOD_ITEMS | st.text(max_size=3) | st.lists(ITEMS | TURNS, max_size=2))
def test_any_response_is_refused_in_a_line_or_answered(fields: dict[str, Any], given_input: Any) -> None:
    """Nothing but BadRequest comes of what clients send; what is taken is answered, kept, and found again."""
    kept = KeptResponses(10**6, 0)
    try:
        asked = parse_responses(json.dumps({"input": given_input} | fields).encode("utf-8", "replace"))
        to_samplings(asked)
        response_prompt(asked, kept)
        template_arguments(asked, {"messages"})
    except BadRequest as error:
        check_refusal(error)
        return
    made = [ResponseWriter(asked, HEAD, lambda body, prompt_ids, ids: kept_turn(asked, body, prompt_ids, ids, kept)) for _ in range(2)]
    body, last = said((made[0], made[1]))
    assert body["status"] == "completed"
    assert last.startswith("response.completed\n")
    assert len(kept) == (fields.get("store") is not False)
    if len(kept):
        asked.wire.previous_response_id, asked.wire.instructions = "x", "other"
        assert response_prompt(asked, kept)


@settings(max_examples=100, deadline=None)
@given(FIELDS, GOOD_TURNS | GOOD_TURNS | st.lists(TURNS, max_size=2))
def test_any_message_is_refused_in_a_line_or_answered(fields: dict[str, Any], messages: Any) -> None:
    """Nothing but BadRequest comes of what clients send; what is taken is answered."""
    try:
        asked = parse_messages(json.dumps({"messages": messages} | fields).encode("utf-8", "replace"))
        to_samplings(asked)
        to_messages(asked)
        message_arguments(asked, {"messages"})
    except BadRequest as error:
        check_refusal(error)
        return
    body, last = said((MessageWriter(asked, HEAD, "r"), MessageWriter(asked, HEAD, "r")))
    assert body["stop_reason"] in ("end_turn", "tool_use")
    assert last.startswith("message_stop\n")
