"""Sampling parameters of the places of a step, and the token counts that penalties need.

Device tensors only; rewritten by a stream-ordered operation when places change. Knows no requests' texts or stops.

Invariants:
1. A free place samples greedily from whatever its row holds; its token is never read.
2. Counts belong to a request: they are made at its start and dropped at its end, so a rolled-back token leaves no trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling import Sampling
from kernels.sample import count_token, sample
from memory.staging import pinned

__all__ = ["SamplingState", "SamplingTable"]

_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class SamplingState:
    """One request's row of the table and the counts it points to."""

    parameters: tuple[float, ...]
    seed: int
    prompt_seen: Tensor | None  # uint8 [vocabulary]
    output_counts: Tensor | None  # int32 [vocabulary]

    @staticmethod
    def of(sampling: Sampling, seed: int, prompt: Sequence[int], vocabulary: int, device: torch.device | str = "cpu") -> "SamplingState":
        """Build from what the caller asked; `seed` is the resolved one. Once a request: counts go to the device while the host waits."""
        parameters = (
            sampling.temperature, sampling.top_p, float(sampling.top_k), sampling.min_p,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, 0.0,
        )  # fmt: skip
        if not sampling.penalises:
            return SamplingState(parameters, seed, None, None)
        seen = torch.zeros(vocabulary, dtype=torch.uint8)
        seen[torch.tensor(sorted(set(prompt)), dtype=torch.int64)] = 1
        return SamplingState(parameters, seed, seen.to(device), torch.zeros(vocabulary, dtype=torch.int32).to(device))


class SamplingTable:
    """One row a place: f32 parameters, seed, addresses of the counts (0: none)."""

    def __init__(self, places: int, device: torch.device | str = "cpu") -> None:
        self._parameters = torch.zeros((places, _COLUMNS), device=device)
        self._integers = torch.zeros((3, places), dtype=torch.int64, device=device)
        self._seeds, self._prompt_seen, self._output_counts = self._integers
        self._held: list[SamplingState | None] = [None] * places

    def rewrite(self, states: Sequence[SamplingState | None]) -> None:
        """Set every place; run it in stream order. `None`: free place. Holds the counts until the next rewrite."""
        neutral = SamplingState((0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0), 0, None, None)
        rows = [state or neutral for state in states]
        rows += [neutral] * (len(self._held) - len(rows))
        seen = [0 if row.prompt_seen is None else row.prompt_seen.data_ptr() for row in rows]
        counts = [0 if row.output_counts is None else row.output_counts.data_ptr() for row in rows]
        device = self._integers.device
        self._parameters.copy_(pinned(torch.tensor([row.parameters for row in rows]), device), non_blocking=True)
        integers = torch.tensor([[row.seed for row in rows], seen, counts], dtype=torch.int64)
        self._integers.copy_(pinned(integers, device), non_blocking=True)
        self._held = list(rows)

    def sample(self, logits: Tensor, positions: Tensor, out: Tensor) -> None:
        """Choose each row's token and count it.

        logits     [places, vocabulary]  f32    raw
        positions  [places]              int64  position the token will stand at
        out        [places]              int64  written in full
        """
        tokens = sample(logits, self._parameters, self._seeds, positions, self._prompt_seen, self._output_counts)
        count_token(self._output_counts, tokens)
        out.copy_(tokens)
