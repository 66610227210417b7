"""Python's garbage collector beside a device: it does not walk what was there when an engine opened.

A full collection walks every object of the process, on the H200's machine 120 to 160 ms for those of torch, Triton and a model, and the
loop stands still meanwhile: a running stream waited 189 ms for one. What is made later is little, and collected as ever. On the CPU a
step may take as long, and the process is others' too: nothing is changed there.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["old_objects_left_out"]

_blocks = 0  # that are entered


@contextmanager
def old_objects_left_out(device: torch.device) -> Iterator[None]:
    """Collect once; until the last such block ends, collections leave out what is there now. Nothing on the CPU. Loop thread only."""
    global _blocks
    if device.type == "cpu":
        yield
        return
    gc.collect()
    gc.freeze()
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        if not _blocks:
            gc.unfreeze()
