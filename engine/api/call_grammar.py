"""Tool calls as a grammar: the model's own notation of calls, with arguments that keep their schemas.

    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>

Pure functions over checked tools. Which argument is written raw and which as JSON is the parser's own rule
(`engine/text/argument_kinds.py`).

1. Arguments come in the order that the schema has them, each at most once, required ones always; others than the declared do not come.
2. A value that may be a string and something else is free text: the parser decides what it is.
3. Of a string `enum` and `const` are kept, and `minLength`, `maxLength` and `pattern` as far as the library can count (`raw_text.py`);
   every other value is JSON of its schema.
4. A strict tool is refused for what cannot be kept of its schema, long counts of a string excepted; of other tools that is left out.
"""

from collections.abc import Mapping, Sequence

from engine.api.raw_text import ALL, bounded
from engine.api.tools import Tool, function_of, name_of, schemas_of
from engine.errors import BadRequest
from engine.grammar import Form
from engine.grammar.lark import json_value, pattern, quoted
from engine.text.argument_kinds import ToolSchemas, is_json_string, resolved

__all__ = ["call_rules", "calls_form"]

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_END = "</tool_call>"


def calls_form(tools: Sequence[Tool], choice: object, *, parallel: bool) -> Form | None:
    """What a turn with these tools must be, or None where nothing is asked of its calls.

    Args: tools: those that the model may call. choice: a checked `tool_choice`. parallel: whether several calls may follow one another.
    Raises: BadRequest: a strict tool without a schema that can be kept.
    """
    forced = forced_tools(tools, choice)
    if forced is not None:
        return Form(f"start: calls\n{call_rules(forced, parallel=parallel)}", "tool_choice", "behind reasoning", calls=True)
    if not any(function_of(tool).get("strict") is True for tool in tools):
        return None
    rules = [_Rules(index, tool, schemas_of(tools), free=function_of(tool).get("strict") is not True) for index, tool in enumerate(tools)]
    bodies = " | ".join(rule.name for rule in rules)
    return Form("\n".join([f"start: {bodies}", *(rule.text for rule in rules)]), "tools", "at calls", calls=True)


def forced_tools(tools: Sequence[Tool], choice: object) -> list[Tool] | None:
    """The tools of which one must be called by a checked choice; None where none must."""
    if choice == "required":
        return list(tools)
    if not isinstance(choice, Mapping):
        return None
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        return list(tools) if isinstance(allowed, Mapping) and allowed.get("mode") == "required" else None
    function = choice.get("function")
    return [tool for tool in tools if isinstance(function, Mapping) and name_of(tool) == function.get("name")]


def call_rules(tools: Sequence[Tool], *, parallel: bool) -> str:
    """The rule `calls`, one call or several of these tools, and the rules it stands on."""
    rules = [_Rules(index, tool, schemas_of(tools)) for index, tool in enumerate(tools)]
    bodies = " | ".join(rule.name for rule in rules)
    head = [f"calls: call{'+' if parallel else ''}", f'call: "<tool_call>" ({bodies})']
    return "\n".join([*head, *(rule.text for rule in rules)])


