"""What the answers of both generating endpoints share: their head, counts, and a chunk's tokens on the wire.

Pure functions from `engine.chunk` values. Time, ids and order come from the caller. What a choice says is `chat_choice.py` and
`completion_choice.py`.

1. A stream is: for each choice its chunks, the first with what only comes once (a chat's role), the last with a finish reason; then,
   if asked for, one usage chunk with no choices.
2. A stream's chunks put together are the whole answer.
3. Logprobs are finite: a probability of zero is -9999, as OpenAI writes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from engine.api.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatLogprob,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    SessionState,
    TokenIds,
    TopLogprob,
    UsageCounts,
)  # fmt: skip
from engine.chunk import Chunk, TokenLogprob, Usage

__all__ = [
    "AnswerHead", "chat_answer", "chat_logprobs", "chat_usage_chunk", "completion_answer", "completion_logprobs",
    "completion_usage_chunk", "joined", "usage_counts",
]  # fmt: skip

_LOGPROB_MIN = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all choices and chunks of one answer share.

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
    prompt_token_ids: Sequence[int] = ()

    @property
    def usage(self) -> UnsetType | None:
        """Of every chunk of a stream but its last: null where there will be a usage chunk."""
        return None if self.include_usage else UNSET

    def left_at(self, finish_reason: str | None) -> SessionState | UnsetType:
        """The session, with the end of the answer."""
        return UNSET if self.session is None or finish_reason is None else self.session()

    def ids(self, ids: Sequence[int]) -> TokenIds:
        """Token ids, where they were asked for."""
        return tuple(ids) if self.return_token_ids else UNSET


def chat_usage_chunk(head: AnswerHead, usage: Usage) -> ChatChunk:
    """The chunk that ends a chat stream with `include_usage`: counts and no choice."""
    return ChatChunk(id=head.id, created=head.created, model=head.model, choices=(), usage=usage_counts(usage))


def chat_answer(head: AnswerHead, choices: Sequence[ChatChoice], usage: Usage) -> ChatAnswer:
    """A whole chat answer."""
    return ChatAnswer(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=tuple(choices),
        usage=usage_counts(usage),
        prompt_token_ids=head.ids(head.prompt_token_ids),
        session=head.left_at(choices[0].finish_reason),
    )


def completion_usage_chunk(head: AnswerHead, usage: Usage) -> CompletionAnswer:
    """The chunk that ends a completion stream with `include_usage`: counts and no choice."""
    return CompletionAnswer(id=head.id, created=head.created, model=head.model, choices=(), usage=usage_counts(usage))


def completion_answer(head: AnswerHead, choices: Sequence[CompletionChoice], usage: Usage) -> CompletionAnswer:
    """A whole completion."""
    return CompletionAnswer(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=tuple(choices),
        usage=usage_counts(usage),
        session=head.left_at(choices[0].finish_reason),
    )


def usage_counts(usage: Usage) -> UsageCounts:
    return UsageCounts(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=_drafted(usage) if usage.accepted_drafts or usage.refused_drafts else UNSET,
    )


def _drafted(usage: Usage) -> CompletionTokensDetails:
    return CompletionTokensDetails(
        accepted_prediction_tokens=usage.accepted_drafts, rejected_prediction_tokens=usage.refused_drafts,
        drafts_proposed=usage.drafts_proposed, drafts_accepted=usage.drafts_accepted,
    )  # fmt: skip


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one choice as one."""
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


def _finite(logprob: float) -> float:
    """Also for NaN, which compares false: JSON has no such number."""
    return logprob if logprob > _LOGPROB_MIN else _LOGPROB_MIN


def _bytes(head: AnswerHead, token: TokenLogprob) -> tuple[int, ...]:
    return tuple(head.token_bytes(token.token_id) if head.token_bytes else token.token.encode("utf-8", "replace"))


def chat_logprobs(head: AnswerHead, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
    """Of every token of the choice, those of its reasoning, calls and marks included; None where they were not asked for."""
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


def completion_logprobs(head: AnswerHead, tokens: Sequence[TokenLogprob], text_offset: int) -> CompletionLogprobs | None:
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
