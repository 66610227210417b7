"""What /v1/messages sends: the shapes of a message and its blocks, and of errors. Types only; `message_writer.py` fills them."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.responses import SessionState

__all__ = [
    "AnthropicModel",
    "AnthropicModels",
    "Block",
    "MessageBody",
    "MessageUsage",
    "TextBlock",
    "ThinkingBlock",
    "TokenCount",
    "ToolUseBlock",
]

Json: TypeAlias = dict[str, object]


class TextBlock(msgspec.Struct, kw_only=True, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, frozen=True, tag="thinking", tag_field="type"):
    """`signature` signs nothing: clients want one before they send a block back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, frozen=True, tag="tool_use", tag_field="type"):
    """`input` of a call that broke off holds its text as far as it came, under `arguments`."""

    id: str
    name: str
    input: Json


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True, frozen=True):
    """`input_tokens` are those that had to be read; the rest of the prompt is `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[Block, ...]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    session: SessionState | UnsetType = UNSET


class AnthropicModel(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int


class AnthropicModels(msgspec.Struct, kw_only=True, frozen=True):
    data: tuple[AnthropicModel, ...]
    has_more: bool = False
    first_id: str
    last_id: str


class TokenCount(msgspec.Struct, kw_only=True, frozen=True):
    input_tokens: int