class _Rules:
    """The rules of one tool: its name, its arguments, and the end of the call."""

    def __init__(self, index: int, tool: Tool, schemas: ToolSchemas | None, *, free: bool = False) -> None:
        """Args: free: any text may follow the name, up to the end of the call."""
        assert schemas is not None, "there is a tool"
        function = function_of(tool)
        self.name = f"f{index}"
        self._tool, self._index, self._schemas = name_of(tool), index, schemas
        self._strict = function.get("strict") is True
        self._root = function.get("parameters")
        self._lines: list[str] = []
        body = self._raw("R", ALL, _END) if free else f"{self._arguments()} {quoted(_END)}"
        self._lines.insert(0, f"{self.name}: {quoted(self._tool)} {body}")
        self.text = "\n".join(self._lines)

    def _arguments(self) -> str:
        schema = resolved(self._root, self._root)
        properties = schema.get("properties")
        declared = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        combined = any(word in schema for word in ("anyOf", "oneOf", "allOf", "if", "patternProperties", "dependentRequired"))
        if self._strict and combined:
            raise BadRequest(
                f"tools: {self._tool} is strict, and its parameters say more than properties and required: leave strict out", field="tools"
            )
        names = [*declared, *(name for name in needed if name not in declared)]
        if not names and (combined or schema.get("type") == "object") and schema.get("additionalProperties") is not False and self._root:
            return f"{self._any_argument()}*"
        parts = [f"{self._argument(place, name, declared.get(name))}{'' if name in needed else '?'}" for place, name in enumerate(names)]
        return " ".join(parts)

    def _any_argument(self) -> str:
        name = f"a{self._index}"
        self._lines.append(f"{name}: {quoted(_KEY)} /[^<\\s]+/ {quoted(_KEY_END + _VALUE)} {self._raw('A', ALL, _VALUE_END)}")
        return name

    def _argument(self, place: int, argument: str, schema: object) -> str:
        if "<" in argument or argument != argument.strip() or not argument:
            raise BadRequest(f"tools: {self._tool} has an argument whose name a call cannot hold", field="tools")
        name = f"a{self._index}_{place}"
        kinds = self._schemas.kinds(self._tool, argument)
        found = resolved(schema, self._root)
        if is_json_string(kinds):
            value = self._string(place, argument, found)
        elif not kinds or "string" in kinds:
            value = self._raw(f"V{place}", ALL, _VALUE_END)
        else:
            value = f"{json_value(self._whole(schema), lenient=not self._strict)} {quoted(_VALUE_END)}"
        self._lines.append(f"{name}: {quoted(_KEY + argument + _KEY_END + _VALUE)} {value}")
        return name

    def _whole(self, schema: object) -> dict[str, object]:
        """An argument's schema with what its references lead to."""
        own = dict(schema) if isinstance(schema, Mapping) else {}
        root = self._root if isinstance(self._root, Mapping) else {}
        return {**{word: root[word] for word in ("$defs", "definitions") if word in root}, **own}

    def _string(self, place: int, argument: str, schema: Mapping[str, object]) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            texts = [text for text in values if isinstance(text, str) and _VALUE_END not in text]
            if not texts:
                raise BadRequest(f"tools: {argument} of {self._tool} has no value that a call can hold: correct its enum", field="tools")
            return "(" + " | ".join(quoted(text + _VALUE_END) for text in texts) + ")"
        inner, length = bounded(schema, self._inner(schema))
        if inner is None:
            raise BadRequest(f"tools: {argument} of {self._tool} has a minLength above its maxLength", field="tools")
        return self._raw(f"V{place}", inner, _VALUE_END, length)

    def _inner(self, schema: Mapping[str, object]) -> str:
        """A regular expression for the whole string, of a schema's pattern, which may match anywhere."""
        regex = schema.get("pattern")
        if not isinstance(regex, str):
            return ALL
        start, end = regex.startswith("^"), regex.endswith("$") and not regex.endswith("\\$")
        inner = regex[start : len(regex) - end]
        if "|" in regex and (start or end):
            if self._strict:
                raise BadRequest(f"tools: the pattern of an argument of {self._tool} has both an anchor and |: group it", field="tools")
            return ALL
        return f"{'' if start else ALL}({inner}){'' if end else ALL}"

    def _raw(self, name: str, inner: str, end: str, length: str = "") -> str:
        """Text that matches `inner`, then the mark `end`, which the text does not hold. One terminal: the lexer is greedy."""
        terminal = f"{name}_{self._index}"
        parts = [pattern(inner)] if inner != ALL or not length else []
        parts += [length] if length else []
        self._lines.append(f"{terminal}: ({' & '.join([*parts, '~' + pattern(ALL + end + ALL)])}) {quoted(end)}")
        return terminal
