"""How the time of launches is taken: many of them in one graph, and a graph several times.

Knows no operation. The CPU has no graphs: who measures there brings a timer of its own.

Invariants:
1. Every call runs once before capture, so that nothing is compiled and no first-use set-up happens inside a graph.
2. The time of a call is a replay's time by device events over its calls, the median of several replays.
"""

import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = ["Call", "GraphTimer", "Timer"]

Call = Callable[[], Any]
_REPLAYS = 9
_WARM_REPLAYS = 2


class Timer(Protocol):
    """Takes times of calls that launch work on a device."""

    def microseconds(self, calls: Sequence[Call], before: Call | None = None) -> float:
        """A call's time on the device, one behind the other. Args: before: runs ahead of every replay, not timed."""
        ...

    def launches(self, call: Call) -> int | None:
        """Kernels, fills and copies that a call launches; None where nobody can tell."""
        ...


class GraphTimer:
    """The timer of a "cuda" device, NVIDIA's or AMD's."""

    def __init__(self, replays: int = _REPLAYS) -> None:
        self._replays = replays

    def microseconds(self, calls: Sequence[Call], before: Call | None = None) -> float:
        """See `Timer`."""
        if before is not None:
            before()
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = [self._replay(graph, before) for _ in range(_WARM_REPLAYS + self._replays)]
        return statistics.median(times[_WARM_REPLAYS:]) / len(calls)

    def _replay(self, graph: torch.cuda.CUDAGraph, before: Call | None) -> float:
        if before is not None:
            before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def launches(self, call: Call) -> int | None:
        """See `Timer`: nodes of a graph of one call."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.enable_debug_mode()
        with torch.cuda.graph(graph):
            call()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.dot"
            with warnings.catch_warnings():  # it says that it is for debugging
                warnings.simplefilter("ignore")
                graph.debug_dump(str(path))
            text = path.read_text() if path.exists() else ""
        return len(re.findall(r'label="\{\s*(?:KERNEL|MEMSET|MEMCPY)', text)) or None
