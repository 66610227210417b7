"""What of a string's pattern and lengths is kept: everything where it is cheap, never less than was asked."""

import re
from typing import Any

import pytest

from engine.api.raw_text import ALL, COUNTED_MAX, bounded


@pytest.mark.parametrize(
    ("schema", "length"),
    [
        ({}, ""), ({"minLength": 1}, "/(?s:.{1,})/"), ({"minLength": 1, "maxLength": COUNTED_MAX}, f"/(?s:.{{1,{COUNTED_MAX}}})/"),
        ({"minLength": 1, "maxLength": COUNTED_MAX + 1}, "/(?s:.{1,})/"),
        ({"minLength": 99, "maxLength": 99}, f"/(?s:.{{{COUNTED_MAX},}})/"),
        ({"maxLength": 64}, "/(?s:.{0,64})/"), ({"maxLength": 65}, ""), ({"minLength": 0, "maxLength": 4}, "/(?s:.{0,4})/"),
        ({"minLength": True, "maxLength": "9"}, ""), ({"maxLength": 0}, "/(?s:.{0,0})/"),
    ],
)  # fmt: skip
def test_lengths_alone(schema: dict[str, Any], length: str) -> None:
    """A maxLength alone is kept, beside a minLength up to a count; a minLength up to it."""
    assert bounded(schema, ALL) == (ALL, length)


@pytest.mark.parametrize(
    "regex", ["([a-z]{1,100})", r"([\w-]{64}\.\d{40})", "(ä{99})", r"([0-9A-Fa-f]{64})", "(.{1,32})", "(.{4}){8}", "(.*)", r"(\S+)"]
)
def test_patterns_that_are_kept(regex: str) -> None:
    """Where no `<` can be, every count is; elsewhere small ones are."""
    assert bounded({}, regex) == (regex, "")


@pytest.mark.parametrize(
    ("regex", "kept", "text"),
    [
        ("(.{1,100})", "(.+)", "x" * 100), ("(.{0,100})", "(.*)", ""), (r"(\S{33})", r"(\S+)", "x" * 33),
        ("(.{2,}.{40})", "(.+.+)", "x" * 42),
        ("([^a]{1,20}-[^a]{1,20})", "([^a]+-[^a]+)", "b-c"), ("([ -~]{50})", "([ -~]+)", "~" * 50), ("((.{1,9}){9})", "((.+)+)", "x" * 81),
        (ALL + "(x{17})" + ALL, ALL + "(x+)" + ALL, "a" + "x" * 17), (r"(.\{9,99\}.{33})", r"(.\{9,99\}.+)", "a{9,99}" + "x" * 33),
        ("(<[{40}]{60})", "(<[{40}]+)", "<" + "4" * 60), (r"([[:alpha:]]{60})", r"([[:alpha:]]+)", None),
    ],
)  # fmt: skip
def test_patterns_that_count_too_much_allow_more(regex: str, kept: str, text: str | None) -> None:
    """Every count becomes an open one, what only looks like a count stays, and a text of the pattern is one of what is kept."""
    assert bounded({"maxLength": 9}, regex) == (kept, "")
    if text is not None:
        assert re.fullmatch(regex, text)
        assert re.fullmatch(kept, text)


def test_lengths_beside_a_pattern() -> None:
    """They are kept with a pattern that is cheap, and where all counts together are few."""
    asked = {"minLength": 1, "maxLength": 64}
    assert bounded(asked, "([a-z]+)") == ("([a-z]+)", "/(?s:.{1,64})/")
    assert bounded(asked, "(.+)") == ("(.+)", "")
    assert bounded({"maxLength": 12}, "(.{1,20})") == ("(.{1,20})", "/(?s:.{0,12})/")
    assert bounded({}, ALL + "(x{16})") == (ALL + "(x{16})", "")
    assert bounded({}, "(<.*[a-z]{1,8}.{1,8})") == ("(<.*[a-z]+.+)", "")
    assert bounded({"maxLength": 13}, "(.{1,20})") == ("(.{1,20})", "")
    assert bounded({"minLength": 2, "maxLength": 1}, "(.+)") == (None, "")
