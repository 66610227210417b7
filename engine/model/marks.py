"""What tells one checkpoint's tensors from another's, found without reading them all: a mark of each layer, for processes that share one.

A mark is a digest of the names, dtypes and shapes of all tensors of a layer, and of 64 bytes from the middle of each one that is no
expert's and of some experts'. It does not depend on how tensors are spread over files. Training changes nearly every value, so other
weights are noticed; a change of single values, or of single experts, may not be.

Invariants:
1. A layer of which a file is not here has no mark: who has only some files compares only those layers.
2. Of a model with some hundreds of GiB some thousands of pages are read.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from engine.errors import BadModel
from engine.model.files import TensorFiles
from engine.model.random import SEED
from engine.model.source import LoadFormat

__all__ = ["marks_of"]

_SAMPLE_BYTES = 64
_EXPERTS = 32  # so many of a layer's tensors of experts are sampled at least, evenly among their names
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def marks_of(model: str | Path, load_format: LoadFormat) -> dict[str, str]:
    """By layer ("layer 3"), or by name for a tensor outside all: 32 hex digits; for random weights the seed. Raises BadModel.

    It reads files: call it beside the loop.
    """
    if load_format == "random":
        return {"random weights": f"seed {SEED}"}
    files = TensorFiles(model)
    try:
        named: dict[str, list[str]] = {}
        for name in sorted(files.names):
            layer = _LAYER.match(name)
            named.setdefault(name if layer is None else f"layer {layer[1]}", []).append(name)
        marks = {part: _mark(files, names) for part, names in named.items()}
    finally:
        files.close()
    return {part: mark for part, mark in marks.items() if mark is not None}


def _mark(files: TensorFiles, names: Sequence[str]) -> str | None:
    """Of tensors in this order; None: not all are here."""
    experts = [name for name in names if ".experts." in name]
    sampled = {*names} - {*experts} | {*experts[:: max(1, len(experts) // _EXPERTS)]}
    digest = xxhash.xxh3_128()
    try:
        for name in names:
            digest.update(f"{name} {files.dtype(name)} {files.shape(name)}\n".encode())
            if name in sampled:
                stored = files.read(name).reshape(-1).view(torch.uint8)
                middle = max(0, len(stored) - _SAMPLE_BYTES) // 2
                digest.update(stored[middle : middle + _SAMPLE_BYTES].numpy().tobytes())
    except BadModel:
        return None
    return digest.hexdigest()
