"""What the host's side of a device costs: how soon the loop goes on after work has ended, what launching takes, the copy bandwidth.

1. Waking is measured on the device's clock: the loop awaits work of a millisecond or so, and the first thing it does then is to record a
   second event on an idle stream. The time between the end of the work and that event holds the poll, the loop's turn, and the way of one
   record to the card; the last is measured by itself and stated beside it, not taken off.
2. In turn with that the same work is awaited without loop or backend: the thread asks its event and nothing else. What is left between the
   two is the loop's; the rest belongs to driver and card, and no loop can be sooner.
3. Launching is what the backend counts of an operation: stream, marker, and the work's own calls. The graphs are as long as a step's.
4. Nothing else runs meanwhile: this is what the loop can do, not what it does under load.
"""

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from engine.bench.floor import copy_bandwidth
from engine.bench.spread import percentile
from engine.config import EngineConfig
from engine.device import device_of, streams_of
from engine.errors import BadSetting
from streams import Event, Stream
from streams.capture import GraphRecorder
from streams.device import DeviceBackend

__all__ = ["HostTimes", "as_json", "measure_host", "percentile", "table"]

_VERSION = 2
_WORK_BYTES = 1 << 30  # a copy of this takes half a millisecond on a large card
_COPIES = 3
_WARM_TURNS = 20
_ROUNDS = 10_000
_LAUNCHES = 100  # of each kind
_NODES = 300  # launches of a graph: about a decode step's of ten layers
_FORK_EVERY = 4


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Microseconds; bandwidth in bytes a second, read plus written."""

    wake_us: tuple[float, ...]
    bare_us: tuple[float, ...]  # the same without a loop: a thread that only asks
    record_us: tuple[float, ...]  # of a record alone, on an idle stream
    round_us: float  # an empty round of the loop, the mean of many
    launch_us: dict[str, tuple[float, ...]]  # by what is launched
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
    assert isinstance(backend, DeviceBackend), "a device has no other streams"
    try:
        wakes, bare, records = await _wake(backend, device, turns, watch)
        launches = {name: await _launches(backend, work) for name, work in _works(device).items()}
    finally:
        await backend.close()
    return HostTimes(wakes, bare, records, await _round_us(), launches, copy_bandwidth(device), torch.cuda.get_device_name(device))


async def _wake(
    backend: DeviceBackend, device: torch.device, turns: int, watch: Callable[[str, int, int], None]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Microseconds to wake by the loop, and by asking alone; and of a record alone."""
    busy, idle = backend.stream("probe.compute"), torch.cuda.Stream(device)
    source = torch.ones(_WORK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    torch.cuda.synchronize(device)

    def work() -> torch.cuda.Event:
        for _ in range(_COPIES):
            target.copy_(source)
        return _recorded(torch.cuda.current_stream(device))

    wakes, bare, records = [], [], []
    for turn in range(_WARM_TURNS + turns):
        ended = await busy.submit(work, label="probe")
        woken = _recorded(idle)
        woken.synchronize()
        with busy.stream:
            asked = work()
        while not asked.query():
            pass
        seen = _recorded(idle)
        seen.synchronize()
        first, second = _recorded(idle), _recorded(idle)
        second.synchronize()
        if turn >= _WARM_TURNS:
            wakes.append(1e3 * float(ended.elapsed_time(woken)))
            bare.append(1e3 * float(asked.elapsed_time(seen)))
            records.append(1e3 * float(first.elapsed_time(second)))
            watch("waking", len(wakes), turns)
    return tuple(wakes), tuple(bare), tuple(records)


async def _round_us() -> float:
    """What a round of the loop takes that holds one callback, which does nothing."""
    loop, left = asyncio.get_running_loop(), _ROUNDS
    ended: asyncio.Future[None] = loop.create_future()

    def count() -> None:
        nonlocal left
        left -= 1
        if left:
            loop.call_soon(count)
        else:
            ended.set_result(None)

    began = time.perf_counter()
    loop.call_soon(count)
    await ended
    return 1e6 * (time.perf_counter() - began) / _ROUNDS


async def _launches(backend: DeviceBackend, work: Callable[[], object]) -> tuple[float, ...]:
    """Microseconds of the loop for each launch of `work`, one behind the other's end."""
    stream, taken = backend.stream("probe.compute"), []
    for turn in range(_WARM_TURNS + _LAUNCHES):
        before = backend.launch_ns
        event = stream.submit(work, label="probe.launch")
        if turn >= _WARM_TURNS:
            taken.append((backend.launch_ns - before) / 1e3)
        await event
    return tuple(taken)


def _works(device: torch.device) -> dict[str, Callable[[], object]]:
    """What is launched, by name."""
    small = torch.zeros(64, dtype=torch.int64, device=device)
    beside, landed = torch.zeros_like(small), torch.zeros(64, dtype=torch.int64, pin_memory=True)
    for counted in (small, beside):
        counted.add_(1)  # loaded before it is captured
    torch.cuda.synchronize(device)

    def issue(stream_of: Callable[[str], Stream], forks: bool) -> None:
        main, side = stream_of("main"), stream_of("side")
        for node in range(_NODES):
            after: tuple[Event[object], ...] = ()
            if forks and node % _FORK_EVERY == 0:
                begun = main.submit(lambda: small.add_(1), label="node")
                after = (side.submit(lambda: beside.add_(1), label="side", after=(begun,)),)
            main.submit(lambda: small.add_(1), label="node", after=after)

    recorder = GraphRecorder(device)
    line = recorder.record(lambda stream_of: issue(stream_of, False), "main")
    forked = recorder.record(lambda stream_of: issue(stream_of, True), "main")
    return {
        "nothing": lambda: None,
        "a read-back": lambda: landed.copy_(small, non_blocking=True),
        f"a graph of {_NODES} in a line": line,
        f"a graph of {_NODES} and {2 * _NODES // _FORK_EVERY} forked": forked,
    }


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _summary(values: tuple[float, ...]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "p90": percentile(values, 90), "p99": percentile(values, 99), "mean": statistics.fmean(values)}


def as_json(config: EngineConfig, found: HostTimes, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything."""
    return {
        "version": _VERSION, "kind": "host", "turns": len(found.wake_us), "wake_us": _summary(found.wake_us),
        "bare_us": _summary(found.bare_us), "record_us": _summary(found.record_us), "round_us": found.round_us,
        "launch_us": {name: _summary(values) for name, values in found.launch_us.items()}, "copy_bytes_per_second": found.bandwidth,
        "plan": {"engine": dataclasses.asdict(config)}, "machine": machine,
    }  # fmt: skip


def table(found: HostTimes) -> Table:
    """A row a quantity."""
    drawn = Table(title=f"the host's side of {found.device}", title_justify="left")
    for title in ("", "p50", "p90", "p99", "mean"):
        drawn.add_column(title, justify="right" if title else "left")
    rows = {
        "from the end of work to the loop, us": found.wake_us, "the same by asking alone, without a loop, us": found.bare_us,
        "of which a record's own way, us": found.record_us,
        **{f"launching {name}, us": values for name, values in found.launch_us.items()},
    }  # fmt: skip
    for name, values in rows.items():
        drawn.add_row(name, *(f"{value:.1f}" for value in _summary(values).values()))
    drawn.add_row("an empty round of the loop, us", "", "", "", f"{found.round_us:.1f}")
    drawn.add_row("copy bandwidth, TB/s", "", "", "", f"{found.bandwidth / 1e12:.2f}")
    return drawn
