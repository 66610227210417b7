"""A part of an append: what is submitted at a time, beside steps. Holds nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streams import Event

__all__ = ["Unit"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of an append. Nothing of it is submitted before `submit` is called, once; the event is done when the part is.

    cost: about what it takes, in bytes that a step could read meanwhile (`append_cost.py`). needs: done before it runs anyway; submitted
    earlier, it would hold up whoever comes behind it on its stream. rests: where to stop if nobody waits. ends_chunk: nothing of the
    append is in flight once it is done, and another one's chunk may come next.
    """

    submit: Callable[[], Event[Any]]
    cost: int
    needs: Event[Any] | None = None
    rests: bool = False
    ends_chunk: bool = False
