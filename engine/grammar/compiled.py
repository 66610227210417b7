"""Grammars of an engine: made off the loop from what requests ask for, and kept for the next request that asks for the same.

Holds one worker thread and the library's limits. The library is imported on that thread when it is first needed.

Invariants:
1. A grammar is compiled once however many requests wait for it; a request that leaves takes nothing from the others.
2. Kept grammars are bounded in number and in bytes of text; requests that wait to be compiled are bounded in number.
3. What one grammar may cost is bounded by counts: to compile it, to compute a mask, and the states it may hold.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from engine.errors import BadRequest, NotAdmitted
from engine.grammar.form import GRAMMAR_BYTES_MAX, Form
from engine.text.reply import ends_in_reasoning
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # an extra: whoever asks for no form needs none of it
    from llguidance import LLMatcher

    from engine.grammar.follower import Follower
    from engine.grammar.vocabulary import Vocabulary

__all__ = ["TAIL_TOKENS", "Grammars"]

TAIL_TOKENS = 16  # of a prompt, that show whether it ends inside the reasoning: a mark and blanks
_KEPT_MAX = 64
_KEPT_BYTES_MAX = 4 * 2**20
_WAITING_MAX = 64
# About 20 ms to compile, 7 ms and 2.5 ms a mask, and 50 MB of states, by the library's own rates; usual schemas need a hundredth.
_COMPILE_FUEL, _STEP_FUEL, _STEP_ITEMS, _STATES = 1_000_000, 100_000, 50_000, 50_000

_Compiled: TypeAlias = "LLMatcher | str"  # or what is wrong with its text


class Grammars:
    """Of one engine."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """Args: vocabulary: tokens the model knows. ends: ids that end a text."""
        self._tokenizer, self._size, self._ends = tokenizer, vocabulary, ends
        self._vocabulary: Vocabulary | None = None  # set by the worker
        self._worker: ThreadPoolExecutor | None = None
        self._found: OrderedDict[tuple[str, str], Future[_Compiled]] = OrderedDict()

    async def compiled(self, form: Form) -> "LLMatcher":
        """The form's grammar at its beginning.

        Raises: BadRequest: not a grammar, or the extra is not installed; NotAdmitted: too many wait to be compiled.
        """
        found = await self._compiled(form)
        if isinstance(found, str):
            raise BadRequest(f"{form.field}: {found}", field=form.field)
        return found

    def follower(self, grammar: "LLMatcher", form: Form, ends: Collection[int], prompt: Sequence[int]) -> "Follower":
        """Who follows one generation behind `prompt`. Raises FormBroken.

        Args: grammar: what `compiled` gave for the form. ends: ids that end the generation.
        """
        from engine.grammar.follower import Follower

        assert self._vocabulary is not None, "made before the first grammar"
        reasoning = ends_in_reasoning(self._tokenizer.decode(prompt[-TAIL_TOKENS:]))
        return Follower(self._vocabulary, grammar, form, ends, reasoning=reasoning)

    async def close(self) -> None:
        """Wait for the worker and let it go."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(worker.shutdown)

    async def _compiled(self, form: Form) -> _Compiled:
        if not self._tokenizer.available:
            raise BadRequest(f"{form.field} needs the model's tokenizer, which this one does not have", field=form.field)
        if len(form.grammar.encode()) > GRAMMAR_BYTES_MAX:
            raise BadRequest(f"{form.field} is longer than {GRAMMAR_BYTES_MAX} bytes as a grammar: ask for less", field=form.field)
        key = form.notation, form.grammar
        found = self._found.get(key)
        if found is None or found.cancelled():
            found = self._begin(form, key)
        self._found.move_to_end(key)
        return await asyncio.shield(asyncio.wrap_future(found))

    def _begin(self, form: Form, key: tuple[str, str]) -> "Future[_Compiled]":
        if find_spec("llguidance") is None:
            raise BadRequest(
                f"{form.field} needs the package llguidance beside this server: pip install 'forebay[grammar]'", field=form.field
            )  # fmt: skip
        if sum(not future.done() for future in self._found.values()) >= _WAITING_MAX:
            raise NotAdmitted(f"{_WAITING_MAX} grammars wait to be compiled; try later", retry_after_s=1.0)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        found = self._found[key] = self._worker.submit(self._compile, form)
        self._trim()
        return found

    def _trim(self) -> None:
        """Forget what was asked for longest ago; what is being compiled stays."""
        sizes = sum(len(text) for _, text in self._found)
        for key in list(self._found)[:-1]:
            if len(self._found) <= _KEPT_MAX and sizes <= _KEPT_BYTES_MAX:
                return
            if self._found[key].done():
                del self._found[key]
                sizes -= len(key[1])

    def _compile(self, form: Form) -> _Compiled:
        """On the worker: a grammar at its beginning, or what is wrong with it."""
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.gbnf_to_lark import any_to_lark

        from engine.grammar.vocabulary import Vocabulary

        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer, self._size, self._ends)
        grammar = form.grammar
        if form.notation == "ebnf":
            try:
                grammar = any_to_lark(grammar)
            except Exception as error:  # the library's own reader of GBNF, which raises what it likes
                return f"not a grammar: {_line(str(error))}"
        limits = LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS, max_lexer_states=_STATES
        )  # fmt: skip
        matcher = LLMatcher(self._vocabulary.library, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask costs most: copies begin with what it found
        for text in () if matcher.is_error() else _terminals(form):
            begun = LLMatcher(self._vocabulary.library, text, log_level=0, limits=limits)
            if not begun.is_error():
                begun.compute_bitmask()
            if begun.is_error():  # the generation would come to it
                return _line(begun.get_error())
        return _line(matcher.get_error()) if matcher.is_error() else matcher


def _terminals(form: Form) -> list[str]:
    """A grammar of each terminal that calls have for their raw values: what costs too much shows when one begins."""
    bodies = dict.fromkeys(re.findall(r"^[A-Z]\w*: (.*)$", form.grammar, re.M)) if form.calls else ()
    return [f"start: VALUE\nVALUE: {body}" for body in bodies]


def _line(message: str) -> str:
    """A message of the library on one line, without where in our grammar it was, what it quotes of that, and its own state."""
    message = message.split("<state>")[0].replace("NoExtensionBias", "no text is of this form")
    said = re.split(r"\n +\d+ \| ", re.sub(r"^at \d+\(\d+\): ", "", message))[0]
    return " ".join(said.split())[:300]
