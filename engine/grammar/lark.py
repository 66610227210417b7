"""Pieces of a grammar's text, in Lark's notation as llguidance reads it: literals, regular expressions, values of JSON schemas. Pure."""

from collections.abc import Mapping

import msgspec

__all__ = ["json_value", "pattern", "quoted"]

# One blank, or a line break and an indentation: what models write. Any number of blanks, the library's own rule, can go on for ever.
_BLANKS = r"( |\n {0,32})?"


def quoted(text: str) -> str:
    """These characters and no others."""
    return msgspec.json.encode(text).decode()


def pattern(regex: str) -> str:
    """What a whole match of the regular expression may be. `\\d` is 0 to 9, as in JSON Schema and JavaScript, not every script's digits."""
    out, inside, rest = ["/"], False, iter(regex)
    for character in rest:
        if character == "\\":
            escaped = next(rest, "")
            out.append(("0-9" if inside else "[0-9]") if escaped == "d" else "\\n" if escaped == "\n" else character + escaped)
            continue
        inside = (inside or character == "[") and character != "]"
        out.append({"/": "\\/", "\n": "\\n"}.get(character, character))
    return "".join([*out, "/"])


def json_value(schema: Mapping[str, object], *, lenient: bool = False) -> str:
    """A JSON value of the schema. Args: lenient: leave out what the library cannot keep, instead of being refused."""
    options: dict[str, object] = {"whitespace_pattern": _BLANKS, "lenient": lenient}
    return f"%json {msgspec.json.encode({**schema, 'x-guidance': options}).decode()}"
