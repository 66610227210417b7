"""A message of /v1/messages, whole or as the events of a stream, from a turn's chunks; and errors in Anthropic's shape.

Holds the parts of the turn.

1. Blocks are numbered from 0, and one ends before the next begins. A stream begins with message_start and a ping and ends with
   message_delta, which has the stop reason and the counts, and message_stop; or with an error.
2. A turn that somebody aborted is an error: there is no stop reason for it.
"""

from typing import Literal, cast

import msgspec

from engine.api.chunks import AnswerHead
from engine.api.dialects import reply_parser, sse
from engine.api.failures import error_body
from engine.api.message_requests import MessagesTurn
from engine.api.message_shapes import Block, Json, MessageBody, MessageUsage, TextBlock, ThinkingBlock, ToolUseBlock
from engine.api.parts import Part, Parts, Step
from engine.api.responses import encode
from engine.chunk import Chunk, Usage
from engine.errors import RequestCancelled

__all__ = ["MessageWriter", "anthropic_error"]

_SIGNATURE = "forebay"
_TYPE_OF = {  # by status
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
_STOP_OF = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CONTEXT = "context_length_exceeded"


def anthropic_error(status: int, body: dict[str, object], request_id: str) -> dict[str, object]:
    """An error body as Anthropic's clients read it. Args: body: as OpenAI's do (failures.py)."""
    said = body.get("error")
    fields = said if isinstance(said, dict) else {}
    message = str(fields.get("message", ""))
    if fields.get("code") == _CONTEXT:
        message = f"prompt is too long: {message}"  # what clients that shorten their conversations look for
    kind = _TYPE_OF.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class MessageWriter:
    """An `AnswerWriter` (dialects.py)."""

    def __init__(self, asked: MessagesTurn, head: AnswerHead, request_id: str) -> None:
        self._head, self._request_id = head, request_id
        self._parts = Parts(reply_parser(asked, head))

    def ended(self, choice: int) -> bool:
        return self._parts.ended

    def begin(self, usage: Usage) -> bytes:
        start = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return _event("message_start", message=self._body(start)) + _event("ping")

    def event(self, choice: int, chunk: Chunk) -> bytes:
        return b"".join(map(_step, self._parts.take(chunk)))

    def end(self, usage: Usage) -> bytes:
        try:
            body = self._body(usage)
        except RequestCancelled as error:
            return self.failure(error)
        extra = {} if body.session is msgspec.UNSET else {"session": body.session}
        delta = {"stop_reason": body.stop_reason, "stop_sequence": body.stop_sequence, **extra}
        return _event("message_delta", delta=delta, usage=body.usage) + _event("message_stop")

    def failure(self, error: Exception) -> bytes:
        fields = anthropic_error(*error_body(error), self._request_id)
        return sse(encode(fields), b"error")

    def take(self, choice: int, chunk: Chunk) -> None:
        self._parts.take(chunk)

    def whole(self, usage: Usage) -> bytes:
        """The message. Raises RequestCancelled."""
        return encode(self._body(usage))

    def _body(self, usage: Usage) -> MessageBody:
        parts = self._parts
        reason, stopped_at = parts.finish_reason, parts.stop_reason
        if reason is not None and reason not in _STOP_OF:
            raise RequestCancelled("the request was ended before the answer was whole")
        at_text = reason == "stop" and isinstance(stopped_at, str)
        named = "stop_sequence" if at_text else _STOP_OF.get(reason or "")
        return MessageBody(
            id=self._head.id, model=self._head.model, content=tuple(_block(part, part.text) for part in parts.all),
            stop_reason=cast('Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None', named),
            stop_sequence=str(stopped_at) if at_text else None,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - usage.cached_tokens,
                cache_read_input_tokens=usage.cached_tokens,
                output_tokens=usage.completion_tokens,
            ),
            session=self._head.left_at(reason),
        )  # fmt: skip


def _event(kind: str, /, **fields: object) -> bytes:
    return sse(encode({"type": kind, **fields}), kind.encode())


def _step(step: Step) -> bytes:
    part = step.part
    if step.what == "begin":
        return _event("content_block_start", index=part.index, content_block=_block(part, ""))
    if step.what == "end":
        signed = _delta(part, "signature_delta", signature=_SIGNATURE) if part.kind == "reasoning" else b""
        return signed + _event("content_block_stop", index=part.index)
    if part.kind == "call":
        return _delta(part, "input_json_delta", partial_json=step.text)
    return _delta(part, "thinking_delta", thinking=step.text) if part.kind == "reasoning" else _delta(part, "text_delta", text=step.text)


def _delta(part: Part, kind: str, **fields: str) -> bytes:
    return _event("content_block_delta", index=part.index, delta={"type": kind, **fields})


def _block(part: Part, text: str) -> Block:
    """A part as a block that has `text` so far."""
    if part.kind == "call":
        return ToolUseBlock(id=f"toolu_{part.id}", name=part.name, input=_input(text))
    return ThinkingBlock(thinking=text, signature=_SIGNATURE if text else "") if part.kind == "reasoning" else TextBlock(text=text)


def _input(arguments: str) -> Json:
    if not arguments:  # it has only begun
        return {}
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
