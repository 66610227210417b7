"""Single operations at the model's true shapes: what each is given, what it must give, and the bytes it cannot avoid.

A case is made on a device and gives calls over rotating buffers, together larger than any cache (`ROTATED_BYTES`), and a check against
torch in float32 or the operation's reference. Knows no clock.

Invariants:
1. A case's check runs on what its calls run on, before anything is timed.
2. `bytes` counts what every implementation reads and writes, once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.bench.timing import Call

__all__ = ["ROTATED_BYTES", "TRUE", "Case", "Made", "Shapes", "drawn", "relative", "rotated"]

ROTATED_BYTES = 192 << 20  # three times the largest cache in mind


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of one model and of what is asked of it."""

    hidden: int = 6144
    query_latent: int = 2048
    latent: int = 512
    rope: int = 64
    heads: int = 64
    nope: int = 192
    value: int = 256
    index_heads: int = 32
    index_width: int = 128
    picks: int = 2048
    experts: int = 64
    experts_per_token: int = 8
    expert_width: int = 2048
    dense_width: int = 12_288
    vocabulary: int = 154_880
    keys: int = 1_048_576
    dtype: torch.dtype = torch.bfloat16
    rotated_bytes: int = ROTATED_BYTES
    calls: int = 20
    graph_bytes: int = 4 << 30  # what the calls of one graph move at most, four calls at the least

    def calls_of(self, moved_bytes: int) -> int:
        """Calls in a graph of an operation that moves so many bytes."""
        return max(min(4, self.calls), min(self.calls, self.graph_bytes // max(1, moved_bytes)))


TRUE = Shapes()


@dataclass(frozen=True, slots=True)
class Made:
    """A case on a device: calls to time, and the size of the difference to what they must give."""

    calls: tuple[Call, ...]
    difference: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape."""

    group: str
    name: str
    bytes: int
    bound: float  # largest difference that passes, relative to the largest value of a row; 0: equal to the bit
    make: Callable[[torch.device], Made]
    target_us: float | None = None
    target_share: float | None = None  # of the copy bandwidth
    facts: dict[str, Any] = field(default_factory=dict)


def drawn(device: torch.device, *shape: int, seed: int = 1, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers from a seed, drawn on the device, in pieces so that no float32 copy of a large tensor exists."""
    generator = torch.Generator(device).manual_seed(seed)
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1)
    for start in range(0, flat.numel(), 1 << 26):
        part = flat[start : start + (1 << 26)]
        part.copy_(torch.randn(part.shape, generator=generator, device=device) * scale)
    return out


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest size in its row (last dimension); NaN where either is."""
    got, wanted = got.float(), wanted.float()
    size = wanted.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((got - wanted).abs() / size).amax())


def rotated(shapes: Shapes, one_bytes: int) -> Iterator[int]:
    """Seeds of the buffers that together are too large for a cache; at least two where there are several calls, at most one a call."""
    return iter(range(max(min(2, shapes.calls), min(shapes.calls, -(-shapes.rotated_bytes // max(1, one_bytes))))))
