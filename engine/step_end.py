"""How a step ends on the stage that samples: final states kept, logits, samples, acceptance, drafts, and the way to the host.

Holds the buffers of a step's rows that host and other stages read, for one bucket. Knows no layers.

Invariants:
1. What is accepted is decided on the device (`kernels/verify`); a refused row leaves only bytes at positions past LOGICAL, which the next
   step writes again.
2. The host follows a step while the next one runs: outcomes land in two buffers by turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from engine.chain import Chain
from engine.draft import Drafter, Judged
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from engine.stage_streams import StageStreams
from engine.step_output import StepOutput
from kernels.layout import STATE_FIELDS
from kernels.selection import Scratch
from kernels.step import keep_logits, store_hidden
from kernels.verify import accept_rows, read_standing
from memory.staging import landing
from memory.table import StepTable
from streams import Event

__all__ = ["StepEnd", "StepRows"]

_OUTPUTS = 2  # outcomes on the host at once


@dataclass(frozen=True, slots=True)
class StepRows:
    """The query rows of a step, T = places * rows; see `kernels/verify` for what each says."""

    place_of: Tensor  # int32 [T]
    next_of: Tensor  # int32 [T]
    positions: Tensor  # int64 [T], as the others
    tokens: Tensor
    mirrored: Tensor  # [places]
    outcome: Tensor  # the next four, side by side: one copy to the host
    samples: Tensor  # [T]
    bad_layer: Tensor  # [T]
    accepted: Tensor  # [places]
    judged: Tensor  # [places]

    @classmethod
    def of(cls, places: int, rows: int, device: torch.device) -> Self:
        """All padding."""
        count = places * rows
        place_of, next_of = (torch.full((count,), -1, dtype=torch.int32, device=device) for _ in range(2))
        positions, tokens, mirrored, outcome = (
            torch.zeros(size, dtype=torch.int64, device=device) for size in (count, count, places, 2 * count + 2 * places)
        )
        return cls(place_of, next_of, positions, tokens, mirrored, outcome, *outcome.split([count, count, places, places]))


class StepEnd:
    """Buffers and operations of the ends of one bucket's steps."""

    def __init__(self, stage: Stage, rows: StepRows, scratch: Scratch | None, hidden: Callable[[], Tensor]) -> None:
        """Args: scratch: of the selection, None on the CPU. hidden: the step's states after the final norm, [T, H], asked for inside its
        work."""
        self._stage, self._rows, self._hidden = stage, rows, hidden
        count, places, device = rows.positions.shape[0], rows.mirrored.shape[0], stage.device
        self._shape = places, count // places
        self.logits = torch.zeros((count, stage.model.config.vocabulary), device=device)
        self.standing = torch.zeros((places, STATE_FIELDS), dtype=torch.int64, device=device)
        self._landed = [torch.zeros(rows.outcome.shape, dtype=torch.int64, pin_memory=device.type != "cpu") for _ in range(_OUTPUTS)]
        self._turn = 0
        self.drafter: Drafter | None = None
        if count > places:
            judged = Judged(rows.positions, rows.next_of, rows.samples, rows.accepted, rows.mirrored, scratch)
            self.drafter = Drafter(stage, judged, hidden, count // places - 1)

    def next_landing(self) -> Tensor:
        """Where the next step's outcome lands on the host."""
        self._turn += 1
        return self._landed[self._turn % _OUTPUTS]

    def issue(self, chain: Chain, streams: StageStreams, table: StepTable, sampling: SamplingTable) -> Event[Any]:
        """Submit the end of a step; returns its last event."""
        rows, compute = self._rows, streams.compute
        finished: Event[Any] = chain.submit(
            compute, partial(self._finish, table, sampling), label="step.finish",
            writes=(self.logits, rows.outcome, rows.next_of),
        )  # fmt: skip
        if self.drafter is not None:
            finished = self.drafter.issue(chain, streams, table, sampling)
        if self._stage.before:
            work = partial(read_standing, table.tensor, self.standing)
            finished = chain.submit(compute, work, label="step.stand", writes=(self.standing,))
        return finished

    def clear(self, table: StepTable) -> None:
        """After a failed step: unmap the slots that drafting assigned."""
        if self.drafter is not None:
            self.drafter.clear(table)

    def _finish(self, table: StepTable, sampling: SamplingTable) -> None:
        stage, rows = self._stage, self._rows
        hidden = self._hidden()  # the norm behind the last layer is the final one
        store_hidden(table.tensor, rows.place_of, rows.positions, hidden)
        keep_logits(stage.model.logits(hidden), self.logits, rows.bad_layer, stage.model.config.layers)
        sampling.sample(self.logits, rows.positions + 1, rows.tokens, rows.samples)
        if stage.forced_acceptance is not None:
            stage.forced_acceptance.overwrite(rows.samples, rows.tokens, rows.place_of, rows.positions, sampling.seeds)
        accept_rows(
            table.tensor, rows.place_of, rows.tokens, rows.samples, rows.bad_layer, sampling.output_counts, rows.accepted, rows.next_of
        )

    def read(self, landed: Tensor, keep_logits: bool) -> StepOutput:
        """Work: bring the outcome, and the logits if asked for, to the host."""
        landed.copy_(self._rows.outcome, non_blocking=True)
        logits = None
        if keep_logits:
            logits = landing(self.logits)
            logits.copy_(self.logits, non_blocking=True)
            logits = logits.view(*self._shape, -1)
        return StepOutput(landed, *self._shape, logits)
