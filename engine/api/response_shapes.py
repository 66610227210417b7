"""What /v1/responses sends: the shapes of a response and its items. Types only; `response_writer.py` fills them."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.responses import SessionState

__all__ = [
    "CallItem", "InputTokensDetails", "ItemStatus", "MessageItem", "OutputItem", "OutputText", "OutputTokensDetails", "ReasoningItem",
    "ReasoningText", "ResponseBody", "ResponseDeleted", "ResponseFailure", "ResponseUsage",
]  # fmt: skip

Json: TypeAlias = dict[str, object]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(msgspec.Struct, kw_only=True, frozen=True, tag="message", tag_field="type"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...]


class ReasoningItem(msgspec.Struct, kw_only=True, frozen=True, tag="reasoning", tag_field="type"):
    """`encrypted_content`, where it was asked for: the same text in base64, for clients that send nothing else back."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...]
    encrypted_content: str | UnsetType = UNSET


class CallItem(msgspec.Struct, kw_only=True, frozen=True, tag="function_call", tag_field="type"):
    """`arguments`: JSON text of an object; not whole where the answer broke off, and `status` is then incomplete."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem: TypeAlias = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True, frozen=True):
    """A response, whole or as far as it is. Settings are repeated as they were asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: tuple[OutputItem, ...]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    top_p: float | None
    text: Json
    tool_choice: str | Json
    tools: tuple[Json, ...]
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str]
    usage: ResponseUsage | None = None
    session: SessionState | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
