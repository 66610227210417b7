"""Values of tool calls as JSON: which kinds of value a tool's schema declares for an argument, and the text that the model wrote for it.

The model writes strings as they are and all other values as JSON, so only the schema tells `5` from `"5"`. Knows no marks and no streams
(`reply.py`).

1. What is declared a string is one, whatever it looks like; a value declared as something else is its JSON, where it is JSON.
2. Where both are declared, JSON of a declared other kind wins: `null` for a string or null is null.
3. What is not JSON is a string: nothing that the model wrote is lost, and whoever checks the call sees it.
"""

from collections.abc import Iterable, Mapping

import msgspec

__all__ = ["ToolSchemas", "argument_json", "is_json_string", "resolved"]

Kinds = frozenset[str]  # JSON Schema's names of types; empty: not declared, anything may come
_ANY: Kinds = frozenset()
_HOPS_MAX = 16  # from one schema to the next inside it: a reference may lead in a circle


class ToolSchemas:
    """The tools of one request, by name."""

    def __init__(self, parameters_of: Mapping[str, object]) -> None:
        """Args: parameters_of: JSON Schemas of the tools' parameters; what is none declares nothing."""
        self._parameters_of = parameters_of
        self._known: dict[tuple[str, str], Kinds] = {}

    def kinds(self, tool: str, argument: str) -> Kinds:
        """What the argument may be; empty where nothing is declared."""
        known = self._known.get((tool, argument))
        if known is None:
            root = self._parameters_of.get(tool)
            schema = resolved(root, root)
            properties = schema.get("properties")
            found = properties.get(argument) if isinstance(properties, Mapping) else None
            looked = _Looked(root)
            known = looked.kinds(schema.get("additionalProperties") if found is None else found, _HOPS_MAX)
            self._known[tool, argument] = known
        return known


def is_json_string(kinds: Kinds) -> bool:
    """Whether a value of these kinds is a string for sure, so that it may be handed on before its end is known."""
    return kinds == {"string"}


def argument_json(raw: str, kinds: Kinds) -> str:
    """What the model wrote for an argument, as JSON text."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _string(raw)
    if "string" in kinds and _kind(value) not in kinds - {"string"} and not ("number" in kinds and _kind(value) == "integer"):
        return _string(raw)
    return raw.strip()


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _kind(value: object) -> str:
    """JSON Schema's name of a decoded value's type."""
    if isinstance(value, bool):  # before int, which it is too
        return "boolean"
    names: tuple[tuple[type, str], ...] = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def resolved(schema: object, root: object) -> Mapping[str, object]:
    """A schema, or what its local reference leads to; {} for what is no schema."""
    for _ in range(_HOPS_MAX):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for step in reference.split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


class _Looked:
    """Kinds of schemas inside one root, each looked at once: references may lead from few schemas to very many places, or in a circle."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._kinds_of: dict[int, Kinds] = {}  # by id: the root holds them all

    def kinds(self, schema: object, hops: int) -> Kinds:
        found = resolved(schema, self._root)
        if hops == 0 or not found:
            return _ANY
        known = self._kinds_of.get(id(found))
        if known is None:
            self._kinds_of[id(found)] = _ANY  # what leads back to itself says nothing
            known = self._kinds_of[id(found)] = self._declared(found, hops)
        return known

    def _declared(self, found: Mapping[str, object], hops: int) -> Kinds:
        declared = found.get("type")
        if isinstance(declared, str):
            kinds = frozenset({declared})
        elif isinstance(declared, list):
            kinds = frozenset(kind for kind in declared if isinstance(kind, str))
        else:
            kinds = self._undeclared(found, hops)
        return kinds | {"null"} if kinds and found.get("nullable") is True else kinds

    def _undeclared(self, found: Mapping[str, object], hops: int) -> Kinds:
        """Kinds of a schema without `type`: from its values or its alternatives."""
        values = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(values, list):
            return frozenset(map(_kind, values))
        for word in ("anyOf", "oneOf"):
            if isinstance(found.get(word), list):
                return _united(self.kinds(each, hops - 1) for each in _listed(found[word]))
        for each in _listed(found.get("allOf")):
            if kinds := self.kinds(each, hops - 1):
                return kinds
        return frozenset({"object"}) if "properties" in found else frozenset({"array"}) if "items" in found else _ANY


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _united(alternatives: Iterable[Kinds]) -> Kinds:
    """All kinds of several alternatives; nothing if one of them is anything."""
    kinds = list(alternatives)
    return frozenset().union(*kinds) if all(kinds) else _ANY
