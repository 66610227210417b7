"""The kernel's own files, read only: /proc and /sys, or a directory that stands for them in a test.

Knows no finding. The one place through which the doctor looks at a machine.

1. Nothing is opened for writing, and nothing is run.
2. What cannot be read is a fact, not an error: `Unread` says why.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Tree", "Unread"]


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that gave nothing; `why` is one phrase."""

    path: str
    why: str


class Tree:
    """Files below `root`; paths are given as the kernel names them, `/proc/meminfo`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, path: str) -> str | Unread:
        """The text of a file without the white space around it."""
        try:
            return (self._root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            why = "this kernel does not have it" if missing else (error.strerror or type(error).__name__).lower()
            return Unread(path, why)

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted; none when it is missing or unreadable."""
        try:
            return sorted(os.listdir(self._root / path.lstrip("/")))
        except OSError:
            return []
