"""A response of /v1/responses, whole or as the events of a stream, from a turn's chunks.

Holds the parts of the turn and the number of the last event. What is kept for later turns is handed to the caller.

1. Events are numbered from 0; each item is announced, filled and ended before the next one begins.
2. The last event has the whole response, and what `kept` was called with is what it says.
"""

from collections.abc import Callable, Sequence

from msgspec import UNSET

from engine.api.chunks import AnswerHead
from engine.api.dialects import reply_parser, sse
from engine.api.failures import error_body
from engine.api.parts import Part, Parts, Step
from engine.api.response_requests import ENCRYPTED, ResponsesTurn, hidden_reasoning
from engine.api.response_shapes import (
    CallItem,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseFailure,
    ResponseUsage,
)  # fmt: skip
from engine.api.responses import encode
from engine.chunk import Chunk, Usage
from engine.errors import RequestCancelled

__all__ = ["ResponseWriter"]

_PREFIX = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_STATUS_OF = {"length": "incomplete", "abort": "cancelled"}


class ResponseWriter:
    """An `AnswerWriter` (dialects.py)."""

    def __init__(self, asked: ResponsesTurn, head: AnswerHead, kept: Callable[[ResponseBody, Sequence[int], Sequence[int]], None]) -> None:
        """Args: kept: called once with the ended response and the token ids of its prompt and of its answer, before its end is told."""
        self._asked, self._head, self._kept = asked, head, kept
        self._parts = Parts(reply_parser(asked, head))
        self._hides = ENCRYPTED in (asked.wire.include or ())
        self._number = 0

    def ended(self, choice: int) -> bool:
        return self._parts.ended

    def begin(self, usage: Usage) -> bytes:
        body = self._body("in_progress", None)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def event(self, choice: int, chunk: Chunk) -> bytes:
        return b"".join(map(self._step, self._parts.take(chunk)))

    def end(self, usage: Usage) -> bytes:
        body = self._ended(usage)
        # There is no event for a cancelled one, and "failed" is what clients stop at.
        name = {"completed": "completed", "incomplete": "incomplete"}.get(body.status, "failed")
        return self._event(f"response.{name}", response=body)

    def failure(self, error: Exception) -> bytes:
        said = error_body(error)[1]["error"]
        message = str(said["message"]) if isinstance(said, dict) else ""
        status = "cancelled" if isinstance(error, RequestCancelled) else "failed"
        return self._event("response.failed", response=self._body(status, None, ResponseFailure(code="server_error", message=message)))

    def take(self, choice: int, chunk: Chunk) -> None:
        self._parts.take(chunk)

    def whole(self, usage: Usage) -> bytes:
        return encode(self._ended(usage))

    def _ended(self, usage: Usage) -> ResponseBody:
        body = self._body(_STATUS_OF.get(self._parts.finish_reason or "", "completed"), usage)
        self._kept(body, self._head.prompt_token_ids, self._parts.token_ids)
        return body

    def _event(self, kind: str, /, **fields: object) -> bytes:
        payload = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return sse(payload, kind.encode())

    def _step(self, step: Step) -> bytes:
        part = step.part
        place = {"item_id": _PREFIX[part.kind] + part.id, "output_index": part.index}
        if part.kind == "call":
            return self._call_step(step, place)
        inner = {**place, "content_index": 0}
        kind = "reasoning_text" if part.kind == "reasoning" else "output_text"
        more: dict[str, object] = {"logprobs": ()} if part.kind == "text" else {}
        if step.what == "more":
            return self._event(f"response.{kind}.delta", **inner, delta=step.text, **more)
        if step.what == "begin":
            began = self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress", empty=True))
            return began + self._event("response.content_part.added", **inner, part=_content(part, ""))
        return (
            self._event(f"response.{kind}.done", **inner, text=part.text, **more)
            + self._event("response.content_part.done", **inner, part=_content(part, part.text))
            + self._event("response.output_item.done", output_index=part.index, item=self._item(part))
        )

    def _call_step(self, step: Step, place: dict[str, object]) -> bytes:
        part = step.part
        if step.what == "more":
            return self._event("response.function_call_arguments.delta", **place, delta=step.text)
        if step.what == "begin":
            return self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress", empty=True))
        done = self._event("response.function_call_arguments.done", **place, name=part.name, arguments=part.text)
        return done + self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def _item(self, part: Part, status: ItemStatus | None = None, *, empty: bool = False) -> OutputItem:
        """A part as an item; one that is `empty` has no content yet."""
        name, said = _PREFIX[part.kind] + part.id, status or self._status(part)
        if part.kind == "call":
            return CallItem(id=name, call_id=f"call_{part.id}", name=part.name, arguments="" if empty else part.text, status=said)
        if part.kind == "text":
            return MessageItem(id=name, status=said, content=() if empty else (OutputText(text=part.text),))
        return ReasoningItem(
            id=name, status=said, content=() if empty else (ReasoningText(text=part.text),),
            encrypted_content=hidden_reasoning(part.text) if self._hides and not empty else UNSET,
        )  # fmt: skip

    def _status(self, part: Part) -> ItemStatus:
        last = part is self._parts.all[-1]
        return "incomplete" if last and (self._parts.cut or self._parts.finish_reason in _STATUS_OF) else "completed"

    def _body(self, status: str, usage: Usage | None, error: ResponseFailure | None = None) -> ResponseBody:
        wire, head = self._asked.wire, self._head
        over = usage is not None or error is not None
        return ResponseBody(
            id=head.id, created_at=head.created, status=status, error=error,  # type: ignore[arg-type]  # one of the literals
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=wire.instructions, max_output_tokens=wire.max_output_tokens, model=head.model,
            output=tuple(map(self._item, self._parts.all)) if over else (),
            parallel_tool_calls=wire.parallel_tool_calls is not False, previous_response_id=wire.previous_response_id,
            reasoning={"effort": None if wire.reasoning is None else wire.reasoning.effort, "summary": None},
            store=wire.store is not False and wire.session is None, temperature=wire.temperature, top_p=wire.top_p,
            text={"format": (wire.text.format if wire.text is not None else None) or {"type": "text"}},
            tool_choice=wire.tool_choice or "auto", tools=tuple(wire.tools or ()), metadata=wire.metadata or {},
            usage=None if usage is None else self._usage(usage), session=head.left_at(self._parts.finish_reason),
        )  # fmt: skip

    def _usage(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=min(self._parts.reasoning_tokens, usage.completion_tokens)),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


def _content(part: Part, text: str) -> OutputText | ReasoningText:
    return ReasoningText(text=text) if part.kind == "reasoning" else OutputText(text=text)
