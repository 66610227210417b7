"""Generated chunks as answers and stream chunks.

Pure functions from `engine.chunk` values. Time, ids and order come from the caller.

1. A stream is: chunks made with `first=True` once (a chat's carries the role), then the rest, the last with a finish reason, then, if
   asked for, one usage chunk with no choices.
2. The text of the stream's chunks put together is the text of the whole answer.
3. Logprobs are finite: a probability of zero is -9999, as OpenAI writes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from engine.api.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatReply,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    Delta,
    PromptTokensDetails,
    SessionState,
    StopReason,
    TokenIds,
    TopLogprob,
    UsageCounts,
)  # fmt: skip
from engine.chunk import Chunk, TokenLogprob, Usage

__all__ = [
    "AnswerHead", "chat_answer", "chat_chunk", "chat_usage_chunk", "completion_answer", "completion_chunk", "completion_usage_chunk",
    "token_characters", "usage_counts",
]  # fmt: skip

_LOGPROB_MIN = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of one answer share.

    `created`: seconds since the epoch. `logprobs`: whether they were asked for (a chunk without tokens then has none all the same).
    `token_bytes`: a token's own bytes, for the `bytes` of chat logprobs; without it they are those of the token's text.
    `session`: where the turn leaves the session it was asked in, told with the end of the answer.
    """

    id: str
    model: str
    created: int
    logprobs: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    token_bytes: Callable[[int], bytes] | None = None
    session: Callable[[], SessionState] | None = None


def chat_chunk(head: AnswerHead, chunk: Chunk, *, first: bool = False, prompt_token_ids: Sequence[int] = ()) -> ChatChunk:
    """One chunk of a chat stream; `prompt_token_ids` are sent with the first one, if asked for."""
    choice = ChatChunkChoice(
        delta=Delta(role="assistant" if first else UNSET, content=chunk.text),
        logprobs=_chat_logprobs(head, chunk.logprobs),
        finish_reason=chunk.finish_reason,
        stop_reason=_stop_reason(chunk),
        token_ids=_ids(head, chunk.token_ids),
    )
    return ChatChunk(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=(choice,),
        usage=None if head.include_usage else UNSET,
        prompt_token_ids=_ids(head, prompt_token_ids) if first else UNSET,
        session=_session(head, chunk),
    )


def chat_usage_chunk(head: AnswerHead, usage: Usage) -> ChatChunk:
    """The chunk that ends a chat stream with `include_usage`: counts and no choice."""
    return ChatChunk(id=head.id, created=head.created, model=head.model, choices=(), usage=usage_counts(usage))


def chat_answer(head: AnswerHead, chunks: Sequence[Chunk], *, prompt_token_ids: Sequence[int] = ()) -> ChatAnswer:
    """A whole chat answer from all of its chunks, at least one."""
    whole = _joined(chunks)
    choice = ChatChoice(
        message=ChatReply(content=whole.text),
        logprobs=_chat_logprobs(head, whole.logprobs),
        finish_reason=whole.finish_reason,
        stop_reason=_stop_reason(whole),
        token_ids=_ids(head, whole.token_ids),
    )
    return ChatAnswer(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=(choice,),
        usage=usage_counts(whole.usage),
        prompt_token_ids=_ids(head, prompt_token_ids),
        session=_session(head, whole),
    )


def completion_chunk(
    head: AnswerHead, chunk: Chunk, *, first: bool = False, text_offset: int = 0, prompt_token_ids: Sequence[int] = ()
) -> CompletionAnswer:
    """One chunk of a completion stream; `text_offset` is the sum of `token_characters` over the chunks before it."""
    choice = CompletionChoice(
        text=chunk.text,
        logprobs=_completion_logprobs(head, chunk.logprobs, text_offset),
        finish_reason=chunk.finish_reason,
        stop_reason=_stop_reason(chunk),
        token_ids=_ids(head, chunk.token_ids),
        prompt_token_ids=_ids(head, prompt_token_ids) if first else UNSET,
    )
    return CompletionAnswer(
        id=head.id, created=head.created, model=head.model, choices=(choice,), usage=None if head.include_usage else UNSET,
        session=_session(head, chunk),
    )  # fmt: skip


