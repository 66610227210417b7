"""Reads and writes of many pieces at an offset, whole or not at all. Blocking; knows files by descriptor.

Invariant: nothing goes through Python's buffers; a system call takes up to `_PIECES_MAX` pieces from where they are.
"""

import os
from collections.abc import Sequence
from typing import Final

import numpy

from engine.archive.parts import Bytes

__all__ = ["begin_flush", "read_all", "read_into", "write_all"]

_PIECES_MAX: Final = 512  # of one system call; IOV_MAX is 1,024 on Linux


def write_all(file: int, pieces: Sequence[Bytes], offset: int) -> None:
    """Write flat pieces one after the other from `offset` on. Raises OSError."""
    for start in range(0, len(pieces), _PIECES_MAX):
        views = [piece.data for piece in pieces[start : start + _PIECES_MAX] if piece.size]
        while views:
            done = os.pwritev(file, views, offset)
            offset += done
            views = _after(views, done)


def begin_flush(file: int, offset: int, size_bytes: int) -> None:
    """Have the kernel bring written bytes to disk from now on: a later sync has less to wait for. They stay in its memory."""
    # The advice drops what is on disk already, which these bytes are not, and begins with the rest; sync_file_range is not Python's.
    os.posix_fadvise(file, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def read_into(file: int, pieces: Sequence[Bytes], offset: int) -> bool:
    """Fill flat pieces one after the other from `offset` on. Returns False: the file ended before. Raises OSError."""
    for start in range(0, len(pieces), _PIECES_MAX):
        views = [piece.data for piece in pieces[start : start + _PIECES_MAX] if piece.size]
        while views:
            done = os.preadv(file, views, offset)
            if done == 0:
                return False
            offset += done
            views = _after(views, done)
    return True


def read_all(file: int, size_bytes: int, offset: int) -> Bytes | None:
    """uint8 [size_bytes] from `offset` on; None: the file ended before."""
    found = numpy.empty(size_bytes, dtype=numpy.uint8)
    return found if read_into(file, [found], offset) else None


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What of consecutive views is left behind `done` bytes."""
    while views and done >= views[0].nbytes:
        done -= views.pop(0).nbytes
    if done:
        views[0] = views[0][done:]
    return views
