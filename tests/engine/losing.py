"""A device that can be made to fail, and the command over it in a process of its own: SIGUSR1 is the failure.

    python tests/engine/losing.py -- serve MODEL ...

What stands between the options and the command is left out, so that whoever starts `python server.py WORDS` can put this before it.
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a program, the folder of this file comes first

import engine.engine
import engine.node.held_stage
import server
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


def _streams_of(*_: object, **__: object) -> Backend:
    backend = LosingBackend()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, backend.fail)
    return backend


def main() -> int:
    """The command's exit code."""
    place: Any
    for place in (engine.engine, engine.node.held_stage):
        place.streams_of = _streams_of
    words = sys.argv[1:]
    return server.main(words[next(i for i, word in enumerate(words) if word in ("serve", "node")) :])


if __name__ == "__main__":
    sys.exit(main())