def completion_usage_chunk(head: AnswerHead, usage: Usage) -> CompletionAnswer:
    """The chunk that ends a completion stream with `include_usage`: counts and no choice."""
    return CompletionAnswer(id=head.id, created=head.created, model=head.model, choices=(), usage=usage_counts(usage))


def completion_answer(head: AnswerHead, chunks: Sequence[Chunk], *, prompt_token_ids: Sequence[int] = ()) -> CompletionAnswer:
    """A whole completion from all of its chunks, at least one."""
    whole = _joined(chunks)
    choice = CompletionChoice(
        text=whole.text,
        logprobs=_completion_logprobs(head, whole.logprobs, 0),
        finish_reason=whole.finish_reason,
        stop_reason=_stop_reason(whole),
        token_ids=_ids(head, whole.token_ids),
        prompt_token_ids=_ids(head, prompt_token_ids),
    )
    return CompletionAnswer(
        id=head.id, created=head.created, model=head.model, choices=(choice,), usage=usage_counts(whole.usage),
        session=_session(head, whole),
    )  # fmt: skip


def _session(head: AnswerHead, chunk: Chunk) -> SessionState | UnsetType:
    return UNSET if head.session is None or chunk.finish_reason is None else head.session()


def usage_counts(usage: Usage) -> UsageCounts:
    drafts = usage.accepted_drafts, usage.refused_drafts
    return UsageCounts(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=_drafted(*drafts) if any(drafts) else UNSET,
    )


def _drafted(accepted: int, refused: int) -> CompletionTokensDetails:
    return CompletionTokensDetails(accepted_prediction_tokens=accepted, rejected_prediction_tokens=refused)


def token_characters(chunk: Chunk) -> int:
    """Characters of the chunk's token texts: by how much `text_offset` moves on."""
    return sum(len(token.token) for token in chunk.logprobs)


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    assert chunks, "an answer has at least one chunk"
    last = chunks[-1]
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        usage=last.usage,
        logprobs=tuple(token for chunk in chunks for token in chunk.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _ids(head: AnswerHead, ids: Sequence[int]) -> TokenIds:
    return tuple(ids) if head.return_token_ids else UNSET


def _stop_reason(chunk: Chunk) -> StopReason:
    return UNSET if chunk.finish_reason is None else chunk.stop_reason


def _finite(logprob: float) -> float:
    """Also for NaN, which compares false: JSON has no such number."""
    return logprob if logprob > _LOGPROB_MIN else _LOGPROB_MIN


def _bytes(head: AnswerHead, token: TokenLogprob) -> tuple[int, ...]:
    return tuple(head.token_bytes(token.token_id) if head.token_bytes else token.token.encode("utf-8", "replace"))


def _chat_logprobs(head: AnswerHead, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
    if not head.logprobs:
        return None
    content = (
        ChatLogprob(
            token=token.token,
            logprob=_finite(token.logprob),
            bytes=_bytes(head, token),
            top_logprobs=tuple(TopLogprob(token=top.token, logprob=_finite(top.logprob), bytes=_bytes(head, top)) for top in token.top),
        )
        for token in tokens
    )
    return ChatLogprobs(content=tuple(content))


def _completion_logprobs(head: AnswerHead, tokens: Sequence[TokenLogprob], text_offset: int) -> CompletionLogprobs | None:
    """The chosen token is always in its own `top_logprobs`, so these may hold one more than was asked for."""
    if not head.logprobs:
        return None
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token.token)
    tops: list[dict[str, float]] = []
    for token in tokens:
        top: dict[str, float] = {}
        for candidate in (*token.top, token):  # two ids may share a text: the likelier keeps it
            top.setdefault(candidate.token, _finite(candidate.logprob))
        tops.append(top)
    return CompletionLogprobs(
        tokens=tuple(token.token for token in tokens),
        token_logprobs=tuple(_finite(token.logprob) for token in tokens),
        top_logprobs=tuple(tops),
        text_offset=tuple(offsets),
    )
