"""Token ids to text, a few at a time.

Knows no stop strings (`stop.py`). Cost is linear: every token's bytes are decoded once.

1. The pieces put together equal the whole output decoded at once.
2. A character comes out with the token that completes it; an incomplete one is held, never shown as U+FFFD, until `flush`.
3. Bytes that can no longer become a character (and only those) come out as U+FFFD, as when decoding at once.
"""

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """The text of one generation. With an absent tokenizer every text is empty."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        """Args: skip_special: leave out special tokens; they are kept by default, because parsers need them."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    @property
    def characters(self) -> int:
        """Characters given out so far: where the next token's text begins."""
        return self._characters

    @property
    def held(self) -> bool:
        """Whether bytes of an incomplete character wait for the next token."""
        return bool(self._decoder.getstate()[0])

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """For each token, the text that it completed: "" while a character is incomplete."""
        return [self._piece(token_id) for token_id in token_ids]

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens completed."""
        return "".join(map(self._piece, token_ids))

    def flush(self) -> str:
        """What is held when the generation ends: U+FFFD for an incomplete character, else ""."""
        return self._count(self._decoder.decode(b"", final=True))

    def _piece(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._count(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _count(self, text: str) -> str:
        self._characters += len(text)
        return text
