"""The generating endpoints as one shape: how each reads a request and writes an answer; here OpenAI's chat and completions.

Pure functions of the other modules here, put side by side so that the server has one path for all.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.api.chat_choice import ChatChoiceWriter
from engine.api.chunks import AnswerHead, chat_answer, chat_usage_chunk, completion_answer, completion_usage_chunk
from engine.api.completion_choice import CompletionChoiceWriter
from engine.api.failures import error_body
from engine.api.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from engine.api.responses import ChatAnswer, ChatChunk, CompletionAnswer, encode
from engine.api.tools import schemas_of, shown_tools
from engine.api.translate import template_arguments, to_messages, to_prompt
from engine.chunk import Chunk, Usage
from engine.errors import BadRequest
from engine.protocol import Prompt
from engine.text.reply import ReplyParser, ends_in_reasoning

__all__ = ["CHAT", "COMPLETION", "AnswerWriter", "ChoiceWriter", "Dialect", "chat_choice_writer", "reply_parser", "sse"]

_TAIL_TOKENS = 16  # of a prompt, that show whether it ends inside the reasoning: a mark and blanks
_DONE = b"data: [DONE]\n\n"


def sse(payload: bytes, name: bytes = b"") -> bytes:
    """A server-sent event of one line of data, with a name if there is one."""
    return b"event: " + name + b"\ndata: " + payload + b"\n\n" if name else b"data: " + payload + b"\n\n"


class AnswerWriter(Protocol):
    """One answer. A stream is `begin`, `event` for each chunk, then `end` or `failure`; a whole answer is `take` for each, then `whole`."""

    def ended(self, choice: int) -> bool:
        """Whether a choice wants no further chunk."""
        ...

    def begin(self, usage: Usage) -> bytes: ...
    def event(self, choice: int, chunk: Chunk) -> bytes: ...
    def end(self, usage: Usage) -> bytes: ...
    def failure(self, error: Exception) -> bytes: ...
    def take(self, choice: int, chunk: Chunk) -> None: ...

    def whole(self, usage: Usage) -> bytes:
        """The body. Raises ForebayError: there is none."""
        ...


class ChoiceWriter(Protocol):
    """One choice: `event` for each of its chunks makes a stream, `take` for each and then `choice` a whole answer."""

    @property
    def ended(self) -> bool:
        """Whether no further chunk is wanted."""
        ...

    def event(self, chunk: Chunk) -> ChatChunk | CompletionAnswer: ...
    def take(self, chunk: Chunk) -> None: ...
    def choice(self) -> Any: ...


def _nothing_before(asked: Any) -> Sequence[int]:
    return ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One endpoint's way. `prompt`, `after`, `arguments` and `writer` get what `parse` returned."""

    new_id: Callable[[str], str]  # (the request's id) to the answer's
    parse: Callable[[bytes], ChatRequest | CompletionRequest]
    prompt: Callable[[Any], Prompt]
    arguments: Callable[[Any, Collection[str] | None], Mapping[str, object] | None]  # (.., variables that the template reads)
    writer: Callable[[Any, AnswerHead, int], AnswerWriter]  # (.., the answer's head, how many choices)
    after: Callable[[Any], Sequence[int]] = _nothing_before  # token ids that the prompt goes on from


def reply_parser(asked: ChatRequest, head: AnswerHead) -> ReplyParser:
    """A parser of one choice of a chat turn whose prompt is the head's."""
    return ReplyParser(
        reasoning=ends_in_reasoning(_text(head, head.prompt_token_ids[-_TAIL_TOKENS:])),
        tools=schemas_of(shown_tools(asked.tools, asked.tool_choice)),
        calls_max=1 if asked.parallel_tool_calls is False else None,
    )


class _OpenAiWriter:
    """Chunks of choices, `[DONE]` at the end."""

    def __init__(
        self,
        head: AnswerHead,
        writers: Sequence[ChoiceWriter],
        usage: Callable[[AnswerHead, Usage], ChatChunk | CompletionAnswer],
        answer: Callable[[AnswerHead, Sequence[Any], Usage], ChatAnswer | CompletionAnswer],
    ) -> None:
        self._head, self._writers, self._usage, self._answer = head, writers, usage, answer

    def ended(self, choice: int) -> bool:
        return self._writers[choice].ended

    def begin(self, usage: Usage) -> bytes:
        return b""

    def event(self, choice: int, chunk: Chunk) -> bytes:
        return b"data: " + encode(self._writers[choice].event(chunk)) + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        return sse(encode(self._usage(self._head, usage))) + _DONE if self._head.include_usage else _DONE

    def failure(self, error: Exception) -> bytes:
        return sse(encode(error_body(error)[1])) + _DONE

    def take(self, choice: int, chunk: Chunk) -> None:
        self._writers[choice].take(chunk)

    def whole(self, usage: Usage) -> bytes:
        return encode(self._answer(self._head, [writer.choice() for writer in self._writers], usage))


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def chat_choice_writer(asked: ChatRequest, head: AnswerHead, index: int) -> ChatChoiceWriter:
    """The writer of one choice of a chat."""
    return ChatChoiceWriter(head, reply_parser(asked, head), _new_call_id, index=index)


def _chat_writer(asked: ChatRequest, head: AnswerHead, count: int) -> AnswerWriter:
    return _OpenAiWriter(head, [chat_choice_writer(asked, head, index) for index in range(count)], chat_usage_chunk, chat_answer)


def _completion_writer(asked: CompletionRequest, head: AnswerHead, count: int) -> AnswerWriter:
    echo = ""
    if asked.echo:
        prompt = to_prompt(asked)
        if not isinstance(prompt, str) and head.token_bytes is None:
            raise BadRequest("echo of token ids needs the model's tokenizer, which this one does not have", field="echo")
        echo = prompt if isinstance(prompt, str) else _text(head, prompt)
    writers = [CompletionChoiceWriter(head, index=index, echo=echo) for index in range(count)]
    return _OpenAiWriter(head, writers, completion_usage_chunk, completion_answer)


def _text(head: AnswerHead, token_ids: Sequence[int]) -> str:
    return "" if head.token_bytes is None else b"".join(map(head.token_bytes, token_ids)).decode("utf-8", "replace")


CHAT = Dialect("chatcmpl-{}".format, parse_chat, to_messages, template_arguments, _chat_writer)
COMPLETION = Dialect("cmpl-{}".format, parse_completion, to_prompt, lambda asked, variables: None, _completion_writer)
