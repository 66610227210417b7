"""What a decode step costs the loop's thread, in processor time, where the device takes none: a stand-in whose work is done at once.

    python tests/engine/host_cost.py --sessions 8 --steps 400
    python tests/engine/host_cost.py --repeat 5

What is counted is all of the host but the driver's calls: scheduling, submission, polling, following, text, a reader. The median step
fills no block, so it submits no copy. Times are of this machine and its company; what says something is two trees measured in turn.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a program, the folder of this file comes first

import torch
import uvloop

from engine.decode import DecodeStep
from engine.engine import Engine
from engine.sampling import Sampling
from streams.device import DeviceBackend
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small

__all__ = ["step_us"]

_REAL = 3  # replays of a recording that run, so that every buffer has been written
_EDGE = 30  # steps at either end of a generation that are not timed: sessions join and leave there


class _Marker:
    """Has happened as soon as it was recorded."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self, stream: object) -> None:
        """In front of nothing."""

    def query(self) -> bool:
        return True


class _Stream:
    """Runs nothing: work is on the loop's thread, and short."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device, priority

    def wait_event(self, marker: _Marker) -> None:
        """It has happened."""

    def __enter__(self) -> None:
        """Nothing is launched."""

    def __exit__(self, *failure: object) -> None:
        """Nothing was."""


@contextmanager
def _no_device_time() -> Iterator[None]:
    """Inside it, streams are stand-ins, and replays do nothing once their buffers have values; each accepts one row a place."""
    record = DecodeStep.record

    def recorded(self: DecodeStep, *given: object) -> None:
        record(self, *given)  # type: ignore[arg-type]  # whatever it is called with
        replay, left = self._replay, _REAL
        assert replay is not None, "just recorded"

        def pretend(run: Callable[[], None] = replay) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                run()
            self._sampling_end._rows.accepted.fill_(1)

        self._replay = pretend

    with (
        mock.patch.object(torch.cuda, "Stream", _Stream),
        mock.patch.object(torch.cuda, "Event", _Marker),
        mock.patch.object(DecodeStep, "record", recorded),
    ):
        yield


async def step_us(model: Path, *, sessions: int, steps: int) -> float:
    """Microseconds of the loop's thread for the median step of so many sessions, one generation of each."""
    assert steps > 3 * _EDGE, f"{steps} steps leave none to time"
    sampling = Sampling(max_tokens=steps, temperature=0.0, ignore_eos=True)
    config = small(hot_rows=64, graphs="on", context_max=4_096, host_memory_bytes=256 << 20)

    async def read(engine: Engine) -> list[int]:
        return [time.thread_time_ns() async for _ in engine.generate([place % 90 for place in range(20)], sampling)]

    with _no_device_time():
        backend = DeviceBackend("cpu")
        async with Engine.open(model, config, backend=backend) as engine:
            await asyncio.gather(*(read(engine) for _ in range(sessions)))
            times = (await asyncio.gather(*(read(engine) for _ in range(sessions))))[0]
        await backend.close()
    return statistics.median(after - before for before, after in pairwise(times[_EDGE:-_EDGE])) / 1e3


def main() -> None:
    """Print the least of some runs."""
    parser = argparse.ArgumentParser(description="what a decode step costs the loop's thread")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = make_checkpoint(Path(directory), "shared")
        found = [uvloop.run(step_us(model, sessions=asked.sessions, steps=asked.steps)) for _ in range(asked.repeat)]
    print(f"{asked.sessions} sessions: {min(found):.1f} us a step, the least of {', '.join(f'{one:.1f}' for one in found)}")


if __name__ == "__main__":
    main()
