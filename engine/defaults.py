"""What a request that says nothing gets: the model directory's generation_config.json.

1. The file is optional; without it the defaults of `Sampling` stand.
2. `do_sample: false` means greedy, as it does to the library that writes these files.
3. Its ends of a text count beside those of config.json: either file may name one that the other lacks.
4. Whatever else it holds is ignored; what is wrong in a field that is read is a BadModel of one line that names the field.
"""

import json
import math
from pathlib import Path
from typing import Any

from engine.errors import BadModel, BadRequest, shown
from engine.sampling import Sampling

__all__ = ["default_eos", "default_sampling"]

_FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def default_sampling(directory: Path) -> Sampling:
    """Sampling defaults of a model directory. Raises BadModel naming the field."""
    tree = _read(directory)
    numbers = {name: _number(tree, name) for name in _NUMBERS if tree.get(name) is not None}
    top_k = _number(tree, "top_k") if tree.get("top_k") is not None else 0
    if top_k != int(top_k):
        raise BadModel(f"{_FILE}: top_k must be an integer, not {shown(top_k)}")
    if tree.get("do_sample") is False:
        numbers["temperature"] = 0.0
    try:
        return Sampling(top_k=max(0, int(top_k)), **numbers)  # type: ignore[arg-type]  # the other fields are floats
    except BadRequest as error:
        raise BadModel(f"{_FILE}: {error}") from error


def default_eos(directory: Path) -> tuple[int, ...]:
    """Token ids that end a text by this file, one or a list; none where it names none. Raises BadModel."""
    value = _read(directory).get("eos_token_id")
    listed = [] if value is None else value if isinstance(value, list) else [value]
    for each in listed:
        if not isinstance(each, int) or isinstance(each, bool) or each < 0:
            raise BadModel(f"{_FILE}: eos_token_id must hold token ids, not {shown(each)}")
    return tuple(listed)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / _FILE
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(f"{_FILE} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise BadModel(f"{_FILE} must hold an object")
    return tree


def _number(tree: dict[str, Any], name: str) -> float:
    """A finite number: this file's JSON may hold NaN, infinities and integers beyond any float."""
    value = tree[name]
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return value
    except OverflowError:
        pass
    raise BadModel(f"{_FILE}: {name} must be a finite number, not {shown(value)}")
