"""The form that a request asks for, from whichever of its fields."""

import json
from typing import Any

import pytest

from engine.api.forms import form_of
from engine.api.requests import parse_chat, parse_completion
from engine.errors import BadRequest
from engine.grammar.form import Form
from engine.grammar.lark import pattern

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
STRING, ANY = {"type": "string"}, {"description": "anything"}


def chat(**fields: Any) -> Form | None:
    return form_of(parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()))


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def forced(parameters: Any, **function: Any) -> str:
    """The grammar of one forced call."""
    form = chat(tools=[tool(parameters=parameters, **function)], tool_choice="required", parallel_tool_calls=False)
    assert form is not None
    return form.grammar


def test_nothing_is_asked() -> None:
    """Plain text, tools that may be called, and fields that are null or say nothing ask for no form."""
    quiet: list[dict[str, Any]] = [
        {}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}, {"tools": [tool()]},
        {"tools": [tool(strict=False)], "tool_choice": "auto"}, {"tools": [tool(strict=True)], "tool_choice": "none"},
    ]  # fmt: skip
    assert [chat(**fields) for fields in quiet] == [None] * len(quiet)


def test_the_same_form_by_every_name() -> None:
    """OpenAI's field and vLLM's older and newer ones make equal grammars, a schema as text included; the field is the one that asked."""
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
    ]  # fmt: skip
    forms = [chat(**fields) for fields in asked]
    assert len({form.grammar for form in forms if form is not None}) == 1
    assert [form.field for form in forms if form is not None] == [next(iter(fields)) for fields in asked]
    assert chat(guided_regex="a") == Form("start: /a/", "guided_regex", "behind reasoning")
    assert chat(structured_outputs={"choice": ['a"', "ö"], "disable_any_whitespace": True, "regex": None}) == Form(
        'start: "a\\"" | "ö"', "structured_outputs", "behind reasoning"
    )
    assert chat(guided_grammar='root ::= "x"') == Form('root ::= "x"', "guided_grammar", "behind reasoning", "ebnf")


def test_a_completion_has_its_form_at_once() -> None:
    """A completion's prompt is the caller's own: its text has the form from the first token."""
    form = form_of(parse_completion(b'{"prompt": "<think>", "guided_regex": "a"}'))
    assert form == Form("start: /a/", "guided_regex", "at once")


