"""One choice of a completion, from its chunks, as stream chunks or whole; with `echo` the prompt's text before it."""

from msgspec import UNSET

from engine.api.chunks import AnswerHead, completion_logprobs, joined
from engine.api.responses import CompletionAnswer, CompletionChoice
from engine.chunk import Chunk

__all__ = ["CompletionChoiceWriter"]


class CompletionChoiceWriter:
    """Either `event` is called for every chunk, or `take` for every one and `choice` at the end."""

    def __init__(self, head: AnswerHead, *, index: int = 0, echo: str = "") -> None:
        self._head, self._index, self._echo = head, index, echo
        self._begun = False
        self._text_offset = 0
        self._chunks: list[Chunk] = []

    @property
    def ended(self) -> bool:
        """A completion ends with its last chunk."""
        return False

    def event(self, chunk: Chunk) -> CompletionAnswer:
        """The chunk as the next one of a stream."""
        head, first, self._begun = self._head, not self._begun, True
        choice = self._choice(chunk, first=first, text_offset=self._text_offset)
        self._text_offset += sum(len(token.token) for token in chunk.logprobs)
        return CompletionAnswer(
            id=head.id, created=head.created, model=head.model, choices=(choice,), usage=head.usage,
            session=head.left_at(chunk.finish_reason),
        )  # fmt: skip

    def take(self, chunk: Chunk) -> None:
        """One more chunk of a whole answer."""
        self._chunks.append(chunk)

    def choice(self) -> CompletionChoice:
        """The whole choice from what was taken, at least one chunk."""
        return self._choice(joined(self._chunks), first=True, text_offset=0)

    def _choice(self, chunk: Chunk, *, first: bool, text_offset: int) -> CompletionChoice:
        head = self._head
        return CompletionChoice(
            index=self._index,
            text=self._echo + chunk.text if first else chunk.text,
            logprobs=completion_logprobs(head, chunk.logprobs, text_offset),
            finish_reason=chunk.finish_reason,
            stop_reason=UNSET if chunk.finish_reason is None else chunk.stop_reason,
            token_ids=head.ids(chunk.token_ids),
            prompt_token_ids=head.ids(head.prompt_token_ids) if first else UNSET,
        )
