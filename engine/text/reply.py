"""An assistant's turn as it is generated, parted into reasoning, content and tool calls.

    reasoning</think>content<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call><tool_call>...

Fed with text in pieces; knows no tokens, no HTTP, and of the tools only what kinds of values their arguments have.

1. What comes out, put together, does not depend on how the text was cut into pieces: a whole answer and its stream say the same.
2. Nothing is lost but the marks, and blanks that stand alone before a mark: what does not become a call is text, its marks included.
3. A call begins to come out when nothing but a value can follow: its name, a whole key, and the mark of a value; or its end. Up to there
   a malformed one is text. Later it is too late for that: what breaks off, or goes on as no call does, leaves arguments that are no whole
   JSON, so that nobody takes them for what was meant, and what follows is text.
4. Strings come out as they are written, escaped for JSON; other values when they are whole. A call's pieces put together are one object.
5. A call may begin inside the reasoning, which goes on behind it: only `</think>` ends it.

Chosen: marks are found in the text, not by token ids. Some tokenizers have no ids for them, and a mark that was spelled in characters is
the model's word too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeVar

import msgspec

from engine.text.argument_kinds import ToolSchemas, argument_json, is_json_string

__all__ = ["CallPiece", "ReplyParser", "ReplyPiece", "ends_in_reasoning"]

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_MARK_MAX = len(_VALUE_END)
_Found = TypeVar("_Found")
_HEAD_MAX = 1_024  # characters of a name, a key and the blanks around them; longer ones are no call


def ends_in_reasoning(prompt: str) -> bool:
    """Whether what follows this end of a prompt begins inside the reasoning."""
    return prompt.rstrip().endswith(_THINK)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of one call. `name`: with its first piece only. `arguments`: more of the JSON text of an object."""

    index: int
    name: str | None
    arguments: str


