"""The two generating endpoints as one shape: how each reads a request and writes an answer.

Pure functions of the other modules here, put side by side so that the server has one path for both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api.chunks import (
    AnswerHead,
    chat_answer,
    chat_chunk,
    chat_usage_chunk,
    completion_answer,
    completion_chunk,
    completion_usage_chunk,
)  # fmt: skip
from engine.api.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from engine.api.responses import ChatAnswer, ChatChunk, CompletionAnswer
from engine.api.translate import template_arguments, to_messages, to_prompt
from engine.chunk import Chunk, Usage
from engine.protocol import Prompt

__all__ = ["CHAT", "COMPLETION", "Dialect"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One endpoint's way. `prompt` and `arguments` get what `parse` returned."""

    id_prefix: str
    parse: Callable[[bytes], ChatRequest | CompletionRequest]
    prompt: Callable[[Any], Prompt]
    arguments: Callable[[Any], Mapping[str, object] | None]
    chunk: Callable[[AnswerHead, Chunk, bool, int, Sequence[int]], ChatChunk | CompletionAnswer]  # (.., first, text offset, prompt ids)
    usage: Callable[[AnswerHead, Usage], ChatChunk | CompletionAnswer]
    answer: Callable[[AnswerHead, Sequence[Chunk], Sequence[int]], ChatAnswer | CompletionAnswer]


CHAT = Dialect(
    id_prefix="chatcmpl-",
    parse=parse_chat,
    prompt=to_messages,
    arguments=template_arguments,
    chunk=lambda head, chunk, first, offset, ids: chat_chunk(head, chunk, first=first, prompt_token_ids=ids),
    usage=chat_usage_chunk,
    answer=lambda head, chunks, ids: chat_answer(head, chunks, prompt_token_ids=ids),
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    parse=parse_completion,
    prompt=to_prompt,
    arguments=lambda asked: None,
    chunk=lambda head, chunk, first, offset, ids: completion_chunk(
        head, chunk, first=first, text_offset=offset, prompt_token_ids=ids
    ),
    usage=completion_usage_chunk,
    answer=lambda head, chunks, ids: completion_answer(head, chunks, prompt_token_ids=ids),
)  # fmt: skip
