"""One measured answer: what a stream of server-sent events said, and when.

Pure folding of (time, payload); knows no HTTP. Times are seconds of one monotonic clock.

Invariants:
1. Tokens are counted by the server's usage, never by events; the ids that came must be as many.
2. Speed is (tokens of usage - tokens in the first event that carried any) / (time of [DONE] - time of that event), stalls included.
3. An answer that ended early, with an error, or without usage is a failed run, never a fast one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ForebayError

__all__ = ["Answer", "AnswerReader", "Events", "RunFailed"]

_DONE = b"[DONE]"


class RunFailed(ForebayError):
    """A run gave no measurement; the message says why."""

    kind = "run_failed"


class Events:
    """Splits bytes into the payloads of server-sent events, wherever the bytes were cut."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Payloads that are complete now."""
        start = max(0, len(self._rest) - 1)  # the end of an event may lie across two pieces
        self._rest += piece
        found = []
        while (end := self._rest.find(b"\n\n", start)) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + 2]
            start = 0
            if event.startswith(b"data: "):
                found.append(event.removeprefix(b"data: "))
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer to one request."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    first_event_tokens: int
    first_token_s: float  # from the request to the first event with tokens
    decode_s: float  # from that event to [DONE]

    @property
    def sha256(self) -> str:
        """Of all ids and all text."""
        whole = json.dumps([self.token_ids, self.text], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def tokens_per_second(self) -> float:
        """See invariant 2; finite and positive."""
        return (len(self.token_ids) - self.first_event_tokens) / self.decode_s


class AnswerReader:
    """Takes the events of one completion stream in order."""

    def __init__(self, asked_at_s: float) -> None:
        self._asked_at_s = asked_at_s
        self._first_at_s = 0.0
        self._done_at_s: float | None = None
        self._first_event_tokens = 0
        self._prompt: Sequence[int] = ()
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def take(self, at_s: float, payload: bytes) -> None:
        """One event. Raises RunFailed for an error event or one that is no JSON object."""
        if self._done_at_s is not None:
            raise RunFailed("the stream went on after [DONE]")
        if payload == _DONE:
            self._done_at_s = at_s
            return
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise RunFailed(f"an event is not JSON: {payload[:80]!r}") from error
        if not isinstance(event, dict) or "error" in event:
            error_fields = event.get("error") if isinstance(event, dict) else None
            said = error_fields.get("message") if isinstance(error_fields, dict) else None
            raise RunFailed(f"the stream ended with an error: {said or payload[:80]!r}")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._take_choice(at_s, choice)

    def _take_choice(self, at_s: float, choice: dict[str, Any]) -> None:
        ids = choice.get("token_ids") or []
        if ids and not self._tokens:
            self._first_at_s, self._first_event_tokens = at_s, len(ids)
        self._prompt = choice.get("prompt_token_ids") or self._prompt
        self._tokens.extend(ids)
        self._texts.append(choice.get("text") or "")
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self, new_tokens: int) -> Answer:
        """The whole, once the stream has ended. Raises RunFailed unless it ended by itself after exactly `new_tokens` tokens."""
        if self._done_at_s is None:
            raise RunFailed(f"the stream ended without [DONE], after {len(self._tokens)} tokens")
        if self._usage is None:
            raise RunFailed("the stream had no usage")
        counted = self._usage["completion_tokens"]
        if not (counted == len(self._tokens) == new_tokens):
            raise RunFailed(f"{new_tokens} tokens were asked for, usage counts {counted} and {len(self._tokens)} came")
        if self._finish_reason != "length":
            raise RunFailed(f"the answer finished with {self._finish_reason!r}, not 'length'")
        decode_s = self._done_at_s - self._first_at_s
        if decode_s <= 0 or self._first_event_tokens >= counted:
            raise RunFailed(f"all {counted} tokens came at once: nothing to measure; ask for more --new-tokens")
        return Answer(
            prompt_token_ids=tuple(self._prompt),
            token_ids=tuple(self._tokens),
            text="".join(self._texts),
            prompt_tokens=self._usage["prompt_tokens"],
            first_event_tokens=self._first_event_tokens,
            first_token_s=self._first_at_s - self._asked_at_s,
            decode_s=decode_s,
        )
