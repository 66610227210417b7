"""Python's garbage collector beside a device: it does not walk what was there when an engine opened.

A full collection walks every object of the process: 120 to 150 ms on the H200's machine for those of torch, Triton and a model (190 ms in a
wait of a running stream were one), and the loop stands still meanwhile. What is made later is little, and collected as ever.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["old_objects_left_out"]

_blocks = 0  # that are entered


@contextmanager
def old_objects_left_out() -> Iterator[None]:
    """Collect once; until the last such block ends, collections leave out what is there now. Loop thread only."""
    global _blocks
    gc.collect()
    gc.freeze()
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        if not _blocks:
            gc.unfreeze()
