"""What clients may send to /v1/responses: decoded, checked, and made into the chat that it asks for.

Pure functions. A conversation that `previous_response_id` names is put before it by whoever has kept it.

1. What comes out is a `ChatRequest` that the chat endpoint's own checks have passed, so both endpoints serve and refuse the same.
2. A field or an item that we know and cannot serve is refused by its own name.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from engine.api.requests import ChatMessage, ChatRequest, FunctionCall, GenerationRequest, Role, ToolCall, check_chat, decode
from engine.errors import BadRequest, shown

__all__ = [
    "ENCRYPTED", "InputItem", "ItemPart", "ReasoningSettings", "ResponsesRequest", "ResponsesTurn", "TextSettings", "hidden_reasoning",
    "parse_responses", "renamed", "to_chat_messages",
]  # fmt: skip

ENCRYPTED = "reasoning.encrypted_content"
_ITEMS_MAX = 16_384
_PREFIX = b"forebay:"
_REFUSED = {
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "prompts are not stored here: send instructions and input",
    "context_management": "nothing is compacted here: leave it out",
    "max_tool_calls": "tools are called by the client, which may count them: leave it out",
}


class ItemPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One part of an item: `input_text`, `output_text`, `reasoning_text`, `summary_text` or `refusal`."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation: a message (also without a type), a call, a call's output, or reasoning that was sent back."""

    type: str | None = None
    id: str | None = None
    role: Role | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class ReasoningSettings(msgspec.Struct, kw_only=True):
    """`summary` is taken and makes none: the reasoning itself comes back."""

    effort: str | None = None
    summary: str | None = None


