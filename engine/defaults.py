"""What a request that says nothing about sampling gets: the model directory's generation_config.json.

1. The file is optional; without it the defaults of `Sampling` stand.
2. `do_sample: false` means greedy, as it does to the library that writes these files.
"""

import json
from pathlib import Path

from engine.errors import BadModel, BadRequest
from engine.sampling import Sampling

__all__ = ["default_sampling"]

_FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def default_sampling(directory: Path) -> Sampling:
    """Sampling defaults of a model directory. Raises BadModel naming the field."""
    path = directory / _FILE
    if not path.exists():
        return Sampling()
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadModel(f"{_FILE} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise BadModel(f"{_FILE} must hold an object")
    numbers: dict[str, float] = {}
    for name in (*_NUMBERS, "top_k"):
        value = tree.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadModel(f"{_FILE}: {name} must be a number, not {value!r}")
        numbers[name] = value
    top_k = numbers.pop("top_k", 0)
    if tree.get("do_sample") is False:
        numbers["temperature"] = 0.0
    try:
        return Sampling(top_k=max(0, int(top_k)), **numbers)  # type: ignore[arg-type]  # the other fields are floats
    except BadRequest as error:
        raise BadModel(f"{_FILE}: {error}") from error
