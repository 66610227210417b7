"""What clients receive: the shapes of answers and stream chunks.

Types only; `chunks.py` fills them. A field that may be absent is UNSET by default; one that is always present may be null.
Token ids carry vLLM's names: `choices[].token_ids` everywhere, `prompt_token_ids` on a chat answer and on a completion's choice.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "ChatAnswer", "ChatChoice", "ChatChunk", "ChatChunkChoice", "ChatLogprob", "ChatLogprobs", "ChatReply", "CompletionAnswer",
    "CompletionChoice", "CompletionLogprobs", "CompletionTokensDetails", "Delta", "Function", "FunctionDelta", "ModelCard", "ModelList",
    "PromptTokensDetails", "ReplyCall",
    "RequestEnded", "Response", "SessionState", "TokenIds", "TokenizeAnswer", "ToolCallDelta", "TopLogprob",
    "UsageCounts", "encode", "encode_tokenized",
]  # fmt: skip

TokenIds: TypeAlias = tuple[int, ...] | UnsetType
StopReason: TypeAlias = str | int | UnsetType | None


class PromptTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Drafts of the model's own: completion tokens that had been guessed, and guesses that did not appear."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    drafts_proposed: tuple[int, ...] = ()  # ours: by place in a step's run, the first draft first
    drafts_accepted: tuple[int, ...] = ()


class UsageCounts(msgspec.Struct, kw_only=True, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # where anything was drafted


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """`bytes` are the token's own, which `token` cannot always show: a token may hold part of a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ChatLogprob(TopLogprob, kw_only=True, frozen=True):
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    content: tuple[ChatLogprob, ...]
    refusal: None = None


class FunctionDelta(msgspec.Struct, kw_only=True, frozen=True):
    """More of a call: its name with the first piece, and more of the JSON text of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    """`id` and `type` come with a call's first piece; `index` counts the calls of the choice."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: TokenIds = UNSET


class SessionState(msgspec.Struct, kw_only=True, frozen=True):
    """Where a turn left its session: what the next turn names."""

    id: str
    revision: int


class ChatChunk(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: UsageCounts | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET
    session: SessionState | UnsetType = UNSET


class Function(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    arguments: str  # JSON text of an object; not whole where the answer broke off


class ReplyCall(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatReply(msgspec.Struct, kw_only=True, frozen=True):
    """`content` is null where there are calls and nothing else."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ReplyCall, ...] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: int = 0
    message: ChatReply
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: TokenIds = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: UsageCounts
    prompt_token_ids: TokenIds = UNSET
    session: SessionState | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Four lists with one element a token. Offsets are in characters of the answer's token texts."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """A whole answer (with usage) or a chunk of a stream: OpenAI gives both one shape and one name."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: UsageCounts | UnsetType | None = UNSET
    session: SessionState | UnsetType = UNSET


class RequestEnded(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["request"] = "request"
    cancelled: bool = True


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "forebay"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


class TokenizeAnswer(msgspec.Struct, kw_only=True, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


Response: TypeAlias = msgspec.Struct

_encoder = msgspec.json.Encoder()


def encode_tokenized(ids: list[int], context_max: int, text_of: Callable[[int], str] | None) -> bytes:
    """The body of an answer to /tokenize; with the text of each token where `text_of` is given. A pass over `ids`."""
    texts = UNSET if text_of is None else [text_of(token_id) for token_id in ids]
    return encode(TokenizeAnswer(count=len(ids), max_model_len=context_max, tokens=ids, token_strs=texts))


def encode(response: Response | dict[str, object]) -> bytes:
    """JSON on one line, as an SSE event needs it."""
    return _encoder.encode(response)
