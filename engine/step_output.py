"""What the host reads of a decode step, and the events that say when.

Values only: knows no streams and no requests.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from streams import Event

__all__ = ["PlaceOutput", "StepEvents", "StepOutput"]


@dataclass(frozen=True, slots=True)
class PlaceOutput:
    """What the host reads of one place of a step.

    tokens     what follows each row; only the first `accepted` count
    bad_layer  of each row: first global layer whose output was not finite, else -1
    accepted   rows that count: 1 and the accepted drafts
    judged     drafts that the step judged
    """

    tokens: list[int]
    bad_layer: list[int]
    accepted: int
    judged: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Where a step's outcome lands on the host; read it once the event is done, before the step after the next overwrites it.

    landed  [2 * places * rows + 2 * places]  int64  CPU  tokens, bad layers, accepted, judged: see PlaceOutput
    logits  [places, rows, vocabulary]        f32    CPU  when asked for
    """

    landed: Tensor
    places: int
    rows: int
    logits: Tensor | None

    def read(self) -> list[PlaceOutput]:
        """Every place's, in order. One call of torch, whatever the batch: each costs the loop a microsecond or more."""
        values, rows, count = self.landed.tolist(), self.rows, self.places * self.rows
        return [
            PlaceOutput(
                values[place * rows : (place + 1) * rows], values[count + place * rows : count + (place + 1) * rows],
                values[2 * count + place], values[2 * count + self.places + place],
            )
            for place in range(self.places)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepEvents:
    """`done`: rows written and state advanced. `output`: what the host reads. A replayed step is one operation, and both are its.

    `over`: of a step in several stages, when the other stages' sessions stand where this one's do; nothing else of them comes before that.
    """

    done: Event[Any]
    output: Event[StepOutput]
    over: Event[Any] | None = None

    @property
    def followed(self) -> Event[Any]:
        """What the host waits for before it acts on the step."""
        return self.output if self.over is None else self.over
