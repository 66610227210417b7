"""The tensors of a model directory, read in place: one safetensors file, or several with an index.

Holds `TensorFiles`. Knows no layer and no meaning of a name.

Invariants:
1. A file is mapped when one of its tensors is first asked for, so a stage never opens files that hold none of its layers.
2. Every tensor handed out is a view of the mapping; who keeps it must copy it first.
3. With an index only the index says which file holds a name.
Source: model.md, section 4.1.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import BadModel
from engine.model.ahead import ReadAhead
from engine.model.fields import read_json

__all__ = ["TensorFiles"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class TensorFiles:
    """Names, shapes and contents of the stored tensors. Raises BadModel naming the file or tensor."""

    borrowed = True

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._open: dict[str, Any] = {}
        self._ahead = ReadAhead()
        if not self._directory.is_dir():
            raise BadModel(f"model directory {self._directory} does not exist")
        if (self._directory / _SINGLE).exists():
            self._file_of = dict.fromkeys(self._mapped(_SINGLE).keys(), _SINGLE)
        elif (self._directory / _INDEX).exists():
            self._file_of = _read_index(self._directory / _INDEX)
        else:
            raise BadModel(f"{self._directory} holds neither {_SINGLE} nor {_INDEX}")

    @property
    def names(self) -> frozenset[str]:
        """Every stored tensor's name."""
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Stored dtype of a tensor, as its file's header has it: F32, BF16, F8_E4M3."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """The stored tensor: a CPU view of the mapped file in its stored dtype."""
        self._slice(name)  # checks that the file holds it
        tensor: Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor

    def read_ahead(self, names: Collection[str]) -> None:
        """Have the system read these tensors' pages, several files at a time; returns at once. See `ahead.py`."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name in self._file_of:
                by_file.setdefault(self._file_of[name], []).append(name)
        for file, several in by_file.items():
            self._ahead.ask(self._directory / file, several)

    def close(self) -> None:
        """End reading ahead. Tensors handed out stay."""
        self._ahead.close()

    def _slice(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise BadModel(f"tensor {name} is missing")
        try:
            return self._mapped(file).get_slice(name)
        except SafetensorError as error:
            raise BadModel(f"{_INDEX} places tensor {name} in {file}, which does not hold it") from error

    def _mapped(self, file: str) -> Any:
        if file not in self._open:
            path = self._directory / file
            if not path.is_file():
                raise BadModel(f"{path} is missing: {_INDEX} names it")
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadModel(f"{path} is truncated or not a safetensors file: {' '.join(str(error).split())}") from error
        return self._open[file]


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"{path}: weight_map must be an object of tensor and file names")
    for name, file in weight_map.items():
        # A name with a separator could leave the directory.
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BadModel(f"{path}: weight_map[{name}] must be a plain file name, not {file!r}")
    return dict(weight_map)
