"""What clients may send to /v1/messages: Anthropic's shape, decoded, checked, and made into the chat that it asks for.

Pure functions.

1. What comes out is a `ChatRequest` that the chat endpoint's own checks have passed, so both endpoints serve and refuse the same.
2. A field or a block that we know and cannot serve is refused by its own name. What only asks for a saving or a wish (cache_control,
   metadata, service_tier, context_management, a budget of thinking tokens) is taken and changes nothing.
"""

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from engine.api.requests import ChatMessage, ChatRequest, FunctionCall, GenerationRequest, Thinking, ToolCall, check_chat, decode
from engine.api.translate import template_arguments
from engine.errors import BadRequest, shown

__all__ = [
    "ContentBlock", "MessageParam", "MessagesRequest", "MessagesTurn", "OutputConfig", "ThinkingConfig", "message_arguments",
    "parse_messages", "renamed",
]  # fmt: skip

_SHARED = frozenset(GenerationRequest.__struct_fields__) - {"response_format", "stop"}
_REFUSED = {
    "mcp_servers": "call them from the client and send their tools",
    "container": "nothing is run here: leave it out",
}


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block: text, tool_use, tool_result, thinking or redacted_thinking."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    thinking: str | None = None


class MessageParam(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """ "disabled", or anything else for on. `budget_tokens` is taken and sets no limit."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, object] | None = None


class MessagesRequest(GenerationRequest, kw_only=True):
    """Body of /v1/messages, and of /v1/messages/count_tokens."""

    messages: list[MessageParam]
    system: str | list[ContentBlock] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: dict[str, object] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, object] | None = None
    mcp_servers: object = None
    container: object = None


class MessagesTurn(ChatRequest, kw_only=True):
    """A request as a chat."""

    wire: MessagesRequest


def parse_messages(body: bytes) -> MessagesTurn:
    """Decode and check a body of /v1/messages. Raises BadRequest naming the field."""
    wire = decode(body, MessagesRequest)
    _check(wire)
    choice = wire.tool_choice or {}
    shared = {name: getattr(wire, name) for name in _SHARED}
    turn = MessagesTurn(
        **shared, wire=wire, messages=_messages(wire), stop=wire.stop_sequences or wire.stop,
        tools=None if wire.tools is None else [_chat_tool(tool, index) for index, tool in enumerate(wire.tools)],
        tool_choice=_chat_choice(choice), parallel_tool_calls=False if choice.get("disable_parallel_tool_use") is True else None,
        thinking=None if wire.thinking is None else Thinking(type=wire.thinking.type),
        reasoning_effort=None if wire.output_config is None else wire.output_config.effort,
        response_format=wire.response_format or _chat_format(wire.output_config), chat_template_kwargs=wire.chat_template_kwargs,
    )  # fmt: skip
    try:
        check_chat(turn)
    except BadRequest as error:
        raise renamed(error) from error
    return turn


def _check(wire: MessagesRequest) -> None:
    for name, advice in _REFUSED.items():
        if getattr(wire, name):
            raise BadRequest(f"{name} is not served: {advice}", field=name)
    if wire.n not in (None, 1):
        raise BadRequest(f"n must be 1, not {shown(wire.n)}: a message is one", field="n")
    if wire.messages and wire.messages[-1].role == "assistant":
        raise BadRequest(
            "messages: the last one is the assistant's, and beginnings of answers are not served: end with the user's", field="messages"
        )


def renamed(error: BadRequest) -> BadRequest:
    """What the chat's checks said, by the names of this endpoint's fields."""
    names = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort", "response_format": "output_config.format"}
    new = names.get(error.field or "")
    return error if new is None else BadRequest(str(error).replace(error.field or "", new), field=new)


def message_arguments(asked: MessagesTurn, variables: Collection[str] | None) -> Mapping[str, object]:
    """Variables of the chat template. Raises BadRequest.

    Thinking that is "disabled", as clients ask for in passing, where the template cannot switch it off is as little of it as there is.
    """
    off = asked.thinking is not None and asked.thinking.type == "disabled"
    if off and variables is not None and "enable_thinking" not in variables:
        asked = msgspec.structs.replace(asked, thinking=None, reasoning_effort=asked.reasoning_effort or "low")
    try:
        return template_arguments(asked, variables)
    except BadRequest as error:
        raise renamed(error) from error


def _chat_tool(tool: Mapping[str, object], index: int) -> dict[str, object]:
    """A function as the chat endpoint takes it. Raises BadRequest: a tool of another type, which Anthropic's servers run."""
    field = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{field}: tools of type {shown(tool.get('type'))} are not served, only the client's own", field=f"{field}.type")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise BadRequest(f"{field}.input_schema must be a JSON Schema object", field=f"{field}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _chat_choice(choice: Mapping[str, object]) -> str | dict[str, object] | None:
    kind = choice.get("type")
    if kind is None:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    found = {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))
    if found is None:
        raise BadRequest(f"tool_choice.type must be auto, any, tool or none, not {shown(kind)}", field="tool_choice.type")
    return found


def _chat_format(config: OutputConfig | None) -> dict[str, object] | None:
    given = None if config is None else config.format
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), Mapping):
        raise BadRequest("output_config.format must be of type 'json_schema' with a schema", field="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}


def _messages(wire: MessagesRequest) -> list[ChatMessage]:
    """The system's text and the messages; results of calls become messages of their own. Raises BadRequest naming the block."""
    system = _text(wire.system, "system")
    messages = [ChatMessage(role="system", content=system)] if system else []
    for index, message in enumerate(wire.messages):
        field = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message.content, field))
        else:
            messages += _user(message.role, message.content, field)
    if len(messages) == (1 if system else 0):
        raise BadRequest("messages must hold at least one message with something in it", field="messages")
    return messages


def _assistant(blocks: list[ContentBlock], field: str) -> ChatMessage:
    texts, reasoning, calls = [], [], []
    for place, block in enumerate(blocks):
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            if not block.id or not block.name:
                raise BadRequest(f"{field}[{place}]: a tool_use needs an id and a name", field=f"{field}[{place}]")
            calls.append(ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input or {})))
        elif block.type != "redacted_thinking":  # nobody here can read it
            raise _unserved(block, f"{field}[{place}]")
    return ChatMessage(
        role="assistant", content="".join(texts), reasoning_content="".join(reasoning) or None, tool_calls=calls or None
    )  # fmt: skip


def _user(role: Literal["user", "system"], blocks: list[ContentBlock], field: str) -> list[ChatMessage]:
    """Text and results in their order, text that stands together as one message."""
    messages: list[ChatMessage] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            messages.append(ChatMessage(role=role, content="".join(texts)))
            texts.clear()

    for place, block in enumerate(blocks):
        where = f"{field}[{place}]"
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_result" and role == "user":
            if not block.tool_use_id:
                raise BadRequest(f"{where}: a tool_result needs a tool_use_id", field=f"{where}.tool_use_id")
            end_text()
            messages.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content, f"{where}.content")))
        else:
            raise _unserved(block, where)
    end_text()
    return messages


def _text(content: str | list[ContentBlock] | None, field: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for place, block in enumerate(content):
        if block.type != "text":
            raise _unserved(block, f"{field}[{place}]")
    return "".join(block.text or "" for block in content)


def _unserved(block: ContentBlock, field: str) -> BadRequest:
    return BadRequest(f"{field}: blocks of type {shown(block.type)} are not served here", field=field)
