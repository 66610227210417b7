"""A model's tokens as the grammar library sees them, and which of them may come in free text before a mark.

Built once an engine, on a thread: a pass over the vocabulary. Knows no requests.

1. Marks of reasoning and calls are ordinary text here, whatever the tokenizer calls them: grammars spell them. All other special tokens,
   and tokens that end a text, are outside every grammar.
2. A mark that ends free text is the end of a token, so that what follows it begins with the next: tokens that would run past it are out.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import llguidance
import numpy
from llguidance import TokenizerWrapper
from numpy.typing import NDArray

from engine.text.tokenizer import Tokenizer

__all__ = ["Mask", "Vocabulary", "words_of"]

Mask = NDArray[numpy.int32]  # [(vocabulary + 31) // 32]: token t may come where bit t % 32 of word t // 32 is set

_MARKS = tuple(
    f"<{slash}{name}>".encode()
    for name in ("think", "tool_call", "arg_key", "arg_value", "tool_response")
    for slash in ("", "/")
)  # fmt: skip
_STATES_MAX = 256


def words_of(token_ids: Iterable[int], vocabulary: int) -> Mask:
    """A mask that allows these tokens; ids outside the vocabulary are none."""
    bits = numpy.zeros(-(-vocabulary // 32) * 32, dtype=numpy.uint8)
    bits[[token for token in token_ids if 0 <= token < vocabulary]] = 1
    return numpy.packbits(bits, bitorder="little").view(numpy.int32)


class Vocabulary:
    """The tokens of one model. Building it takes about a second for 150,000 tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """Args: vocabulary: tokens the model knows, which may be more than the tokenizer's. ends: ids that end a text."""
        self.size = vocabulary
        self.bytes_of = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        special = {token for token in range(vocabulary) if tokenizer.is_special(token) and self.bytes_of[token] not in _MARKS} | set(ends)
        self._special = sorted(token for token in special if token < vocabulary)
        wrapped = TokenizerWrapper(_Wrapped(tokenizer.encode, self.bytes_of, self._special, vocabulary))
        self.library = llguidance.LLTokenizer(wrapped, n_vocab=vocabulary + 1, eos_token=vocabulary)
        kept = (token for token in range(vocabulary) if self.bytes_of[token] and token not in special)
        self._by_bytes = sorted((self.bytes_of[token], token) for token in kept)
        self._texts = [text for text, _ in self._by_bytes]
        self._opening = [(text, token) for text, token in self._by_bytes if b"<" in text]
        self.text = words_of((token for _, token in self._by_bytes), vocabulary)
        self.free = lru_cache(_STATES_MAX)(self._free)

    def tail(self, text: bytes, marks: Sequence[bytes]) -> bytes:
        """The end of `text` that may become a mark."""
        start = text.rfind(b"<")
        found = text[start:] if start >= 0 else b""
        return found if any(mark.startswith(found) and mark != found for mark in marks) else b""

    def _free(self, tail: bytes, end: bytes, banned: tuple[bytes, ...]) -> Mask:
        """Tokens of free text behind `tail` that do not run past the mark `end` and complete none that is banned. Read only."""
        out = {token for text, token in self._opening if _runs_past(text, end) or any(mark in text for mark in banned)}
        if tail and end.startswith(tail):
            rest = end[len(tail) :]
            out.update(token for text, token in self._beginning(rest) if len(text) > len(rest))
        for mark in banned:
            if tail and mark.startswith(tail):
                out.update(token for _, token in self._beginning(mark[len(tail) :]))
        mask: Mask = self.text & ~words_of(out, self.size)
        mask.flags.writeable = False
        return mask

    def _beginning(self, start: bytes) -> Iterable[tuple[bytes, int]]:
        """Tokens whose bytes begin so."""
        place = bisect_left(self._texts, start)
        while place < len(self._texts) and self._texts[place].startswith(start):
            yield self._by_bytes[place]
            place += 1


def _runs_past(text: bytes, mark: bytes) -> bool:
    return mark in text and text.index(mark) + len(mark) < len(text)


class _Wrapped:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, encode: Callable[[str], list[int]], bytes_of: Sequence[bytes], special: Sequence[int], end: int) -> None:
        self.tokens = [*bytes_of, b"<end of the form>"]  # the last one stands for the end, which each request has its own tokens for
        self.special_token_ids = [*special, end]
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
