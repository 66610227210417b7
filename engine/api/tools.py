"""The tools of a chat request: what of them is shown to the model, and which choices can be kept.

Pure functions over decoded JSON. Knows no template and no parser but the schemas that the parser asks for.

1. Tools reach the template as they were sent.
2. A choice that forces a call is kept by a grammar (`call_grammar.py`); it must leave a tool to call.
"""

from collections.abc import Mapping, Sequence

from engine.errors import BadRequest, shown
from engine.text.argument_kinds import ToolSchemas

__all__ = ["Tool", "check_tool_choice", "check_tools", "function_of", "name_of", "schemas_of", "shown_tools"]

Tool = Mapping[str, object]

_TOOLS_MAX = 1_024


def check_tools(tools: Sequence[Tool] | None, field: str) -> None:
    """Raises BadRequest: not functions with a name each, and objects for their parameters."""
    if tools is not None and len(tools) > _TOOLS_MAX:
        raise BadRequest(f"{field} holds {len(tools)}, more than {_TOOLS_MAX}", field=field)
    for index, tool in enumerate(tools or ()):
        where = f"{field}[{index}]"
        if tool.get("type") != "function":
            raise BadRequest(f"{where}.type must be 'function', not {shown(tool.get('type'))}", field=f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise BadRequest(f"{where}.function must be an object with a name", field=f"{where}.function")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name or "<" in name or len(name.split()) != 1:
            raise BadRequest(f"{where}.function.name must be a name without blanks, not {shown(name)}", field=f"{where}.function.name")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadRequest(f"{where}.function.parameters must be a JSON Schema object", field=f"{where}.function.parameters")


def check_tool_choice(choice: str | Mapping[str, object] | None, tools: Sequence[Tool] | None) -> None:
    """Raises BadRequest for choices that cannot be kept, or that name what is not there."""
    if choice in (None, "none", "auto"):
        return
    names = {name_of(tool) for tool in tools or ()}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required"):
            raise BadRequest(f"tool_choice.allowed_tools.mode must be 'auto' or 'required', not {shown(mode)}", field="tool_choice")
        for name in sorted(_allowed_names(choice) - names):
            raise BadRequest(f"tool_choice allows {shown(name)}, which is not among tools", field="tool_choice")
        if mode == "required" and not _allowed_names(choice):
            raise BadRequest("tool_choice requires a call and allows no tool", field="tool_choice")
        return
    if choice == "required":
        if not names:
            raise BadRequest("tool_choice 'required' needs tools", field="tool_choice")
        return
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        wanted = choice.get("function")
        named = wanted.get("name") if isinstance(wanted, Mapping) else None
        if not isinstance(named, str) or named not in names:
            raise BadRequest(f"tool_choice names {shown(named)}, which is not among tools", field="tool_choice")
        return
    raise BadRequest(
        f"tool_choice must be 'none', 'auto', 'required', a function or allowed_tools, not {shown(choice)}", field="tool_choice"
    )


def shown_tools(tools: Sequence[Tool] | None, choice: str | Mapping[str, object] | None) -> list[Tool]:
    """The tools that the model is told of and may call, by a checked choice: with 'none' it is told of none."""
    if not tools or choice == "none":
        return []
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = _allowed_names(choice)
        return [tool for tool in tools if name_of(tool) in allowed]
    return list(tools)


def schemas_of(tools: Sequence[Tool]) -> ToolSchemas | None:
    """What the tools declare of their arguments; None without tools."""
    declared = {name_of(tool): function.get("parameters") for tool in tools if isinstance(function := tool.get("function"), Mapping)}
    return ToolSchemas(declared) if declared else None


def function_of(tool: Tool) -> Mapping[str, object]:
    """The function of a checked tool."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def name_of(tool: Tool) -> str:
    """The name of a checked tool's function."""
    return str(function_of(tool).get("name", ""))


def _allowed_names(choice: Mapping[str, object]) -> set[str]:
    allowed = choice.get("allowed_tools")
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    return {name_of(tool) for tool in (tools if isinstance(tools, list) else ()) if isinstance(tool, Mapping)}
