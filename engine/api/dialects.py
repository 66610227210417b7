"""The two generating endpoints as one shape: how each reads a request and writes an answer.

Pure functions of the other modules here, put side by side so that the server has one path for both.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.api.chat_choice import ChatChoiceWriter
from engine.api.chunks import AnswerHead, chat_answer, chat_usage_chunk, completion_answer, completion_usage_chunk
from engine.api.completion_choice import CompletionChoiceWriter
from engine.api.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from engine.api.responses import ChatAnswer, ChatChunk, CompletionAnswer
from engine.api.tools import schemas_of, shown_tools
from engine.api.translate import template_arguments, to_messages, to_prompt
from engine.chunk import Chunk, Usage
from engine.errors import BadRequest
from engine.protocol import Prompt
from engine.text.reply import ReplyParser, ends_in_reasoning

__all__ = ["CHAT", "COMPLETION", "ChoiceWriter", "Dialect"]

_TAIL_TOKENS = 16  # of a prompt, that show whether it ends inside the reasoning: a mark and blanks


class ChoiceWriter(Protocol):
    """One choice: `event` for each of its chunks makes a stream, `take` for each and then `choice` a whole answer."""

    @property
    def ended(self) -> bool:
        """Whether no further chunk is wanted."""
        ...

    def event(self, chunk: Chunk) -> ChatChunk | CompletionAnswer: ...
    def take(self, chunk: Chunk) -> None: ...
    def choice(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One endpoint's way. `prompt`, `arguments` and `writer` get what `parse` returned."""

    id_prefix: str
    parse: Callable[[bytes], ChatRequest | CompletionRequest]
    prompt: Callable[[Any], Prompt]
    arguments: Callable[[Any, Collection[str] | None], Mapping[str, object] | None]  # (.., variables that the template reads)
    writer: Callable[[Any, AnswerHead, int], ChoiceWriter]  # (.., the answer's head, which choice)
    usage: Callable[[AnswerHead, Usage], ChatChunk | CompletionAnswer]
    answer: Callable[[AnswerHead, Sequence[Any], Usage], ChatAnswer | CompletionAnswer]


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _chat_writer(asked: ChatRequest, head: AnswerHead, index: int) -> ChoiceWriter:
    parser = ReplyParser(
        reasoning=ends_in_reasoning(_text(head, head.prompt_token_ids[-_TAIL_TOKENS:])),
        tools=schemas_of(shown_tools(asked.tools, asked.tool_choice)),
        calls_max=1 if asked.parallel_tool_calls is False else None,
    )
    return ChatChoiceWriter(head, parser, _new_call_id, index=index)


def _completion_writer(asked: CompletionRequest, head: AnswerHead, index: int) -> ChoiceWriter:
    echo = ""
    if asked.echo:
        prompt = to_prompt(asked)
        if not isinstance(prompt, str) and head.token_bytes is None:
            raise BadRequest("echo of token ids needs the model's tokenizer, which this one does not have", field="echo")
        echo = prompt if isinstance(prompt, str) else _text(head, prompt)
    return CompletionChoiceWriter(head, index=index, echo=echo)


def _text(head: AnswerHead, token_ids: Sequence[int]) -> str:
    return "" if head.token_bytes is None else b"".join(map(head.token_bytes, token_ids)).decode("utf-8", "replace")


CHAT = Dialect("chatcmpl-", parse_chat, to_messages, template_arguments, _chat_writer, chat_usage_chunk, chat_answer)
COMPLETION = Dialect(
    "cmpl-", parse_completion, to_prompt, lambda asked, variables: None, _completion_writer, completion_usage_chunk, completion_answer
)
