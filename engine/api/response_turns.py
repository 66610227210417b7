"""Responses that are kept, and the prompt of a turn that goes on from one.

Holds answers by namespace and id, with their conversations and token ids. Knows neither HTTP nor the engine: the rows of a conversation are
stored histories like all others, and the token ids kept here are what finds them again.

1. Going on from a response with the same instructions and tools continues its very tokens, reasoning included. With others the
   conversation is rendered anew.
2. A response may be gone on from any number of times; none of them sees another.
3. What a namespace keeps is bounded in bytes, the least recently used go first, and everything goes when its time has come.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.api.requests import ChatMessage
from engine.api.response_requests import InputItem, ResponsesTurn, to_chat_messages
from engine.api.response_shapes import ResponseBody
from engine.api.responses import encode
from engine.api.tools import shown_tools
from engine.api.translate import to_messages
from engine.errors import BadRequest, shown
from engine.protocol import Message

__all__ = ["KeptResponse", "KeptResponses", "UnknownResponse", "kept_turn", "response_prompt", "tokens_before"]

_TOKEN_BYTES = 4


class UnknownResponse(BadRequest):
    """No response of that id is kept."""

    status = 404
    kind = "not_found_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        if field is not None:
            self.code = "previous_response_not_found"  # clients send the whole conversation on it


@dataclass(slots=True)
class KeptResponse:
    """One response. `items`: the whole conversation, its own output included; `count`: how many of `token_ids` are its own."""

    body: bytes
    input: list[InputItem]
    items: list[InputItem]
    instructions: str | None
    tools: list[dict[str, object]]
    token_ids: "array[int]"  # responses that go on from one another share an array, as far as they have the same tokens
    count: int
    bytes: int  # that it adds to what is kept
    kept_at: float = 0.0


class KeptResponses:
    """Of one namespace. Loop only."""

    def __init__(self, bytes_max: int, age_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Args: bytes_max: 0: none are kept. age_s: 0: for ever. now: seconds."""
        self._bytes_max, self._age_s, self._now = bytes_max, age_s, now
        self._by_id: OrderedDict[str, KeptResponse] = OrderedDict()  # the least recently used first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def keep(self, response_id: str, kept: KeptResponse) -> None:
        """Add one; others leave for it. One that is larger than all the room is not kept."""
        if kept.bytes > self._bytes_max:
            return
        kept.kept_at = self._now()
        self._by_id[response_id] = kept
        self.bytes += kept.bytes
        while self.bytes > self._bytes_max:
            self._drop(next(iter(self._by_id)))

    def find(self, response_id: str, field: str | None = None) -> KeptResponse:
        """One, which counts as a use of it. Raises UnknownResponse."""
        kept = self._by_id.get(response_id)
        if kept is not None and self._age_s and self._now() - kept.kept_at >= self._age_s:
            self._drop(response_id)
            kept = None
        if kept is None:
            raise UnknownResponse(f"no response {shown(response_id)} is kept; it may have been made with store false, or left", field=field)
        self._by_id.move_to_end(response_id)
        return kept

    def remove(self, response_id: str) -> None:
        """Forget one. Raises UnknownResponse."""
        self.find(response_id)
        self._drop(response_id)

    def expire(self) -> None:
        """Forget all whose time has come."""
        now = self._now()
        for response_id in [name for name, kept in self._by_id.items() if self._age_s and now - kept.kept_at >= self._age_s]:
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self.bytes -= self._by_id.pop(response_id).bytes


def _before(asked: ResponsesTurn, kept: KeptResponses) -> KeptResponse | None:
    """What the request goes on from. Raises UnknownResponse."""
    name = asked.wire.previous_response_id
    return None if name is None else kept.find(name, "previous_response_id")


def _goes_on(asked: ResponsesTurn, before: KeptResponse) -> bool:
    """Whether the tokens of `before` are how the request's conversation begins."""
    return asked.wire.instructions == before.instructions and _tools(asked) == before.tools


def _tools(asked: ResponsesTurn) -> list[dict[str, object]]:
    return [dict(tool) for tool in shown_tools(asked.tools, asked.tool_choice)]


def tokens_before(asked: ResponsesTurn, kept: KeptResponses) -> "array[int]":
    """Token ids that the request's new messages go on from; none where everything is rendered anew. Raises UnknownResponse."""
    before = _before(asked, kept)
    return before.token_ids[: before.count] if before is not None and _goes_on(asked, before) else array("i")


def response_prompt(asked: ResponsesTurn, kept: KeptResponses) -> list[Message]:
    """The messages to render behind `tokens_before`. Raises UnknownResponse, BadRequest."""
    before = _before(asked, kept)
    if before is not None and _goes_on(asked, before):
        return to_messages(asked)
    earlier = [] if before is None else to_chat_messages(before.items)
    if asked.wire.instructions is not None:
        earlier = [ChatMessage(role="system", content=asked.wire.instructions), *earlier]
    return to_messages(msgspec.structs.replace(asked, messages=[*earlier, *asked.messages]))


def kept_turn(
    asked: ResponsesTurn, body: ResponseBody, prompt_ids: Sequence[int], answer_ids: Sequence[int], kept: KeptResponses
) -> None:  # fmt: skip
    """Keep an ended response, if it is to be and may be gone on from.

    Args: prompt_ids: of its whole prompt, which begins with `tokens_before`.
    """
    if not body.store:
        return
    try:
        before = _before(asked, kept)
    except BadRequest:  # its time came while this one ran; what it said is in the tokens, and not in the items any more
        return
    output = msgspec.convert(msgspec.to_builtins(body.output), list[InputItem])
    encoded = encode(body)
    ids, added = _extended(before if before is not None and _goes_on(asked, before) else None, prompt_ids, answer_ids)
    kept.keep(
        body.id,
        KeptResponse(
            body=encoded, input=asked.items, items=[*(() if before is None else before.items), *asked.items, *output],
            instructions=asked.wire.instructions, tools=_tools(asked), token_ids=ids, count=len(prompt_ids) + len(answer_ids),
            bytes=2 * len(encoded) + len(msgspec.json.encode(asked.items)) + _TOKEN_BYTES * added + 1_024,
        ),
    )  # fmt: skip


def _extended(before: KeptResponse | None, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> "tuple[array[int], int]":
    """An array that begins with both, and how many were added for it: that of `before`, with which they begin, where it ends there too."""
    if before is None:
        ids = array("i", prompt_ids)
    elif before.count == len(before.token_ids):
        ids = before.token_ids
        ids.extend(prompt_ids[before.count :])
    else:  # another response went on from it
        ids = before.token_ids[: before.count]
        ids.extend(prompt_ids[before.count :])
    ids.extend(answer_ids)
    added = len(ids) - (before.count if before is not None and ids is before.token_ids else 0)
    return ids, added
