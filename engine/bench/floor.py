"""The least a decode step must read, in bytes, and how fast this device copies: their quotient is a step's floor.

1. Counted is what every implementation reads: weights that take part, every index key of the history in every full layer, the selected
   rows. Activations, tables, the sampler and what the step writes are not; nor is anything that a placement adds.
2. Bandwidth is measured in the same process, bytes read plus bytes written of one large copy: a floor needs no data sheet.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.glm import Model
from engine.model.layer import LayerWeights
from engine.model.moe import MoeWeights
from kernels.layout import BlockLayout

__all__ = ["StepBytes", "copy_bandwidth", "step_bytes", "weight_bytes"]

_COPY_BYTES = 2 << 30  # far beyond any cache of the card
_COPY_BYTES_CPU = 64 << 20
_COPIES = 12


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step must read."""

    weights: int
    keys: int
    rows: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.keys + self.rows


def step_bytes(model: Model, layout: BlockLayout, *, length: float) -> StepBytes:
    """Of a step of one session at a history of `length` rows (a mean may be no whole number), without drafts."""
    assert length >= 1, f"a step reads at least its own row, not {length}"
    full = sum(layer.full for layer in model.layers)
    picks = min(model.config.top_k, length)
    return StepBytes(
        weights=weight_bytes(model, 1),
        keys=round(full * length * layout.key.key_bytes),
        rows=round(len(model.layers) * picks * layout.row.row_bytes),
    )


def weight_bytes(model: Model, rows: int) -> int:
    """Bytes of weights that a step of `rows` query rows reads when no two of them share an expert, as long as there are others."""
    assert rows >= 1, f"a step of {rows} rows"
    total = sum(_layer_bytes(layer, rows) for layer in model.layers)
    total += _held(model.norm) + _held(model.head)
    if model.embedding is not None:
        total += rows * _held(model.embedding) // model.embedding.shape[0]
    if model.mtp is not None:  # a committed row's MTP row is projected, its attention and experts are not run
        mtp, block = model.mtp, model.mtp.layer
        total += sum(map(_held, (mtp.embedding_norm, mtp.hidden_norm, mtp.join, block.input_norm, block.mla.row_down, block.mla.row_norm)))
        indexer = block.full_indexer
        total += sum(map(_held, (indexer.key_down, indexer.key_norm, indexer.key_bias)))
    return total


def _layer_bytes(layer: LayerWeights, rows: int) -> int:
    if not isinstance(layer.mlp, MoeWeights):
        return _held(layer)
    moe = layer.mlp
    routed = _held(moe.gate_up) + _held(moe.down)
    experts = moe.bias.shape[0]
    touched = min(experts, rows * moe.routing.experts_per_token)
    return _held(layer) - routed + routed * touched // experts


def _held(part: object) -> int:
    """Bytes of a tensor, or of every tensor of a dataclass."""
    if isinstance(part, Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, list | tuple):
        return sum(map(_held, part))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return sum(_held(getattr(part, field.name)) for field in dataclasses.fields(part))
    return 0


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