class ReplyPiece(NamedTuple):  # not a frozen dataclass, which is slower to make: there is one a token
    """What a piece of text brought."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def plus(self, more: "ReplyPiece") -> "ReplyPiece":
        """This and what came behind it as one piece, which has each call once."""
        calls = list(self.calls)
        for call in more.calls:
            if calls and calls[-1].index == call.index:
                calls[-1] = CallPiece(call.index, calls[-1].name, calls[-1].arguments + call.arguments)
            else:
                calls.append(call)
        return ReplyPiece(self.reasoning + more.reasoning, self.content + more.content, tuple(calls))


class _Place(Enum):
    TEXT = auto()  # reasoning or content
    HEAD = auto()  # behind <tool_call>
    VALUE = auto()  # behind <arg_value>
    BETWEEN = auto()  # behind </arg_value>


class _More(Exception):
    """More text is needed."""


class _Malformed(Exception):
    """No text behind this makes it a call."""


class ReplyParser:
    """Of one turn."""

    def __init__(self, *, reasoning: bool, tools: ToolSchemas | None = None, calls_max: int | None = None) -> None:
        """Args: reasoning: the turn begins inside it. tools: None: nothing is a call. calls_max: the turn ends with that many."""
        self.calls = 0  # that have begun
        self.cut = False  # the text broke off inside a call
        self._tools = tools
        self._calls_max = calls_max
        self._reasoning = reasoning
        self._may_think = not reasoning  # a turn that begins outside may open its reasoning itself, before anything else
        self._place = _Place.TEXT
        self._buffer = ""
        self._blanks: list[str] = []  # held since the beginning or the last call
        self._shown = False  # other than blanks, since then
        self._name = ""  # of the call that is read
        self._arguments = 0  # that it has
        self._kinds: frozenset[str] = frozenset()  # of the value that is read
        self._value: list[str] = []
        self._out: tuple[list[str], list[str]] = ([], [])  # content, reasoning
        self._pieces: list[tuple[int, str | None, list[str]]] = []

    @property
    def ended(self) -> bool:
        """Whether the turn has all calls it may have; text behind them is dropped."""
        return self.calls == self._calls_max and self._place is _Place.TEXT

    def push(self, text: str) -> ReplyPiece:
        """Read more text."""
        if self._shown and not self._buffer and self._place is _Place.TEXT and "<" not in text:  # most pieces: no mark begins in them
            return ReplyPiece(reasoning=text) if self._reasoning else ReplyPiece(content=text)
        self._buffer += text
        self._run()
        return self._taken()

    def flush(self, *, complete: bool) -> ReplyPiece:
        """The text has ended. Args: complete: the model ended its turn; False: it was cut off, by a stop text or by its length."""
        self._run()
        while self._place is _Place.HEAD:
            self._no_call()
            self._run()
        rest, self._buffer = self._buffer, ""
        inside = self._place in (_Place.VALUE, _Place.BETWEEN)
        if self._place is _Place.VALUE:
            self._add_value(rest)  # a value that only comes out whole is left out: a part of it could close the object
        elif inside and complete and not rest.strip():
            self._end_call()  # models leave the last mark out
        elif not self.ended:
            self._show(rest)
        if not self.calls:
            self._out[self._reasoning].extend(self._blanks)
        self.cut = inside and not complete  # the place stays: a call that did not end is not the turn's end
        return self._taken()

    def _run(self) -> None:
        while self._buffer and self._step():
            pass

    def _step(self) -> bool:
        """Read on from where the text is; returns whether it may be worth to go on."""
        if self._place is _Place.TEXT:
            return self._read_text()
        if self._place is _Place.VALUE:
            return self._read_value()
        return self._read_head() if self._place is _Place.HEAD else self._read_between()

    def _taken(self) -> ReplyPiece:
        content, reasoning = map("".join, self._out)
        calls = tuple(CallPiece(index, name, "".join(parts)) for index, name, parts in self._pieces)
        self._out, self._pieces = ([], []), []
        return ReplyPiece(reasoning, content, calls)

    def _read_text(self) -> bool:
        if self.ended:
            self._buffer = ""
            return False
        before, mark, self._buffer = _split(self._buffer, self._marks())
        self._show(before)
        if mark == _CALL:
            self._place = _Place.HEAD
        elif mark == _THINK and self._shown:
            self._show(mark)
        elif mark is not None:
            self._turn_to(reasoning=mark == _THINK)
        return mark is not None

    def _marks(self) -> tuple[str, ...]:
        calls = (_CALL,) if self._tools is not None and self.calls != self._calls_max else ()
        if self._reasoning:
            return (_THINK_END, *calls)
        return (_THINK, *calls) if self._may_think and not self._shown and not self.calls else calls

    def _turn_to(self, *, reasoning: bool) -> None:
        self._reasoning, self._may_think, self._shown, self._blanks = reasoning, False, False, []

    def _show(self, text: str) -> None:
        """Text of the turn. Blanks are held while nothing else has been seen: they may turn out to stand alone before a call."""
        if not self._shown:
            if not text or text.isspace():
                self._blanks.append(text)
                return
            self._shown, self._blanks, text = True, [], "".join(self._blanks) + text
        self._out[self._reasoning].append(text)

    def _read_head(self) -> bool:
        scan = _Scan(self._buffer)
        try:
            name, key = scan.head()
        except _More:
            return False
        except _Malformed:
            self._no_call()
            return True
        self._buffer = self._buffer[scan.at :]
        self._name, self._arguments = name, 0
        self._pieces.append((self.calls, name, []))
        self.calls += 1
        self._blanks, self._shown = [], False
        if key is None:
            self._end_call()
        else:
            self._begin_value(key)
        return True

    def _no_call(self) -> None:
        """What began like a call is text, its mark first; the rest is read again as text."""
        self._place = _Place.TEXT
        self._show(_CALL)

    def _read_between(self) -> bool:
        scan = _Scan(self._buffer)
        try:
            key = scan.next_argument()
        except _More:
            return False
        except _Malformed:
            self._place = _Place.TEXT
            return True
        self._buffer = self._buffer[scan.at :]
        if key is None:
            self._end_call()
        else:
            self._begin_value(key)
        return True

    def _begin_value(self, key: str) -> None:
        assert self._tools is not None, "calls are read where there are tools"
        self._place, self._value = _Place.VALUE, []
        self._kinds = self._tools.kinds(self._name, key)
        quote = '"' if is_json_string(self._kinds) else ""
        self._add(f"{', ' if self._arguments else '{'}{_json(key)}: {quote}")
        self._arguments += 1

    def _read_value(self) -> bool:
        before, mark, self._buffer = _split(self._buffer, (_VALUE_END,))
        self._add_value(before)
        if mark is not None:
            self._add('"' if is_json_string(self._kinds) else argument_json("".join(self._value), self._kinds))
            self._place = _Place.BETWEEN
        return mark is not None

    def _add_value(self, text: str) -> None:
        if is_json_string(self._kinds):
            self._add(_json(text)[1:-1])
        else:
            self._value.append(text)

    def _end_call(self) -> None:
        self._add("}" if self._arguments else "{}")
        self._place = _Place.TEXT

    def _add(self, arguments: str) -> None:
        """More arguments of the call that is read."""
        if not self._pieces or self._pieces[-1][0] != self.calls - 1:
            self._pieces.append((self.calls - 1, None, []))
        self._pieces[-1][2].append(arguments)


class _Scan:
    """Reads marks and words from the beginning of a text. What it says of a text holds for every longer one too, _More excepted."""

    def __init__(self, text: str) -> None:
        self.at = 0
        self._text = text

    def head(self) -> tuple[str, str | None]:
        """`NAME</tool_call>`, or `NAME<arg_key>KEY</arg_key><arg_value>`: the name, and the key."""
        return self._bounded(self._head)

    def next_argument(self) -> str | None:
        """`</tool_call>`: None; or `<arg_key>KEY</arg_key><arg_value>`: the key."""
        return self._bounded(self._next_argument)

    def _bounded(self, read: Callable[[], _Found]) -> _Found:
        """Long ones are refused whether or not they could still become something, so that pieces and the whole agree."""
        try:
            found = read()
        except _More:
            if len(self._text) > _HEAD_MAX:
                raise _Malformed from None
            raise
        if self.at > _HEAD_MAX:
            raise _Malformed
        return found

    def _head(self) -> tuple[str, str | None]:
        name = self._word()
        if len(name.split()) > 1:
            raise _Malformed
        if self.at == len(self._text):
            raise _More
        if not name:
            raise _Malformed
        return name, self._next_argument()

    def _next_argument(self) -> str | None:
        self._word_is_blank()
        if self._mark(_CALL_END):
            return None
        if not self._mark(_KEY):
            raise _Malformed
        key = self._word()
        if self.at == len(self._text):
            raise _More
        if not key or not self._mark(_KEY_END):
            raise _Malformed
        self._word_is_blank()
        if not self._mark(_VALUE):
            raise _Malformed
        return key

    def _word(self) -> str:
        """Text up to the next `<`, or to the end, without blanks around it."""
        end = self._text.find("<", self.at)
        start, self.at = self.at, len(self._text) if end < 0 else end
        return self._text[start : self.at].strip()

    def _word_is_blank(self) -> None:
        if self._word():
            raise _Malformed

    def _mark(self, mark: str) -> bool:
        """Whether the mark stands here, and past it if so. Raises _More."""
        if self._text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        if mark.startswith(self._text[self.at :]):
            raise _More
        return False


def _split(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Text before the first mark, the mark, and the rest; or without one: text that is none for sure, None, what may become one."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        at, mark = found
        return text[:at], mark, text[at + len(mark) :]
    at = text.rfind("<", max(0, len(text) - _MARK_MAX + 1))  # a mark has this character at its beginning and nowhere else
    held = at if at >= 0 and any(mark.startswith(text[at:]) for mark in marks) else len(text)
    return text[:held], None, text[held:]


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()
