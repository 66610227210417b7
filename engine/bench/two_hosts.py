"""Two network namespaces joined by a pair of virtual cards, for measuring between two hosts of one machine.

1. Needs root and iproute2; where that is not there it is refused in one line, and nothing is left behind.
2. A thread that enters one makes its sockets and processes there until it leaves; others stay where they are.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadSetting

__all__ = ["Hosts", "inside", "two_hosts"]

_CARD = "fb0"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Hosts:
    """Their namespaces' names, and the address of the second."""

    near: str
    far: str
    address: str


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Made for the length of the block. Raises BadSetting."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise BadSetting("--namespaces needs root and iproute2: measure on loopback without it")
    hosts = Hosts(f"fbb{os.getpid()}a", f"fbb{os.getpid()}b", "10.9.7.2")
    names = (hosts.near, hosts.far)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", _CARD, "netns", names[0], "type", "veth", "peer", "name", _CARD, "netns", names[1])
        for place, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.9.7.{place}/24", "dev", _CARD)
            for card in ("lo", _CARD):
                _ip("-n", name, "link", "set", card, "up")
        yield hosts
    except subprocess.CalledProcessError as error:
        raise BadSetting(f"--namespaces is not allowed here: {str(error.stderr).strip()}") from error
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def inside(name: str | None) -> Iterator[None]:
    """The calling thread in that namespace for the length of the block; None: where it is."""
    if name is None:
        yield
        return
    with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", name).open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
