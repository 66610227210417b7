"""What a request says of the form of its output, as one `Form`: response_format, structured_outputs, the guided_* fields and tool_choice.

Pure functions over decoded JSON; grammars are texts here, and whoever compiles them says whether they are any.

1. One way to ask for a form is enough: two in one request are refused.
2. A form holds behind the reasoning of a chat turn. With tools that the model may choose to call, the answer is calls or the form.
3. What a schema asks for and the library cannot keep is refused when it is compiled, not left out.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from engine.api.call_grammar import call_rules, calls_form
from engine.api.requests import ChatRequest, GenerationRequest
from engine.api.tools import shown_tools
from engine.errors import BadRequest, shown
from engine.grammar import Form
from engine.grammar.lark import json_value, pattern, quoted

__all__ = ["form_of"]

_GUIDED: dict[str, str] = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_STRUCTURED = ("json", "json_object", "regex", "choice", "grammar")
_SAID_OF_BLANKS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern")
_CHOICES_MAX = 1_024

_Asked: TypeAlias = tuple[str, str, object]  # kind, the field that asked, what it holds


def form_of(request: GenerationRequest) -> Form | None:
    """The form that a checked request asks for, or None. Raises BadRequest naming the field."""
    asked = _asked(request)
    if isinstance(request, ChatRequest) and (tools := shown_tools(request.tools, request.tool_choice)):
        parallel = request.parallel_tool_calls is not False
        form = calls_form(tools, request.tool_choice, parallel=parallel)
        if asked is None or (form is not None and form.begins != "at calls"):  # an answer that must be a call has no text to have a form
            return form
        if asked[0] == "grammar":
            raise BadRequest(f"{asked[1]} holds for the whole answer: leave tools out, or set tool_choice to 'none'", field=asked[1])
        rules = call_rules(tools, parallel=parallel)
        return Form(f"start: calls | answer\nanswer: {_body(asked)}\n{rules}", asked[1], "behind reasoning", calls=True)
    if asked is None:
        return None
    begins: Literal["behind reasoning", "at once"] = "behind reasoning" if isinstance(request, ChatRequest) else "at once"
    kind, field, value = asked
    if kind == "grammar":
        text = _text(value, field)
        return Form(text, field, begins, "ebnf" if "::=" in text else "lark")
    return Form(f"start: {_body(asked)}", field, begins)


def _asked(request: GenerationRequest) -> _Asked | None:
    """The one form that the request's fields ask for."""
    found = [asked for asked in (_response_format(request), _structured(request), *_guided(request)) if asked is not None]
    if len(found) > 1:
        raise BadRequest(f"{found[0][1]} and {found[1][1]} both ask for a form of the output: send one", field=found[1][1])
    return found[0] if found else None


def _response_format(request: GenerationRequest) -> _Asked | None:
    asked = request.response_format
    kind = None if asked is None else asked.get("type")
    if asked is None or kind == "text":
        return None
    if kind == "json_object":
        return "json_object", "response_format", True
    if kind != "json_schema":
        raise BadRequest(
            f"response_format.type must be 'text', 'json_object' or 'json_schema', not {shown(kind)}", field="response_format"
        )  # fmt: skip
    held = asked.get("json_schema")
    schema = held.get("schema") if isinstance(held, Mapping) else None
    if not isinstance(schema, Mapping):
        raise BadRequest("response_format.json_schema.schema must be a JSON Schema object", field="response_format")
    return "json", "response_format", schema


def _structured(request: GenerationRequest) -> _Asked | None:
    held = request.structured_outputs
    if held is None:
        return None
    if not isinstance(held, Mapping):
        raise BadRequest("structured_outputs must be an object", field="structured_outputs")
    given = {name: value for name, value in held.items() if value is not None and value is not False and name not in _SAID_OF_BLANKS}
    kinds = [name for name in given if name in _STRUCTURED]
    for name in given:
        if name not in _STRUCTURED:
            raise BadRequest(
                f"structured_outputs.{name[:40]} is not served: send one of {', '.join(_STRUCTURED)}", field="structured_outputs"
            )
    if len(kinds) != 1:
        raise BadRequest(f"structured_outputs must hold one of {', '.join(_STRUCTURED)}", field="structured_outputs")
    return kinds[0], "structured_outputs", given[kinds[0]]


def _guided(request: GenerationRequest) -> list[_Asked]:
    return [(kind, field, value) for field, kind in _GUIDED.items() if (value := getattr(request, field)) is not None]


def _body(asked: _Asked) -> str:
    """The right side of a rule."""
    kind, field, value = asked
    if kind == "json_object":
        return json_value({"type": "object"})
    if kind == "json":
        return json_value(_schema(value, field))
    if kind == "regex":
        return pattern(_text(value, field))
    if not isinstance(value, list) or not 1 <= len(value) <= _CHOICES_MAX:
        raise BadRequest(f"{field} must hold 1 to {_CHOICES_MAX} texts to choose from", field=field)
    return " | ".join(quoted(_text(one, field)) for one in value)


def _schema(value: object, field: str) -> Mapping[str, object]:
    """A schema, or its JSON text, as vLLM's clients may send it."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise BadRequest(f"{field} is not JSON", field=field) from error
    if not isinstance(value, Mapping):
        raise BadRequest(f"{field} must be a JSON Schema object", field=field)
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{field} must be a text that is not empty, not {shown(value)}", field=field)
    return value
