"""What stages of other machines hand on, as the head sees it: numbers, and the last one's tensors. Knows no steps and no sessions."""

from dataclasses import dataclass
from typing import Any

import torch

from engine.node.far import Far
from engine.node.far_session import failed
from engine.node.passage import AnyRows, Form, together
from engine.stage_calls import Carried
from streams import Event

__all__ = ["FarCarried", "Handover", "Numbers"]

_NOWHERE = torch.empty(0)  # stands for what is on another machine


class Numbers:
    """One count for all that is handed on between stages."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        """The next number."""
        self._next += 1
        return self._next - 1


@dataclass(frozen=True, slots=True)
class FarCarried(Carried):
    """What a stage of another machine hands on. Only the last one's tensors are here; the others' go from node to node."""

    number: int


class Handover:
    """Of one stage."""

    def __init__(self, far: Far, form: Form, numbers: Numbers, *, last: bool) -> None:
        """Args: form: of what it hands on. last: the stage behind it is the head's."""
        self.chunk = AnyRows(form.chunk_rows)  # key of chunks' buffers
        self._far = far
        self._form = form
        self._numbers = numbers
        self._last = last
        self._read: dict[object, Event[Any]] = {}  # by buffers of arrivals: done once they are read

    def number_of(self, arrived: Carried | None) -> int:
        """Of what comes next: that of what arrived, or a new one at the first stage."""
        assert arrived is None or isinstance(arrived, FarCarried), "stages of other machines follow one another"
        return self._numbers.take() if arrived is None else arrived.number

    def handed_on(self, key: object, rows: int, prefix: str, number: int, submitted: Event[Any]) -> FarCarried:
        """What the node hands on as `number`: here, if this is the stage behind it."""
        if not self._last:
            return FarCarried(submitted, _NOWHERE, _NOWHERE, None, number)
        if submitted.done() and (error := submitted.error()) is not None:
            none = self._far.passage.nothing(key, rows, self._form, prefix, failed("arrived", error))
            return FarCarried(none.event, none.states, none.bad_layer, none.selection, number)
        free = self._read.get((prefix, key))
        came = self._far.passage.arrive(key, rows, self._form, prefix, number, () if free is None else (free,))
        return FarCarried(together((submitted, came.event), "arrived"), came.states, came.bad_layer, came.selection, number)

    def is_read(self, key: object, prefix: str, event: Event[Any]) -> None:
        """What was handed on to buffers of `key` is read once `event` is done."""
        self._read[prefix, key] = event
