"""What the collector walks while an engine is open."""

import gc
import weakref
from contextlib import ExitStack

import pytest
import torch

from engine.collector import old_objects_left_out

CARD = torch.device("cuda")


class _Node:
    def __init__(self) -> None:
        self.itself = self


def test_only_what_is_made_inside_is_walked() -> None:
    """Older objects are left out, cycles made inside are collected there, and afterwards everything is walked again."""
    old: list[list[int]] = [[] for _ in range(1000)]
    garbage = weakref.ref(_Node())
    with old_objects_left_out(CARD):
        assert garbage() is None, "what was garbage before would be left out for good"
        assert gc.get_freeze_count() > len(old)
        assert not any(one is old for one in gc.get_objects())
        inside = weakref.ref(_Node())
        gc.collect()
        assert inside() is None
    assert gc.get_freeze_count() == 0
    assert any(one is old for one in gc.get_objects())


def test_the_last_of_two_engines_to_close_ends_it() -> None:
    """Whichever opened first, and where an error closes it; what was left out is collected then."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(old_objects_left_out(CARD))
    node = _Node()
    left = weakref.ref(node)
    second.enter_context(old_objects_left_out(CARD))
    del node
    first.close()
    gc.collect()
    assert gc.get_freeze_count() > 0
    assert left() is not None, "it was there when the second opened"
    with pytest.raises(ValueError, match="closed by it"), second:
        raise ValueError("closed by it")
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert left() is None


def test_nothing_is_left_out_on_the_cpu() -> None:
    """An engine there shares its process with tests and applications."""
    with old_objects_left_out(torch.device("cpu")):
        assert gc.get_freeze_count() == 0
