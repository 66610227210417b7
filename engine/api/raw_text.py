"""What of a string's pattern and lengths a grammar can keep. Pure.

The library bounds the work of a step. Text that may hold `<` may begin the mark that ends it, and what counts its characters beside costs
the square of the count: beyond `COUNTED_MAX` in all the counts are left out, so that more is allowed than was asked, and nothing less.
"""

import re
import warnings
from collections.abc import Mapping

from engine.grammar.lark import pattern

__all__ = ["ALL", "ALONE_MAX", "COUNTED_MAX", "LENGTH_MAX", "bounded"]

ALL = "(?s:.*)"
COUNTED_MAX = 32  # characters counted in all
ALONE_MAX = 64  # of a maxLength without anything else
LENGTH_MAX = 4_096  # beside a pattern whose text holds no `<`
_TOKEN = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<low>\d+)(?P<comma>,)?(?P<high>\d*)\}|.", re.DOTALL)


def bounded(schema: Mapping[str, object], regex: str) -> tuple[str | None, str]:
    """The regular expression of a string's whole text as far as it is kept, and the grammar's term for its length, "" for none.

    Args: schema: of the string. regex: of its whole text, `ALL` without a pattern. Returns None and "" where no length is allowed.
    """
    low, high = _count(schema.get("minLength")) or 0, _count(schema.get("maxLength"))
    if high is not None and low > high:
        return None, ""
    if regex == ALL:
        return regex, _length(min(low, COUNTED_MAX), _up_to(COUNTED_MAX if low else ALONE_MAX, high))
    if not _may_begin_a_mark(regex):
        return regex, _length(min(low, LENGTH_MAX), _up_to(LENGTH_MAX, high))
    endless = "*" in regex or "+" in regex  # beside a count it costs more
    most = COUNTED_MAX // 2 if endless else COUNTED_MAX
    counted = _counted(regex, endless=endless)
    if counted + (low if high is None else high) <= most:
        return regex, _length(low, high)
    return regex if counted <= most else _uncounted(regex), ""


def _up_to(most: int, count: int | None) -> int | None:
    return None if count is None or count > most else count


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _length(low: int, high: int | None) -> str:
    return pattern(f"(?s:.{{{low},{'' if high is None else high}}})") if low or high is not None else ""


def _may_begin_a_mark(regex: str) -> bool:
    """Whether its text may hold `<`; True in doubt."""
    return any(map(_may_be_angle, (found.group() for found in _TOKEN.finditer(regex))))


def _may_be_angle(token: str) -> bool:
    if token[0] == "\\":
        return token[1] == "<" or (token[1].isalnum() and token[1] not in "dwsbnrt")
    if token[0] != "[" or len(token) == 1:
        return token in (".", "<", "[")
    if token[1] == "^" or "[" in token[1:]:
        return True
    try:
        with warnings.catch_warnings(action="error"):
            return re.fullmatch(token, "<") is not None
    except (re.error, Warning):
        return True  # of the library's syntax alone


def _counted(regex: str, *, endless: bool) -> int:
    """How many repetitions its counts may have in all; too many where it is endless and counts what may be `<`."""
    total, times, before = 0, 1, " "
    for found in _TOKEN.finditer(regex):
        if found["low"] is not None:
            count = int(found["high"] or found["low"])
            if endless and (before == ")" or _may_be_angle(before)):
                return COUNTED_MAX + 1
            total, times = (total, times * max(count, 1)) if before == ")" else (total + count, times)
        before = found.group()
    return total * times if total else times - 1


def _uncounted(regex: str) -> str:
    """The expression with `+` or `*` where it counts."""
    return _TOKEN.sub(lambda found: found.group() if found["low"] is None else "*" if int(found["low"]) == 0 else "+", regex)
