"""What the host's side of a device costs: how soon the loop goes on after work has ended, and the device's own copy bandwidth.

1. Waking is measured on the device's clock: the loop awaits work of a millisecond or so, and the first thing it does then is to record a
   second event on an idle stream. The time between the end of the work and that event holds the poll, the loop's turn, and the way of one
   record to the card; the last is measured by itself and stated beside it, not taken off.
2. Nothing else runs meanwhile: this is what the loop can do, not what it does under load.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from engine.bench.floor import copy_bandwidth
from engine.config import EngineConfig
from engine.device import device_of, streams_of
from engine.errors import BadSetting

__all__ = ["HostTimes", "as_json", "measure_host", "percentile", "table"]

_VERSION = 1
_WORK_BYTES = 1 << 30  # a copy of this takes half a millisecond on a large card
_COPIES = 3
_WARM_TURNS = 20


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Microseconds; bandwidth in bytes a second, read plus written."""

    wake_us: tuple[float, ...]
    record_us: tuple[float, ...]  # of a record alone, on an idle stream
    bandwidth: float
    device: str


async def measure_host(config: EngineConfig, turns: int, watch: Callable[[str, int, int], None]) -> HostTimes:
    """Wake `turns` times. Raises BadSetting: there is no device, or no turn."""
    if turns < 1:
        raise BadSetting(f"--turns must be at least 1, not {turns}")
    device = device_of(config)
    if device.type == "cpu":
        raise BadSetting("bench host needs a device: on a CPU nothing has to be woken from outside the process")
    backend = streams_of(device, None)
    busy, idle = backend.stream("probe.compute"), torch.cuda.Stream(device)
    source = torch.ones(_WORK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def work() -> torch.cuda.Event:
        for _ in range(_COPIES):
            target.copy_(source)
        return _recorded(torch.cuda.current_stream(device))

    wakes, records = [], []
    try:
        for turn in range(_WARM_TURNS + turns):
            ended = await busy.submit(work, label="probe")
            woken = _recorded(idle)
            woken.synchronize()
            first, second = _recorded(idle), _recorded(idle)
            second.synchronize()
            if turn >= _WARM_TURNS:
                wakes.append(1e3 * float(ended.elapsed_time(woken)))
                records.append(1e3 * float(first.elapsed_time(second)))
                watch("waking", len(wakes), turns)
    finally:
        await backend.close()
    return HostTimes(tuple(wakes), tuple(records), copy_bandwidth(device), torch.cuda.get_device_name(device))


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def _summary(values: tuple[float, ...]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "p90": percentile(values, 90), "p99": percentile(values, 99), "mean": statistics.fmean(values)}


def as_json(config: EngineConfig, found: HostTimes, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything."""
    return {
        "version": _VERSION, "kind": "host", "turns": len(found.wake_us), "wake_us": _summary(found.wake_us),
        "record_us": _summary(found.record_us), "copy_bytes_per_second": found.bandwidth,
        "plan": {"engine": dataclasses.asdict(config)}, "machine": machine,
    }  # fmt: skip


def table(found: HostTimes) -> Table:
    """A row a quantity."""
    drawn = Table(title=f"the host's side of {found.device}", title_justify="left")
    for title in ("", "p50", "p90", "p99", "mean"):
        drawn.add_column(title, justify="right" if title else "left")
    for name, values in (("from the end of work to the loop, us", found.wake_us), ("of which a record's own way, us", found.record_us)):
        drawn.add_row(name, *(f"{value:.1f}" for value in _summary(values).values()))
    drawn.add_row("copy bandwidth, TB/s", "", "", "", f"{found.bandwidth / 1e12:.2f}")
    return drawn
