"""The last words of the command on its terminal, when there may be nobody left to read them.

1. Nothing here raises: the exit code says how it ended, whoever reads.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import NoReturn

from engine.config import EngineConfig
from engine.device import device_of
from engine.errors import DeviceFailed
from engine.standstill import ended_at_a_standstill

__all__ = ["complain", "ended_with_its_device", "forget_output", "leave_at_once"]

_UNREAD = (OSError, ValueError)  # the reader of a pipe has left; the stream was closed


def complain(message: str) -> None:
    """Say in one line on standard error why the command ends."""
    with suppress(*_UNREAD):
        print(f"forebay: {message}", file=sys.stderr)


def leave_at_once(exit_code: int) -> NoReturn:
    """End the process here and now: what an interpreter takes down at its end would ask a device that hangs, and wait for it."""
    for output in (sys.stdout, sys.stderr):
        with suppress(*_UNREAD):
            output.flush()
    os._exit(exit_code)


@contextmanager
def ended_with_its_device(config: EngineConfig) -> Iterator[None]:
    """End the process with a line and DeviceFailed's exit code where the running loop stands still for minutes. Nothing on the CPU."""

    def end(why: str) -> None:
        complain(why)
        leave_at_once(DeviceFailed.exit_code)

    with nullcontext() if device_of(config).type == "cpu" else ended_at_a_standstill(end):
        yield


def forget_output() -> None:
    """Send nowhere what standard output still buffers: Python writes it at exit, and would fail once more."""
    with suppress(*_UNREAD):  # an output without a file of its own has nothing to be redirected
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
