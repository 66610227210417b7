"""One choice of a chat answer, from its chunks: reasoning, content and tool calls, as stream chunks or whole.

Holds the parser of the turn. Ids of calls come from the caller.

1. `finish_reason` is `tool_calls` where the model itself ended its turn and the turn has calls, or has all calls it may have. A turn that
   its length or a stop text cut off says so, whatever it has called.
2. A choice that has `ended` wants no further chunk.
"""

from collections.abc import Callable

from msgspec import UNSET

from engine.api.chunks import AnswerHead, chat_logprobs, joined
from engine.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatReply,
    Delta,
    Function,
    FunctionDelta,
    ReplyCall,
    StopReason,
    ToolCallDelta,
)  # fmt: skip
from engine.chunk import Chunk
from engine.text.reply import CallPiece, ReplyParser, ReplyPiece

__all__ = ["ChatChoiceWriter", "parted", "turn_end"]


def parted(parser: ReplyParser, chunk: Chunk) -> ReplyPiece:
    """What a chunk brought, and with the last one what the parser held back."""
    piece = parser.push(chunk.text)
    if chunk.finish_reason is None:
        return piece
    return piece.plus(parser.flush(complete=chunk.finish_reason == "stop" and not isinstance(chunk.stop_reason, str)))


def turn_end(parser: ReplyParser, chunk: Chunk) -> tuple[str | None, StopReason]:
    """The finish reason of a turn whose `chunk` was parted, None while it goes on, and what it stopped at."""
    if parser.ended:
        return "tool_calls", None
    if chunk.finish_reason is None:
        return None, UNSET
    called = chunk.finish_reason == "stop" and parser.calls > 0 and not parser.cut
    return "tool_calls" if called else chunk.finish_reason, chunk.stop_reason


class ChatChoiceWriter:
    """Either `event` is called for every chunk, or `take` for every one and `choice` at the end."""

    def __init__(self, head: AnswerHead, parser: ReplyParser, new_call_id: Callable[[], str], *, index: int = 0) -> None:
        """Args: parser: of this turn, not used yet. new_call_id: a different id every time."""
        self._head, self._index, self._parser, self._new_call_id = head, index, parser, new_call_id
        self._usage = head.usage
        self._begun = False
        self._chunks: list[Chunk] = []
        self._pieces: list[ReplyPiece] = []

    @property
    def ended(self) -> bool:
        """Whether the turn has all calls it may have."""
        return self._parser.ended

    def event(self, chunk: Chunk) -> ChatChunk:
        """The chunk as the next one of a stream."""
        head, first, self._begun = self._head, not self._begun, True
        piece = parted(self._parser, chunk)
        reason, stop_reason = turn_end(self._parser, chunk)
        alone = not piece.content and (piece.reasoning or piece.calls)
        choice = ChatChunkChoice(
            index=self._index,
            delta=Delta(
                role="assistant" if first else UNSET,
                reasoning_content=piece.reasoning or UNSET,
                content=UNSET if alone else piece.content,
                tool_calls=tuple(map(self._call_delta, piece.calls)) if piece.calls else UNSET,
            ),
            logprobs=chat_logprobs(head, chunk.logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
            token_ids=head.ids(chunk.token_ids),
        )
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=(choice,),
            usage=self._usage,
            prompt_token_ids=head.ids(head.prompt_token_ids) if first else UNSET,
            session=head.left_at(reason),
        )

    def take(self, chunk: Chunk) -> None:
        """One more chunk of a whole answer."""
        self._chunks.append(chunk)
        self._pieces.append(parted(self._parser, chunk))

    def choice(self) -> ChatChoice:
        """The whole choice from what was taken, at least one chunk."""
        whole = joined(self._chunks)
        reason, stop_reason = turn_end(self._parser, whole)
        content = "".join(piece.content for piece in self._pieces)
        calls = self._whole_calls()
        return ChatChoice(
            index=self._index,
            message=ChatReply(
                content=content if content or not calls else None,
                reasoning_content="".join(piece.reasoning for piece in self._pieces) or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=chat_logprobs(self._head, whole.logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
            token_ids=self._head.ids(whole.token_ids),
        )

    def _call_delta(self, call: CallPiece) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
        function = FunctionDelta(name=call.name, arguments=call.arguments)
        return ToolCallDelta(index=call.index, id=self._new_call_id(), type="function", function=function)

    def _whole_calls(self) -> tuple[ReplyCall, ...]:
        names: list[str] = []
        arguments: list[list[str]] = []
        for call in (call for piece in self._pieces for call in piece.calls):
            if call.name is not None:
                names.append(call.name)
                arguments.append([])
            arguments[call.index].append(call.arguments)
        return tuple(
            ReplyCall(id=self._new_call_id(), function=Function(name=name, arguments="".join(parts)))
            for name, parts in zip(names, arguments, strict=True)
        )
