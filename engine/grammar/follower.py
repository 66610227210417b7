"""Where one generation is in its form, and which tokens may come next.

Fed with the tokens that were sampled, in order, on the loop. A mask costs tens of microseconds as a rule; the library bounds the work of
one by counts (`compiled.py`), a few milliseconds at most.

Invariants:
1. `mask` allows at least one token as long as the form is not complete.
2. Text is free, or the grammar reads it; it passes from one to the other between two tokens.
"""

from collections.abc import Collection

import numpy
import torch
from llguidance import LLMatcher
from torch import Tensor

from engine.errors import FormBroken
from engine.grammar.form import CALL_MARK, REASONING_MARK, Form
from engine.grammar.vocabulary import Mask, Vocabulary, words_of

__all__ = ["Follower"]


class Follower:
    """Of one generation."""

    def __init__(self, vocabulary: Vocabulary, grammar: LLMatcher, form: Form, ends: Collection[int], *, reasoning: bool) -> None:
        """Args: grammar: at its beginning; copied. ends: ids that end this generation. reasoning: the prompt ends inside the reasoning.

        Raises: FormBroken: nothing can begin the form.
        """
        self._vocabulary, self._grammar, self._form = vocabulary, grammar, form
        self._repeats = form.begins == "at calls"
        self._end = (CALL_MARK if self._repeats else REASONING_MARK).encode()
        self._banned = (CALL_MARK.encode(),) if form.calls and not self._repeats else ()
        self._ends = words_of(ends, vocabulary.size)
        self._tail = b""  # of free text, as far as it may become a mark
        free = self._repeats or (form.begins == "behind reasoning" and reasoning)
        self._matcher = None if free else grammar.deep_copy()
        self._allowed = self._next()

    @property
    def mask(self) -> Tensor:
        """Which tokens may come next: int32 [(vocabulary + 31) // 32] on the CPU, a bit a token. A new tensor."""
        return torch.from_numpy(self._allowed.copy())

    def take(self, token: int) -> bool:
        """Read one sampled token, not one that ends the text. Returns whether the form is complete and nothing can follow.

        Raises: FormBroken.
        """
        if self._matcher is None:
            text = self._tail + self._vocabulary.bytes_of[token]
            if text.endswith(self._end):
                self._tail, self._matcher = b"", self._grammar.deep_copy()
            else:
                self._tail = self._vocabulary.tail(text, (self._end, *self._banned))
        elif not self._matcher.consume_token(token):
            raise self._broken(self._matcher.get_error())
        if self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error():
            if not self._repeats:
                return True
            self._matcher = None
        self._allowed = self._next()
        return not self._allowed.any()

    def _next(self) -> Mask:
        """The next mask. All zeros: the form is complete, and no token can say so."""
        if self._matcher is None:
            free = self._vocabulary.free(self._tail, self._end, self._banned)
            return free | self._ends if self._repeats else free & ~self._ends
        words = numpy.zeros(self._vocabulary.size // 32 + 1, dtype=numpy.int32)  # one bit more than there are tokens: the library's end
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise self._broken(self._matcher.get_error())
        mask = words[: len(self._vocabulary.text)] & self._vocabulary.text
        complete = self._matcher.is_accepting()
        mask = mask | self._ends if complete else mask & ~self._ends
        if not complete and not mask.any():
            raise self._broken("no token can come next")
        return mask

    def _broken(self, reason: str) -> FormBroken:
        reason = " ".join(reason.split())[:200]
        return FormBroken(
            f"{self._form.field}: the output cannot go on in its form: {reason}; ask for a simpler one", field=self._form.field
        )
