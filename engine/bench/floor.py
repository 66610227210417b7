"""The least a decode step must read, in bytes, and how fast this device copies: their quotient is a step's floor.

1. Counted is what every implementation reads: weights that take part, every index key of the history in every full layer, the selected
   rows. Activations, tables, the sampler and what the step writes are not; nor is anything that a placement adds.
2. Bandwidth is measured in the same process, bytes read plus bytes written of one large copy: a floor needs no data sheet.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.bytes import draft_weights, step_weights
from engine.model.glm import Model
from kernels.layout import BlockLayout

__all__ = ["StepBytes", "copy_bandwidth", "expected_experts", "step_bytes"]

_COPY_BYTES = 2 << 30  # far beyond any cache of the card
_COPY_BYTES_CPU = 64 << 20
_COPIES = 12


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step must read. `drafts`: what guessing the next step's drafts reads, its own keys and rows included."""

    weights: int
    keys: int
    rows: int
    drafts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.keys + self.rows + self.drafts


def step_bytes(model: Model, layout: BlockLayout, *, length: float, depth: int = 0, sessions: int = 1) -> StepBytes:
    """Of a step of so many sessions at histories of `length` rows (a mean may be no whole number).

    Args: depth: drafts a step judges beside its own row, and then makes anew. Rows of one session read its keys once, and at least one
        row's picks; all rows together choose `expected_experts` of each layer.
    """
    assert length >= 1, f"a step reads at least its own row, not {length}"
    full = sum(layer.full for layer in model.layers)
    picks = min(model.config.top_k, length)
    together = sessions * (depth + 1)
    experts = expected_experts(model.config.experts, model.config.experts_per_token, together) if together > 1 else None
    drafts = 0.0
    if depth:
        selections = 1 if model.config.share_mtp_selection else depth
        own = selections * (length * layout.key.key_bytes + picks * layout.row.row_bytes)
        drafts = depth * draft_weights(model, sessions).total + sessions * own
    return StepBytes(
        weights=step_weights(model, together, experts=experts).total,
        keys=round(sessions * full * length * layout.key.key_bytes),
        rows=round(sessions * len(model.layers) * picks * layout.row.row_bytes),
        drafts=round(drafts),
    )


def expected_experts(experts: int, chosen: int, rows: int) -> int:
    """Distinct experts that `rows` rows choose, `chosen` of `experts` each, on average where rows choose evenly and by themselves."""
    return max(chosen, int(experts * (1 - (1 - chosen / experts) ** rows))) if experts else 0


def copy_bandwidth(device: torch.device, size_bytes: int = 0) -> float:
    """Bytes a second, read plus written, of the median of several copies of `size_bytes` within the device. Waits for them.

    Args: size_bytes: of one copy; 0: 2 GiB, on the CPU 64 MiB.
    """
    size = size_bytes or (_COPY_BYTES_CPU if device.type == "cpu" else _COPY_BYTES)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = _host_seconds if device.type == "cpu" else _device_seconds
    seconds = [timed(lambda: target.copy_(source)) for _ in range(_COPIES)]
    return 2 * size / statistics.median(seconds[2:])


def _host_seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _device_seconds(work: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
