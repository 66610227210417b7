"""Values of tool calls by the schemas that tools declare."""

import json

import pytest

from engine.text.argument_kinds import ToolSchemas, argument_json, is_json_string

ANYTHING: frozenset[str] = frozenset()


def kinds(schema: object, **root: object) -> frozenset[str]:
    return ToolSchemas({"f": {"properties": {"x": schema}} | root}).kinds("f", "x")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "string", "enum": ["1", "2"]}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": [1, None, True, 1.5, [], {}]}, {"integer", "null", "boolean", "number", "array", "object"}),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "string"}, {"enum": [1]}]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, ANYTHING),
        ({"allOf": [{"description": "d"}, {"type": "string"}]}, {"string"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, ANYTHING),
        (True, ANYTHING),
        ({"type": 3}, ANYTHING),
        ({"anyOf": "x", "allOf": 3}, ANYTHING),
        (None, ANYTHING),
    ],
)
def test_kinds_of_a_schema(schema: object, expected: set[str]) -> None:
    """Types, lists of types, enumerations, constants and alternatives say what a value may be; what says nothing allows anything."""
    assert kinds(schema) == expected


def test_references_are_followed() -> None:
    """Local references lead to definitions, also through one another and from the root, and one in a circle allows anything."""
    defined = {
        "A": {"$ref": "#/$defs/B~1x"},
        "B/x": {"type": "string"},
        "C": {"$ref": "#/$defs/C"},
        "D": {"anyOf": [{"$ref": "#/$defs/D"}]},
    }
    assert kinds({"$ref": "#/$defs/A"}, **{"$defs": defined}) == {"string"}
    for name in ("C", "D", "nosuch"):
        assert kinds({"$ref": f"#/$defs/{name}"}, **{"$defs": defined}) == ANYTHING
    assert kinds({"$ref": "https://example.org/schema"}) == ANYTHING
    root = {"$ref": "#/$defs/R", "$defs": {"R": {"properties": {"x": {"type": "string"}}}}}
    assert ToolSchemas({"f": root}).kinds("f", "x") == {"string"}


def test_references_that_multiply_are_looked_at_once() -> None:
    """Schemas that lead to one another in very many ways cost no more than there are of them, and say what they say."""
    doubling = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 9} for n in range(14)} | {"14": {"type": "string"}}
    assert kinds({"$ref": "#/$defs/0"}, **{"$defs": doubling}) == {"string"}
    knot = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in "abcdefgh" * 3]} for name in "abcdefgh"}
    assert kinds({"$ref": "#/$defs/a"}, **{"$defs": knot}) == ANYTHING


def test_arguments_that_are_not_declared() -> None:
    """An unknown tool or argument may be anything; additionalProperties speak for the unknown arguments."""
    tools = ToolSchemas({"f": {"properties": {}}, "g": {"additionalProperties": {"type": "string"}}, "h": "no schema", "i": None})
    assert [tools.kinds(name, "x") for name in "fghij"] == [ANYTHING, {"string"}, ANYTHING, ANYTHING, ANYTHING]


@pytest.mark.parametrize(
    ("raw", "declared", "value"),
    [
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("true", {"boolean"}, True),
        ("True", {"boolean"}, "True"),
        ("[1, 2]", {"array"}, [1, 2]),
        ("not json", {"object"}, "not json"),
        ("", {"object"}, ""),
        ('{"a": 1}', ANYTHING, {"a": 1}),
        ("hello", ANYTHING, "hello"),
        ("null", {"string", "null"}, None),
        ("5", {"string", "null"}, "5"),
        ("5", {"string", "integer"}, 5),
        ("5", {"string", "number"}, 5),
        ("5.5", {"string", "integer"}, "5.5"),
        ('["a"]', {"string", "array"}, ["a"]),
        ('"a"', {"string", "null"}, '"a"'),
        (" a ", {"string", "null"}, " a "),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
    ],
)
def test_values_as_json(raw: str, declared: set[str], value: object) -> None:
    """A value is its JSON where its kind is declared, or nothing is; else it is the string that the model wrote."""
    assert json.loads(argument_json(raw, frozenset(declared))) == value


def test_numbers_keep_their_digits() -> None:
    """A number that no float holds is handed on as it was written."""
    assert argument_json("12345678901234567890123", frozenset({"integer"})) == "12345678901234567890123"


def test_only_sure_strings_are_handed_on_early() -> None:
    """A value that may be something else is looked at whole."""
    assert is_json_string(frozenset({"string"}))
    assert not any(is_json_string(frozenset(declared)) for declared in ({"string", "null"}, {"integer"}, ANYTHING))
