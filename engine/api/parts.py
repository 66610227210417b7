"""A turn as parts one behind another: stretches of reasoning, of text, and calls. For endpoints whose answers are lists of such.

Holds the parser of the turn and the parts so far. Knows no shape of the wire.

1. One part is open at a time: the next one's beginning is its end.
2. A whole answer and its stream go through the same chunks here, so they have the same parts.
3. Of one chunk the rest of an open call comes first, then reasoning, then text, then new calls.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from engine.api.chat_choice import parted, turn_end
from engine.api.responses import StopReason
from engine.chunk import Chunk
from engine.text.reply import ReplyParser

__all__ = ["Part", "PartKind", "Parts", "Step"]

PartKind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Part:
    """One stretch. `id`: unlike every other's. `name`: of a call, whose text is that of its arguments."""

    index: int
    kind: PartKind
    id: str
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """What happened to a part: it began, `text` was added, or it ended."""

    what: Literal["begin", "more", "end"]
    part: Part
    text: str = ""


class Parts:
    """Of one turn."""

    def __init__(self, parser: ReplyParser) -> None:
        """Args: parser: of this turn, not used yet."""
        self.all: list[Part] = []
        self.token_ids: list[int] = []
        self.reasoning_tokens = 0  # until the first text or call; of a step that crosses it all or none
        self.finish_reason: str | None = None  # as a chat's
        self.stop_reason: StopReason = None
        self._parser = parser
        self._open: Part | None = None
        self._steps: list[Step] = []

    @property
    def ended(self) -> bool:
        """Whether the turn has all calls it may have."""
        return self._parser.ended

    @property
    def cut(self) -> bool:
        """Whether the turn broke off inside a call."""
        return self._parser.cut

    def take(self, chunk: Chunk) -> Sequence[Step]:
        """What comes of one more chunk; with the last one the open part ends."""
        self._steps = []
        piece = parted(self._parser, chunk)
        if self._open is not None and self._open.kind == "call" and piece.calls and piece.calls[0].name is None:
            self._add(self._open, piece.calls[0].arguments)
        if piece.reasoning:
            self._add(self._of_kind("reasoning"), piece.reasoning)
        if piece.content:
            self._add(self._of_kind("text"), piece.content)
        for call in piece.calls:
            if call.name is not None:
                self._add(self._begin("call", call.name), call.arguments)
        self.token_ids += chunk.token_ids
        if self.all and all(part.kind == "reasoning" for part in self.all):
            self.reasoning_tokens = len(self.token_ids)
        reason, stop = turn_end(self._parser, chunk)
        if reason is not None:
            self.finish_reason, self.stop_reason = reason, stop
            self._close()
        return self._steps

    def _of_kind(self, kind: PartKind) -> Part:
        return self._open if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: PartKind, name: str = "") -> Part:
        self._close()
        part = self._open = Part(len(self.all), kind, secrets.token_hex(12), name)
        self.all.append(part)
        self._steps.append(Step("begin", part))
        return part

    def _add(self, part: Part, text: str) -> None:
        if text:
            part.pieces.append(text)
            self._steps.append(Step("more", part, text))

    def _close(self) -> None:
        if self._open is not None:
            self._steps.append(Step("end", self._open))
            self._open = None
