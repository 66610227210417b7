"""The directory a conversion writes: files that are whole or not there, and the plan that says what belongs to it.

Knows no tensors' meaning. `convert.json` holds what was asked of which source; while the conversion runs its lock is held.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import BadModel, BadSetting
from engine.model.fields import read_json

__all__ = ["PLAN", "Output", "fingerprint"]

PLAN = "convert.json"
_PARTIAL = ".partial"


class Output:
    """A directory being written. Raises BadSetting: it holds something else, or another process converts into it."""

    def __init__(self, directory: Path, plan: Mapping[str, Any]) -> None:
        self._directory = directory
        self._lock = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._begin(json.loads(json.dumps(plan)))
        except OSError as error:
            self.close()
            raise BadSetting(f"cannot write {directory}: {error.strerror}") from error
        except BadSetting:
            self.close()
            raise

    def _begin(self, plan: dict[str, Any]) -> None:
        path = self._directory / PLAN
        if not path.exists():
            if any(each.name != PLAN + _PARTIAL for each in self._directory.iterdir()):
                raise BadSetting(f"{self._directory} is not empty and holds no conversion; name a new directory")
            self.write_json(PLAN, plan)
        self._lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadSetting(f"another process converts into {self._directory}") from None
        try:
            found = read_json(path)
        except BadModel as error:
            raise BadSetting(f"{error}; remove {self._directory} and begin anew") from error
        if found != plan:
            raise BadSetting(f"{self._directory} holds a conversion of another model or with other options; name a new directory")

    def close(self) -> None:
        """Let others convert into the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def has(self, file: str, names: Sequence[str]) -> bool:
        """Whether a safetensors file of exactly these tensors is there; one that cannot be read is made again."""
        path = self._directory / file
        if not path.exists():
            return False
        try:
            with safe_open(path, framework="pt") as stored:
                return set(stored.keys()) == set(names)
        except (SafetensorError, OSError):
            return False

    def write_tensors(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """A safetensors file."""
        partial = self._directory / (file + _PARTIAL)
        try:
            save_file(dict(tensors), partial, metadata={"format": "pt"})
            partial.chmod(0o666 & ~_mask())  # as other files are made; the library's are for their owner alone
            self._finish(partial, file)
        except (OSError, SafetensorError) as error:
            raise BadSetting(f"cannot write {self._directory / file}: {' '.join(str(error).split())}; run again to go on") from error

    def write_json(self, file: str, content: Mapping[str, Any]) -> None:
        """A JSON file."""
        self.write_bytes(file, (json.dumps(content, indent=2) + "\n").encode())

    def write_bytes(self, file: str, content: bytes) -> None:
        """Any other file."""
        partial = self._directory / (file + _PARTIAL)
        try:
            partial.write_bytes(content)
            self._finish(partial, file)
        except OSError as error:
            raise BadSetting(f"cannot write {self._directory / file}: {error.strerror}; run again to go on") from error

    def _finish(self, partial: Path, file: str) -> None:
        """Give a file its name once all of it is on disk, and the name too."""
        _sync(partial)
        partial.replace(self._directory / file)
        _sync(self._directory)


def _mask() -> int:
    """The process's file mode mask, which can only be asked by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def fingerprint(directory: Path) -> str:
    """Of a source's files: names, sizes and times of change."""
    facts = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in sorted(directory.iterdir()) if each.is_file()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
