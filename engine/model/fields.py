"""Reading the fields of a config.json: types, other names, defaults, and who read what.

Holds `Fields` and `read_json`. Knows what a field means only where several fields mean one thing (sharing, RoPE, quantisation).

Invariants:
1. Every failure is a BadModel of one line that names the field.
2. A field that was looked at is not in `rest()`.
Source: model.md, sections 1.3, 1.4 and 4.2.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import BadModel
from engine.model.quantisation import Quantisation, read_quantisation

__all__ = ["Fields", "read_json"]

_FULL = {"full": True, "shared": False, "F": True, "S": False}


def read_json(file: Path) -> dict[str, Any]:
    """Parse a JSON object from a file. Raises BadModel naming the file when it is unreadable or not an object."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{file}: not readable as JSON: {' '.join(str(error).split())}") from error
    if not isinstance(parsed, dict):
        raise BadModel(f"{file}: the top level must be an object, not {type(parsed).__name__}")
    return parsed


class Fields:
    """Typed access to one parsed config.json."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._read: set[str] = {"head_dim", "qk_head_dim", "num_key_value_heads"}

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first of these names that is present and not null; the others count as read."""
        self._read.update(names)
        for name in names:
            if self._raw.get(name) is not None:
                return name, self._raw[name]
        return names[0], None

    def count(self, *names: str, default: int | None = None) -> int:
        """An int of at least 1 under the first of `names` that is given."""
        name, value = self._first(names)
        if value is None:
            if default is None:
                raise BadModel(f"config.json: {name} is missing or null")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadModel(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, *, default: float) -> float:
        """A finite positive number."""
        _, value = self._first((name,))
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise BadModel(f"config.json: {name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean."""
        _, value = self._first((name,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadModel(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        _, value = self._first((name,))
        listed = [] if value is None else value if isinstance(value, list) else [value]
        for each in listed:
            if not isinstance(each, int) or isinstance(each, bool) or each < 0:
                raise BadModel(f"config.json: {name} must hold token ids, not {each!r}")
        return tuple(listed)

    def rope_theta(self) -> float:
        """Theta from `rope_parameters`, else from the top level; any RoPE type but `default` is refused."""
        self._read.update(("rope_parameters", "rope_theta", "rope_scaling"))
        theta = self._raw.get("rope_theta")
        for name in ("rope_scaling", "rope_parameters"):
            inner = self._raw.get(name)
            if inner is None:
                continue
            if not isinstance(inner, Mapping):
                raise BadModel(f"config.json: {name} must be an object, not {inner!r}")
            kind = inner.get("rope_type", inner.get("type", "default"))
            if kind != "default":
                raise BadModel(f"config.json: {name}.rope_type {kind!r} is not supported, only 'default'")
            theta = inner.get("rope_theta", theta)
        if not isinstance(theta, int | float) or isinstance(theta, bool) or not math.isfinite(theta) or theta <= 1:
            raise BadModel(f"config.json: rope_parameters.rope_theta must be a number above 1, not {theta!r}")
        return float(theta)

    def full_layers(self, layers: int) -> tuple[bool, ...]:
        """Which layers have an indexer: `indexer_types`, else `index_topk_pattern`, else frequency and offset."""
        self._read.update(("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"))
        for name in ("indexer_types", "index_topk_pattern"):
            listed = self._raw.get(name)
            if listed is not None:
                kinds = self._kinds(name, listed, layers, _FULL if name == "index_topk_pattern" else {"full": True, "shared": False})
                return tuple(_FULL[kind] for kind in kinds)
        frequency = self._raw.get("index_topk_freq")
        offset = self._raw.get("index_skip_topk_offset")
        for name, value in (("index_topk_freq", frequency), ("index_skip_topk_offset", offset)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise BadModel(f"config.json: {name} must be an integer, not {value!r}")
        every = max(1 if frequency is None else frequency, 1)
        skipped = 2 if offset is None else offset
        return tuple(max(layer - skipped + 1, 0) % every == 0 for layer in range(layers))

    def dense_layers(self, layers: int) -> tuple[bool, ...]:
        """Which layers have a dense MLP: `mlp_layer_types`, else the first `first_k_dense_replace`."""
        self._read.update(("mlp_layer_types", "first_k_dense_replace"))
        listed = self._raw.get("mlp_layer_types")
        if listed is not None:
            kinds = self._kinds("mlp_layer_types", listed, layers, {"dense": True, "sparse": False})
            return tuple(kind == "dense" for kind in kinds)
        dense = self._raw.get("first_k_dense_replace")
        dense = 3 if dense is None else dense
        if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
            raise BadModel(f"config.json: first_k_dense_replace must be 0 or more, not {dense!r}")
        return tuple(layer < dense for layer in range(layers))

    def quantisation(self) -> Quantisation:
        """How weights are stored; a form that is not read is refused by name."""
        self._read.update(("quantization_config", "compression_config"))
        return read_quantisation(self._raw)

    def rest(self, *, also_read: Sequence[str]) -> dict[str, Any]:
        """Fields that nobody read: kept and ignored."""
        return {name: value for name, value in self._raw.items() if name not in self._read and name not in also_read}

    @staticmethod
    def _kinds(name: str, listed: object, layers: int, allowed: Mapping[str, bool]) -> list[str]:
        if not isinstance(listed, list | tuple | str):
            raise BadModel(f"config.json: {name} must be a list, not {listed!r}")
        if len(listed) != layers:
            raise BadModel(f"config.json: {name} has {len(listed)} entries for {layers} layers")
        for layer, kind in enumerate(listed):
            if not isinstance(kind, str) or kind not in allowed:
                raise BadModel(f"config.json: {name}[{layer}] is {kind!r}, not one of {', '.join(allowed)}")
        return list(listed)
