"""What one node of a cluster says of itself to the doctor, and the calls by which it lets itself be measured.

Packed by msgspec; knows no channel and measures nothing. A node that loads or serves a model answers the same as one that only listens.
"""

import os
import platform
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import msgspec

from engine.doctor import examine, rows
from engine.doctor.tree import Tree
from streams.frame import VERSION

__all__ = ["FRAME_BYTES", "Load", "NodeReport", "Pair", "Probe", "Setting", "report_of_here"]

FRAME_BYTES = 64 * 12 * 1024  # 64 rows of 12 KiB: what a stage sends at once
_PACKAGES = ("forebay", "torch", "triton", "uvloop", "msgspec", "ray")


class Setting(msgspec.Struct, frozen=True):
    """One line of the doctor's; see `Finding`."""

    name: str
    now: str
    state: str


class NodeReport(msgspec.Struct, frozen=True):
    """One machine. `interfaces`: bytes of the largest packet of each network card, the loopback left out."""

    host: str
    process: int
    versions: dict[str, str]
    settings: list[Setting]
    interfaces: dict[str, int]
    model: str = ""  # the fingerprint, where a node has one


class Probe(msgspec.Struct, frozen=True):
    """Measure the way to another node. `frames` of 64 rows are sent for its bandwidth, `turns` empty calls for its round-trip."""

    host: str
    port: int
    frames: int
    turns: int
    silence_ms: int


class Load(msgspec.Struct, frozen=True):
    """So many frames will come."""

    frames: int


class Pair(msgspec.Struct, frozen=True):
    """The way from one node to another. `offset_ms`: the other's clock less one's own, within half the round-trip; None: not measured."""

    round_trip_ms: float | None = None
    bytes_per_second: float | None = None
    offset_ms: float | None = None
    mtu: int | None = None
    failure: str = ""


def report_of_here(model: str = "", tree: Tree | None = None) -> NodeReport:
    """Of the machine this runs on. Reads files of the kernel: some milliseconds."""
    tree = Tree() if tree is None else tree
    found = rows(examine(tree))
    return NodeReport(
        host=socket.gethostname(), process=os.getpid(), versions=_versions(),
        settings=[Setting(each["name"], each["now"], each["state"]) for each in found], interfaces=_interfaces(tree), model=model,
    )  # fmt: skip


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine(), "byte order": sys.byteorder,
        "channel protocol": str(VERSION), "time zone": time.strftime("%z"),
    }  # fmt: skip
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _interfaces(tree: Tree) -> dict[str, int]:
    place, found = "/sys/class/net", {}
    for name in tree.names(place):
        text = tree.read(f"{place}/{name}/mtu")
        if name != "lo" and isinstance(text, str) and text.isdecimal():
            found[name] = int(text)
    return found