class TextSettings(msgspec.Struct, kw_only=True):
    """`verbosity` is taken for what it is, a wish, and not handed on."""

    format: dict[str, object] | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    """Body of /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Annotated[str, msgspec.Meta(max_length=512)]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    truncation: str | None = None
    background: bool | None = None
    top_logprobs: int | None = None
    conversation: object = None
    prompt: object = None
    context_management: object = None
    max_tool_calls: object = None


class ResponsesTurn(ChatRequest, kw_only=True):
    """The new messages of a request as a chat. `wire`: the request; `items`: its input as items."""

    wire: ResponsesRequest
    items: list[InputItem]


def parse_responses(body: bytes) -> ResponsesTurn:
    """Decode and check a body of /v1/responses. Raises BadRequest naming the field."""
    wire = decode(body, ResponsesRequest)
    _check(wire)
    items = [InputItem(role="user", content=wire.input)] if isinstance(wire.input, str) else wire.input
    messages = to_chat_messages(items)
    if not messages:
        raise BadRequest("input holds no message and no output of a call", field="input")
    shared = {name: getattr(wire, name) for name in GenerationRequest.__struct_fields__ if name != "response_format"}
    turn = ResponsesTurn(
        **shared, wire=wire, items=items, messages=messages, max_completion_tokens=wire.max_output_tokens,
        reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort, chat_template_kwargs=wire.chat_template_kwargs,
        tools=None if wire.tools is None else [_chat_tool(tool, index) for index, tool in enumerate(wire.tools)],
        tool_choice=_chat_choice(wire.tool_choice), parallel_tool_calls=wire.parallel_tool_calls,
        response_format=wire.response_format or _chat_format(wire.text),
    )  # fmt: skip
    try:
        check_chat(turn)
    except BadRequest as error:
        raise renamed(error) from error
    return turn


def _check(wire: ResponsesRequest) -> None:
    for name, advice in _REFUSED.items():
        if getattr(wire, name) is not None:
            raise BadRequest(f"{name} is not served: {advice}", field=name)
    if wire.background:
        raise BadRequest("background is not served: read the answer, or a stream of it", field="background")
    if wire.truncation not in (None, "disabled"):
        raise BadRequest("truncation must be 'disabled': nothing is ever cut silently", field="truncation")
    if wire.top_logprobs:
        raise BadRequest("top_logprobs is not served here: send logprobs to /v1/chat/completions", field="top_logprobs")
    if wire.n not in (None, 1):
        raise BadRequest(f"n must be 1, not {shown(wire.n)}: a response is one", field="n")
    for name in wire.include or ():
        if name != ENCRYPTED:
            raise BadRequest(f"include: {shown(name)} is not served, only {ENCRYPTED!r}", field="include")
    if wire.previous_response_id is not None and wire.session is not None:
        raise BadRequest("previous_response_id and session both name a history: send one", field="previous_response_id")
    if isinstance(wire.input, list) and len(wire.input) > _ITEMS_MAX:
        raise BadRequest(f"input holds {len(wire.input)}, more than {_ITEMS_MAX}", field="input")


def renamed(error: BadRequest) -> BadRequest:
    """What the chat's checks said, by the names of this endpoint's fields."""
    names = {"max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "response_format": "text.format"}
    field = error.field
    if field is None:
        return error
    if field.startswith("messages"):
        return BadRequest(f"input: {error}", field="input")
    new = names.get(field)
    return error if new is None else BadRequest(str(error).replace(field, new), field=new)


def _chat_tool(tool: Mapping[str, object], index: int) -> dict[str, object]:
    """A function as the chat endpoint takes it. Raises BadRequest: a tool of another type."""
    kind = tool.get("type")
    if kind != "function":
        raise BadRequest(f"tools[{index}]: tools of type {shown(kind)} are not served, only 'function'", field=f"tools[{index}].type")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chat_choice(choice: str | Mapping[str, object] | None) -> str | dict[str, object] | None:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        named = choice.get("tools")
        tools = (
            [{"type": "function", "function": dict(tool)} for tool in named if isinstance(tool, Mapping)] if isinstance(named, list) else []
        )
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return dict(choice)


def _chat_format(text: TextSettings | None) -> dict[str, object] | None:
    given = None if text is None else text.format
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
    return dict(given)


def to_chat_messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Items as chat messages: reasoning, text and calls that follow one another are one assistant's. Raises BadRequest naming the item."""
    messages: list[ChatMessage] = []
    open_turn: ChatMessage | None = None  # the assistant's that may still get more
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = item.type or "message"
        if kind == "message":
            role, text = item.role or "user", _text(item.content, f"{field}.content")
            if role != "assistant":
                open_turn = None
                messages.append(ChatMessage(role=role, content=text))
                continue
            open_turn = _turn(messages, open_turn if open_turn is not None and not (open_turn.content or open_turn.tool_calls) else None)
            open_turn.content = text
        elif kind == "reasoning":
            open_turn = _turn(messages, None)
            open_turn.reasoning_content = _reasoning(item) or None
        elif kind == "function_call":
            if not item.name or not item.call_id:
                raise BadRequest(f"{field}: a function_call needs a name and a call_id", field=field)
            open_turn = _turn(messages, open_turn)
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments or "{}"))
            open_turn.tool_calls = [*(open_turn.tool_calls or ()), call]
        elif kind == "function_call_output":
            if not item.call_id:
                raise BadRequest(f"{field}: a function_call_output needs a call_id", field=f"{field}.call_id")
            open_turn = None
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output, f"{field}.output")))
        else:
            raise BadRequest(f"{field}: items of type {shown(kind)} are not served", field=f"{field}.type")
    return [
        message for message in messages if message.role != "assistant" or message.content or message.reasoning_content or message.tool_calls
    ]


def _turn(messages: list[ChatMessage], open_turn: ChatMessage | None) -> ChatMessage:
    """The assistant's message that is open, else a new one."""
    if open_turn is None:
        open_turn = ChatMessage(role="assistant")
        messages.append(open_turn)
    return open_turn


def _text(content: str | list[ItemPart] | None, field: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in ("input_text", "output_text", "text"):
            texts.append(part.text or "")
        else:
            raise BadRequest(f"{field}[{place}]: parts of type {shown(part.type)} are not served, only text", field=f"{field}[{place}]")
    return "".join(texts)


def hidden_reasoning(text: str) -> str:
    """Reasoning for `encrypted_content`, which clients send back unread. It is base64 and no secret."""
    return base64.b64encode(_PREFIX + text.encode("utf-8", "replace")).decode()


def _reasoning(item: InputItem) -> str:
    """The reasoning of an item: its text, or what `hidden_reasoning` made. Another server's is dropped: nobody here can read it."""
    if isinstance(item.content, str):
        return item.content
    if item.content:
        return "".join(part.text or "" for part in item.content)
    try:
        plain = base64.b64decode(item.encrypted_content or "", validate=True)
    except (binascii.Error, ValueError):
        return ""
    return plain.removeprefix(_PREFIX).decode("utf-8", "replace") if plain.startswith(_PREFIX) else ""
