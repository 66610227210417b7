"""Host memory that a device copies from and to without anybody waiting, and the order of what is filled outside every stream.

Holds no buffers of its own. On the CPU all of it is free: a tensor is its own staging and there is one order.

Invariants:
1. A copy from a pinned tensor may outlive the tensor: torch gives its memory to nobody else before the stream is past the copy.
2. Buffers are taken, zeroed and moved on the device's default stream, outside any stream's work, when nothing of their session is in
   flight. The streams of `streams/device.py` do not wait for that one by themselves: the first work that touches a new buffer begins with
   `behind_fills`.
3. A glance at what steps are changing never waits: it shows what an earlier one asked for. No glance waits long.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Glance", "behind_fills", "landing", "outside_streams", "pinned"]

_PATIENCE_NS = 50_000_000  # a thousand times what a device takes that works


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Host values that `device_tensor.copy_(values, non_blocking=True)` takes without the host waiting.

    Args: values: any shape and dtype, CPU, contiguous. device: where the copy will go.
    Returns: `values` itself on the CPU, else a page-locked copy of them.
    """
    assert values.device.type == "cpu", f"values on {values.device}"
    assert values.is_contiguous(), "a copy from host values that are not contiguous stages them again, and waits"
    return values if device.type == "cpu" else values.pin_memory()


def landing(source: Tensor) -> Tensor:
    """A host tensor of `source`'s shape and dtype, to be the target of a copy; read it when the event of the copy's work is done."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type != "cpu")


def outside_streams(device: torch.device) -> bool:
    """Whether the caller is outside every stream's work, where buffers are taken and filled."""
    return device.type == "cpu" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def behind_fills(device: torch.device) -> None:
    """Work: the rest of this work, and what follows on its stream, comes after everything filled outside the streams so far.

    A wait on the device, never on the host. Not part of a captured graph: buffers do not change under one.
    """
    if not outside_streams(device):
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


class Glance:
    """Values on a device that somebody wants to see now and then, and no step shall wait for. Call it outside the streams' work."""

    def __init__(self, device: torch.device, count: int) -> None:
        """`count` values, all 0 until the first ones arrived."""
        self._device = device
        self._shown = [0] * count
        self._shown_at: object = None
        self._arriving: _Arriving | None = None
        self._in_vain = False  # what is on its way was waited for

    def look(self, values: Callable[[], Tensor], still: object) -> list[int]:
        """The values as they are when nothing changes them; else the newest that have arrived, and the next are asked for.

        Those that nothing changes are waited for once, and not for long: of a device that hangs, or reports an error (its streams say
        which), the newest that arrived are shown, and no later look waits for what one waited for in vain: lists look at many sessions.

        Args: values: makes int64 [count] on the device; while steps run it may see some of a step's changes and not others.
            still: None while steps run; else what the values belong to: two looks at equals see the same.
        """
        if self._device.type == "cpu":
            if still is None or still != self._shown_at:
                self._shown, self._shown_at = values().tolist(), still
        elif still is None or still != self._shown_at:
            with suppress(torch.AcceleratorError):
                patience_ns = 0 if still is None else _PATIENCE_NS
                if self._take(patience_ns) and (still is None or still != self._shown_at):
                    self._arriving = self._ask(values(), still)
                    if still is not None:
                        self._take(patience_ns)
        return self._shown

    def _take(self, patience_ns: int) -> bool:
        """Show what was asked for, if it arrives in time; returns whether nothing is on its way now."""
        if self._arriving is None:
            return True
        until_ns = time.perf_counter_ns() + (0 if self._in_vain else patience_ns)
        while not self._arriving.marker.query():
            if time.perf_counter_ns() >= until_ns:
                self._in_vain = self._in_vain or patience_ns > 0
                return False
        self._in_vain = False
        self._shown, self._shown_at, self._arriving = self._arriving.values.tolist(), self._arriving.still, None
        return True

    def _ask(self, found: Tensor, still: object) -> "_Arriving":
        arriving = _Arriving(landing(found), torch.cuda.Event(), still)
        arriving.values.copy_(found, non_blocking=True)
        arriving.marker.record(torch.cuda.current_stream(self._device))
        return arriving


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Values that were asked for, in page-locked memory once the marker has happened."""

    values: Tensor
    marker: torch.cuda.Event
    still: object
