"""A device that can be made to fail, and the command over it in a process of its own: SIGUSR1 is the failure.

    python tests/engine/losing.py serve MODEL ...

What stands before the command's name is left out, so that whoever starts `python server.py WORDS` can put this before it. On a card
SIGUSR1 is a kernel that reads from no address, and SIGUSR2 a kernel that does not end, which is believed after three seconds.
"""

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a program, the folder of this file comes first

import torch

import engine.device
import engine.engine
import engine.node.held_stage
import server
from engine.device import streams_of
from kernels.gather import gather_rows
from streams import Backend, CpuBackend, DeviceLost
from streams.queued import Operation

__all__ = ["REPORTED", "LosingBackend"]

T = TypeVar("T")
REPORTED = "cuda:0 reported an error near group.0.gather: an uncorrectable ECC error was encountered"


class LosingBackend(CpuBackend):
    """The CPU's threads, as a device that fails when it is told to: from then on nothing completes that did not before."""

    def fail(self) -> None:
        """As `DeviceBackend` does when the device reports an error."""
        self.lost.settle(None, DeviceLost(REPORTED))

    def settle(self, operation: Operation[T], value: T | None, error: BaseException | None) -> None:
        """See `QueuedBackend.settle`."""
        super().settle(operation, value, self.lost.error() or error)


def _streams_of(device: torch.device, *more: Any, **named: Any) -> Backend:
    loop = asyncio.get_running_loop()
    if device.type == "cpu":
        losing = LosingBackend()
        loop.add_signal_handler(signal.SIGUSR1, losing.fail)
        return losing
    backend = streams_of(device, *more, **named)
    stream = backend.stream("stage0.compute")  # the steps': a kernel elsewhere that does not end holds nobody up
    good, bad = (torch.full((1,), address, device=device) for address in (torch.zeros(4, device=device).data_ptr(), 16))
    row = torch.zeros((1, 16), dtype=torch.uint8, device=device)
    gather_rows(good, 16, row)  # compiled now

    def harm(work: Callable[[], object]) -> None:
        faulthandler.dump_traceback_later(20)  # who waits for the device after all
        stream.submit(work, label="harm")

    for number, work in ((signal.SIGUSR1, lambda: gather_rows(bad, 16, row)), (signal.SIGUSR2, lambda: torch.cuda._sleep(1 << 50))):
        loop.add_signal_handler(number, partial(harm, work))
    return backend


def main() -> int:
    """The command's exit code."""
    place: Any
    for place in (engine.engine, engine.node.held_stage):
        place.streams_of = _streams_of
    engine.device._SILENCE_S_MAX = 3.0
    words = sys.argv[1:]
    return server.main(words[next(i for i, word in enumerate(words) if word in ("serve", "node")) :])


if __name__ == "__main__":
    sys.exit(main())
