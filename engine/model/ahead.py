"""Reading ahead: the system is asked for pages of files before somebody touches them, by several threads at a time.

Knows safetensors' header, and no tensor's contents. Nothing is held here: pages lie in the system's cache, which gives them up when memory
is short, so what is read ahead takes no memory from the model.

1. A file whose header cannot be read, or a system that cannot be asked, is no failure: whoever reads the tensor says what is wrong.
"""

import json
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["ReadAhead"]

_THREADS = 4
_GAP_BYTES = 1 << 20  # between tensors that are asked for as one range
_HEADER_BYTES_MAX = 100 << 20  # safetensors' own limit


class ReadAhead:
    """Asks for tensors of files."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")
        self._places: dict[Path, dict[str, tuple[int, int]]] = {}

    def ask(self, path: Path, names: Collection[str]) -> None:
        """Have the tensors of these names in `path` read; returns at once."""
        if not hasattr(os, "posix_fadvise"):
            return
        places = self._places.get(path)
        if places is None:
            places = self._places[path] = _places(path)
        for first, end in ranges(places[name] for name in names if name in places):
            self._pool.submit(_fetch, path, first, end)

    def close(self) -> None:
        """Forget what is not begun, and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def ranges(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places in ascending order, those close to one another together."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(places):
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """First byte and end of each tensor in the file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_BYTES_MAX:
                return {}
            header = json.loads(file.read(length))
        return {
            name: (8 + length + facts["data_offsets"][0], 8 + length + facts["data_offsets"][1])
            for name, facts in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def _fetch(path: Path, first: int, end: int) -> None:
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(opened, first, end - first, os.POSIX_FADV_WILLNEED)
    except OSError:
        return
    finally:
        os.close(opened)