def test_choices_of_tools_become_grammars() -> None:
    """`required`, `allowed_tools` and a name force one or several calls of the right tools; strict tools hold where calls begin."""
    tools = [tool("f"), tool("g")]
    both = chat(tools=tools, tool_choice="required")
    assert both is not None
    assert (both.begins, both.calls, both.field) == ("behind reasoning", True, "tool_choice")
    assert "calls: call+" in both.grammar
    assert '"f"' in both.grammar
    assert '"g"' in both.grammar
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("g")]}}
    for choice in (named("g"), allowed):
        one = chat(tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert one is not None
        assert "calls: call\n" in one.grammar
        assert '"f"' not in one.grammar
        assert '"g"' in one.grammar
    strict = chat(tools=[tool("f", strict=True), tool("g")])
    assert strict is not None
    assert (strict.begins, strict.calls) == ("at calls", True)
    assert "<tool_call>" not in strict.grammar


def test_a_format_beside_tools() -> None:
    """Where the model may call, the answer is calls or the format; where it must, the format has nothing to hold for; else it is alone."""
    asked = {"guided_choice": ["x"], "tools": [tool()]}
    either = chat(**asked)
    assert either is not None
    assert either.grammar.startswith('start: calls | answer\nanswer: "x"\n')
    assert either.calls
    must = chat(**asked, tool_choice="required")
    assert must == chat(tools=[tool()], tool_choice="required")
    assert chat(**asked, tool_choice="none") == Form('start: "x"', "guided_choice", "behind reasoning")


def test_arguments_are_raw_or_json_as_the_parser_reads_them() -> None:
    """Declared strings are raw text up to the mark, other kinds JSON, what may be both is text; optional ones may be left out."""
    grammar = forced(
        {
            "properties": {"s": STRING, "n": {"type": "integer"}, "x": {"type": ["string", "null"]}, "any": ANY, "e": {"enum": ["a", "b"]}},
            "required": ["n"],
        }
    )
    line_of = dict(line.split(": ", 1) for line in grammar.splitlines())
    assert line_of["f0"] == '"f" a0_0? a0_1 a0_2? a0_3? a0_4? "</tool_call>"'
    assert line_of["a0_0"] == '"<arg_key>s</arg_key><arg_value>" V0_0'
    assert line_of["V0_0"] == r'(/(?s:.*)/ & ~/(?s:.*)<\/arg_value>(?s:.*)/) "</arg_value>"'
    assert line_of["a0_1"].startswith('"<arg_key>n</arg_key><arg_value>" %json {"type":"integer",')
    assert line_of["V2_0"] == line_of["V3_0"] == line_of["V0_0"]
    assert line_of["a0_4"].endswith('("a</arg_value>" | "b</arg_value>")')


def test_tools_that_declare_nothing() -> None:
    """Without parameters a call has no arguments; an object of anything has any; a closed one none."""
    assert '"f"  "</tool_call>"' in forced(None)
    assert 'f0: "f" a0* "</tool_call>"' in forced({"type": "object"})
    assert '"f"  "</tool_call>"' in forced({"type": "object", "properties": {}, "additionalProperties": False})


def test_references_of_arguments_are_kept() -> None:
    """A JSON argument carries the definitions that it refers to; a string reached by a reference is raw."""
    definitions = {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 3}}
    grammar = forced({"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/s"}}, "$defs": definitions})
    assert '"$ref":"#/$defs/n"' in grammar
    assert r"V1_0: (/(?s:.{0,3})/ & ~/(?s:.*)<\/arg_value>(?s:.*)/)" in grammar


@pytest.mark.parametrize(
    ("regex", "wanted"),
    [
        ("a/b", r"/a\/b/"), (r"a\/b", r"/a\/b/"), ("a\nb", r"/a\nb/"), ("a\\\nb", r"/a\nb/"), (r"\d[\d_]\\d", r"/[0-9][0-9_]\\d/"),
        (r"[/\]]\]", r"/[\/\]]\]/"), ("ä🙂", "/ä🙂/"),
    ],
)  # fmt: skip
def test_expressions_are_written_between_slashes(regex: str, wanted: str) -> None:
    """Slashes and line breaks are escaped, escapes stay, and digits are 0 to 9."""
    assert pattern(regex) == wanted


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": "[" * 9_999}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_grammar": 1}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1_025}, "guided_choice"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_grammar": 'start: "a"', "tools": [tool()]}, "guided_grammar"),
        ({"tools": [tool(strict=True, parameters={"anyOf": [SCHEMA]})]}, "tools"),
        ({"tools": [tool(strict=True, parameters={"properties": {"a": {**STRING, "pattern": "^a|b"}}})]}, "tools"),
        ({"tools": [tool(parameters={"properties": {"<a>": STRING}})], "tool_choice": "required"}, "tools"),
        *(
            ({"tools": [tool(strict=strict, parameters={"properties": {"a": {**STRING, **said}}})], "tool_choice": choice}, "tools")
            for said in ({"enum": []}, {"enum": [3]}, {"const": 3}, {"enum": ["</arg_value>"]}, {"minLength": 9, "maxLength": 8})
            for strict, choice in ((False, "required"), (True, "auto"))
        ),
    ],
)
def test_what_is_no_form_names_its_field(fields: dict[str, Any], field: str) -> None:
    """Wrong kinds, two forms at once, and what a strict tool cannot keep are refused."""
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.field == field
    assert field in str(caught.value)
