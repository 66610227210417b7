"""Facts set far back in a row and asked for later: rows whose right answer lies beyond any recency.

Holds: the wording of a fact and of its uses, and the weaving of both into a row. Does not know: streams, positions, training.

1. Insertions go after a token that ends a line, so that the text around them stays what the tokenizer would have made of it.
2. Each key is defined once, before its uses; a row's keys are distinct.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Fact", "Woven", "answer_of", "definition_of", "fact", "question_of", "weave"]

HEX = "0123456789abcdef"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Fact:
    """`key` and `value`, four hexadecimal digits each."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Woven:
    """tokens uint16 [tokens]; asked: (first, end) token ranges whose tokens answer a question, ascending."""

    tokens: npt.NDArray[np.uint16]
    asked: tuple[tuple[int, int], ...]


def fact(random: np.random.Generator) -> Fact:
    """A fresh fact."""
    digits = [HEX[digit] for digit in random.integers(0, 16, 7)]
    return Fact("".join(digits[:4]), "v" + "".join(digits[4:]))


def definition_of(fact: Fact) -> str:
    """The line that states a fact."""
    return f"KEY_{fact.key} = '{fact.value}'\n"


def question_of(fact: Fact, style: int) -> str:
    """The words up to the answer. style 0: a chat turn; 1: an assertion; 2: the definition again."""
    chat = f"<|user|>What is the value of KEY_{fact.key}?<|assistant|><think></think>"
    return (chat, f"assert KEY_{fact.key} == ", f"KEY_{fact.key} = ")[style]


def answer_of(fact: Fact, style: int) -> tuple[str, str]:
    """The answer itself and what closes it, cut where the tokenizer cuts: a quote and a line end are one token."""
    return (f"'{fact.value}'", "<|user|>\n") if style == 0 else (f"'{fact.value}", "'\n")


def _pieces(facts: Sequence[Fact], styles: Sequence[int], encode: Encode) -> list[tuple[list[int], int, int]]:
    """Tokens of each use, with the range of its answer."""
    pieces = []
    for one, style in zip(facts, styles, strict=True):
        before, (answer, close) = encode(question_of(one, style)), answer_of(one, style)
        wanted = encode(answer)
        pieces.append((before + wanted + encode(close), len(before), len(before) + len(wanted)))
    return pieces


def weave(
    text: npt.NDArray[np.uint16],
    line_end: npt.NDArray[np.bool_],
    random: np.random.Generator,
    encode: Encode,
    *,
    length: int,
    facts: int,
    defined_in: tuple[float, float],
    asked_in: tuple[float, float],
    chat_only: bool = False,
) -> Woven:
    """A row of `length` tokens: `text` (at least that long) with `facts` facts defined and asked once each.

    line_end bool [vocabulary]: tokens that end a line. defined_in, asked_in: parts of the text, as fractions, where definitions and
    uses go; a use never comes before its definition.
    """
    distinct: dict[str, Fact] = {}
    while len(distinct) < facts:
        one = fact(random)
        distinct[one.key] = one
    chosen = list(distinct.values())
    styles = [0 if chat_only else int(style) for style in random.choice(3, facts, p=(0.5, 0.2, 0.3))]
    uses = _pieces(chosen, styles, encode)
    definitions = [encode(definition_of(one)) for one in chosen]
    room = length - sum(map(len, definitions)) - sum(len(use[0]) for use in uses)
    assert room > 0, f"{facts} facts do not fit a row of {length} tokens"
    text = text[:room]
    ends = np.flatnonzero(line_end[text]) + 1
    ends = ends if len(ends) else np.asarray([room])
    inserts: list[tuple[int, int, int]] = []  # place in the text, order among those at one place, which piece
    for which in range(facts):
        define = ends[min(len(ends) - 1, int(np.searchsorted(ends, random.uniform(*defined_in) * room)))]
        ask = ends[min(len(ends) - 1, int(np.searchsorted(ends, random.uniform(*asked_in) * room)))]
        inserts += [(int(define), 0, which), (max(int(ask), int(define)), 1, which)]
    out: list[npt.NDArray[np.uint16]] = []
    asked, place, written = [], 0, 0
    for at, kind, which in sorted(inserts):
        piece, first, end = (definitions[which], 0, 0) if kind == 0 else uses[which]
        written += at - place
        out += [text[place:at], np.asarray(piece, np.uint16)]
        if kind == 1:
            asked.append((written + first, written + end))
        place, written = at, written + len(piece)
    return Woven(np.concatenate([*out, text[place:]]), tuple(asked))
