"""Sampling parameters of the places of a step, the token counts that penalties need, biases and masks.

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
    """One request's row of the table, and the counts and bias it points to."""

    parameters: tuple[float, ...]
    seed: int
    prompt_seen: Tensor | None  # uint8 [vocabulary]
    output_counts: Tensor | None  # int32 [vocabulary]
    bias: Tensor | None = None  # f32 [vocabulary], added to the logits
    mask: Tensor | None = None  # int32 [(vocabulary + 31) // 32]: a bit a token that may come

    @staticmethod
    def of(
        sampling: Sampling, seed: int, prompt: Sequence[int], vocabulary: int, device: torch.device | str = "cpu",
        mask: Tensor | None = None,
    ) -> "SamplingState":  # fmt: skip
        """Build from what the caller asked; `seed` is the resolved one. Once a request: counts go to the device while the host waits.

        Args: mask: int32 [(vocabulary + 31) // 32], CPU: which tokens may come first; None: any token may come, always.
        """
        parameters = (
            sampling.temperature, sampling.top_p, float(sampling.top_k), sampling.min_p,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, 0.0,
        )  # fmt: skip
        bias = None
        if sampling.logit_bias:
            token_ids, values = zip(*sampling.logit_bias, strict=True)
            bias = torch.zeros(vocabulary)
            bias[torch.tensor(token_ids)] = torch.tensor(values)
            bias = bias.to(device)
        held = None if mask is None else mask.to(device, copy=True)
        if not sampling.penalises:
            return SamplingState(parameters, seed, None, None, bias, held)
        seen = torch.zeros(vocabulary, dtype=torch.uint8)
        seen[torch.tensor(sorted(set(prompt)), dtype=torch.int64)] = 1
        return SamplingState(parameters, seed, seen.to(device), torch.zeros(vocabulary, dtype=torch.int32).to(device), bias, held)


class SamplingTable:
    """One row a place: f32 parameters, seed, addresses of counts, bias and mask (0: none); and that for `rows` query rows of each place."""

    def __init__(self, places: int, device: torch.device | str = "cpu", *, rows: int = 1) -> None:
        self._rows = rows
        self._of_place = _Columns.empty(places, device)
        self._of_row = self._of_place if rows == 1 else _Columns.empty(places * rows, device)
        self._held: list[SamplingState | None] = [None] * places
        row = torch.arange(rows, device=device)
        self._hears = row[None, :-1] < row[:, None]  # row j comes after drafts 1..j

    @property
    def seeds(self) -> Tensor:
        """Of every query row, int64 [places * rows]."""
        return self._of_row.seeds

    @property
    def output_counts(self) -> Tensor:
        """Addresses of every place's counts, int64 [places]; 0: none."""
        return self._of_place.output_counts

    def rewrite(self, states: Sequence[SamplingState | None]) -> None:
        """Set every place; run it in stream order. `None`: free place. Holds the counts until the next rewrite."""
        neutral = SamplingState((0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0), 0, None, None)
        held = [state or neutral for state in states]
        held += [neutral] * (len(self._held) - len(held))
        self._of_place.write(held)
        if self._rows > 1:
            self._of_row.write([state for state in held for _ in range(self._rows)])
        self._held = list(held)

    def sample(self, logits: Tensor, positions: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Choose what follows each query row. Counts nothing: only accepted rows count.

        logits     [places * rows, vocabulary]  f32    raw
        positions  [places * rows]              int64  position the token will stand at
        tokens     [places * rows]              int64  what each row feeds: a row behind drafts counts them as generated
        out        [places * rows]              int64  written in full
        """
        of = self._of_row
        before = None
        if self._rows > 1:
            drafts = tokens.view(-1, 1, self._rows)[:, :, 1:]
            before = torch.where(self._hears, drafts, -1).view(-1, self._rows - 1)
        out.copy_(sample(logits, of.parameters, of.seeds, positions, of.prompt_seen, of.output_counts, before, of.biases, of.masks))

    def draft(self, logits: Tensor, positions: Tensor, drafts: Tensor) -> Tensor:
        """Guess one token a place, with the noise that the sample at that position will have.

        logits     [places, vocabulary]  f32    of the drafting block
        positions  [places]              int64  position the token will stand at
        drafts     [places, n]           int64  guessed before it
        returns    [places]              int64
        """
        of = self._of_place
        return sample(logits, of.parameters, of.seeds, positions, of.prompt_seen, of.output_counts, drafts, of.biases, of.masks)

    def sample_last(self, logits: Tensor, positions: Tensor, out: Tensor) -> None:
        """Choose a token a place that nothing can refuse, and count it. Shapes as `draft`'s; out [places] int64."""
        of = self._of_place
        tokens = sample(logits, of.parameters, of.seeds, positions, of.prompt_seen, of.output_counts, None, of.biases, of.masks)
        count_token(of.output_counts, tokens)
        out.copy_(tokens)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What sampling reads, one row each."""

    parameters: Tensor  # f32 [rows, 8]
    integers: Tensor  # int64 [5, rows]

    @staticmethod
    def empty(rows: int, device: torch.device | str) -> "_Columns":
        return _Columns(torch.zeros((rows, _COLUMNS), device=device), torch.zeros((5, rows), dtype=torch.int64, device=device))

    @property
    def seeds(self) -> Tensor:
        return self.integers[0]

    @property
    def prompt_seen(self) -> Tensor:
        return self.integers[1]

    @property
    def output_counts(self) -> Tensor:
        return self.integers[2]

    @property
    def biases(self) -> Tensor:
        return self.integers[3]

    @property
    def masks(self) -> Tensor:
        return self.integers[4]

    def write(self, held: Sequence[SamplingState]) -> None:
        seen = [0 if row.prompt_seen is None else row.prompt_seen.data_ptr() for row in held]
        counts = [0 if row.output_counts is None else row.output_counts.data_ptr() for row in held]
        biases = [0 if row.bias is None else row.bias.data_ptr() for row in held]
        masks = [0 if row.mask is None else row.mask.data_ptr() for row in held]
        device = self.integers.device
        self.parameters.copy_(pinned(torch.tensor([row.parameters for row in held]), device), non_blocking=True)
        integers = torch.tensor([[row.seed for row in held], seen, counts, biases, masks], dtype=torch.int64)
        self.integers.copy_(pinned(integers, device), non_blocking=True)
