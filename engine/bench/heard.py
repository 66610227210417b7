"""What one request of a load heard: when its tokens came, and what the server counted. Pure folding of (time, payload).

1. Tokens are counted by `usage`, never by events.
2. A stream without `[DONE]` or without usage, and one with an error, is a failed request and has no times.
"""

from dataclasses import dataclass

import msgspec

__all__ = ["Heard", "HeardReader", "StreamFailed"]

_DONE = b"[DONE]"


class StreamFailed(Exception):
    """A stream that is no answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One request. Times are seconds; `error` where it failed, and then nothing else counts.

    due_s: when it was to be sent, after the start of the run. gaps_s: between events that brought text or tokens.
    """

    due_s: float
    error: str | None = None
    first_s: float = 0.0  # from due to the first event with text or tokens
    total_s: float = 0.0  # from due to [DONE]
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def token_s(self) -> float:
        """Time a token behind the first."""
        return (self.total_s - self.first_s) / max(1, self.new_tokens - 1)


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Cached | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class HeardReader:
    """Takes the events of one stream in order. Times are of the clock that `due_s` is of."""

    def __init__(self, due_s: float) -> None:
        self._due_s = due_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._done_s: float | None = None
        self._gaps: list[float] = []
        self._ids: list[int] = []
        self._usage: _Usage | None = None
        self._decoder = msgspec.json.Decoder(_Event)

    def take(self, at_s: float, payload: bytes) -> None:
        """One event. Raises StreamFailed: an error, or no event of ours."""
        if payload == _DONE:
            self._done_s = at_s
            return
        try:
            event = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise StreamFailed(f"an event is not one of a completion: {error}") from error
        if event.error is not None:
            raise StreamFailed(f"the stream ended with an error: {msgspec.json.encode(event.error).decode()[:200]}")
        self._usage = event.usage or self._usage
        if not event.choices:
            return
        if self._first_s is None:
            self._first_s = at_s
        else:
            self._gaps.append(at_s - self._last_s)
        self._last_s = at_s
        for choice in event.choices:
            self._ids.extend(choice.token_ids or ())

    def heard(self) -> Heard:
        """The whole, once the stream has ended. Raises StreamFailed."""
        if self._done_s is None or self._first_s is None:
            raise StreamFailed("the stream ended without [DONE]" if self._first_s is not None else "the stream had no tokens")
        if self._usage is None:
            raise StreamFailed("the stream had no usage")
        details = self._usage.prompt_tokens_details
        return Heard(
            due_s=self._due_s, first_s=self._first_s - self._due_s, total_s=self._done_s - self._due_s, gaps_s=tuple(self._gaps),
            prompt_tokens=self._usage.prompt_tokens, cached_tokens=0 if details is None else details.cached_tokens,
            new_tokens=self._usage.completion_tokens, token_ids=tuple(self._ids),
        )  # fmt: skip
