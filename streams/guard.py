"""Watches the buffers of one operation from its start to its completion: the virtual backend's eyes.

Knows tensors and bytes, not operations. CPU memory only.

Invariants:
1. From `Guard(...)` to `release`, every tensor in `writes` holds poison: NaN, the most negative integer, all ones in bytes.
2. `release(restore=True)` puts back exactly what was there, so work that writes a part of what it declared changes that part only.
3. Fingerprints are taken after everything is poisoned, so a tensor that is read and (partly) written is watched like any other.
"""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

__all__ = ["Guard", "Spans", "overlap", "poison", "spans_of"]

Spans = tuple[tuple[int, int], ...]
_RUNS_MAX = 4096  # contiguous runs of a strided view kept apart; beyond that the hull stands for all


def spans_of(tensors: Sequence[Tensor]) -> Spans:
    """Byte ranges [first, end) that the tensors cover, ascending and disjoint."""
    runs = sorted(run for tensor in tensors for run in _runs(tensor))
    merged: list[tuple[int, int]] = []
    for first, end in runs:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def overlap(one: Spans, two: Spans) -> bool:
    """Whether any byte is in both."""
    left = right = 0
    while left < len(one) and right < len(two):
        if one[left][1] <= two[right][0]:
            left += 1
        elif two[right][1] <= one[left][0]:
            right += 1
        else:
            return True
    return False


def _runs(tensor: Tensor) -> list[tuple[int, int]]:
    """The contiguous byte runs of a view, innermost dimensions joined as far as they are dense."""
    if tensor.numel() == 0:
        return []
    item = tensor.element_size()
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    dense = 1
    while dims and dims[0][0] == dense:
        dense *= dims.pop(0)[1]
    starts = [0]
    for stride, size in dims:
        if len(starts) * size > _RUNS_MAX:
            last = sum(stride * (size - 1) for stride, size in dims)
            return [(tensor.data_ptr(), tensor.data_ptr() + (last + dense) * item)]
        starts = [start + stride * place for place in range(size) for start in starts]
    return [(tensor.data_ptr() + start * item, tensor.data_ptr() + (start + dense) * item) for start in starts]


class Guard:
    """Poisons what will be written, remembers what it held, and fingerprints all of it."""

    def __init__(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for tensor in writes:
                self._saved.append((tensor, tensor.clone()))
                poison(tensor)
        self._reads = [(tensor, _fingerprint(tensor)) for tensor in reads]
        self._writes = [(tensor, _fingerprint(tensor)) for tensor in writes]

    def changed(self) -> str | None:
        """Which watched buffer somebody wrote since, in words, or None."""
        for kind, watched in (("reads", self._reads), ("writes", self._writes)):
            for place, (tensor, before) in enumerate(watched):
                if _fingerprint(tensor) != before:
                    return f"{kind}[{place}] ({tensor.dtype} {list(tensor.shape)})"
        return None

    def restore(self) -> None:
        """Put back what the poisoned buffers held."""
        with torch.no_grad():
            for tensor, saved in reversed(self._saved):  # last first: a later tensor may have saved an earlier one's poison
                tensor.copy_(saved)


def poison(tensor: Tensor) -> None:
    """Fill a tensor with what shows when it is read too early."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.dtype == torch.uint8:
        tensor.fill_(255)  # packed rows: NaN where their float16 scales and bfloat16 keys are
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _fingerprint(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return 0
    if flat.stride(0) != 1:  # `contiguous` leaves a single element as it is, and bytes cannot be viewed through its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)
