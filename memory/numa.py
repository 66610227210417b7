"""Which node of a machine's memory is near a card, and asking the kernel for pages there.

Knows Linux only: the PCI tree under /sys and the `mbind` system call. What a kernel, container or machine does not offer is said once and
left: memory on a far node is slower, not wrong.

Invariants:
1. Asking changes where pages come from that were not touched yet; it never touches, moves or refuses any.
"""

import ctypes
import os
import platform
from pathlib import Path

__all__ = ["node_of", "prefer_node"]

_MBIND = {"x86_64": 237, "aarch64": 235}  # the call's number, by machine
# Preferred, not bound: a mirror larger than its node must spill to the next one, where a strict policy would have the process killed.
_MPOL_PREFERRED = 1
_NODES_MAX = 1024  # the largest CONFIG_NODES_SHIFT of the kernels above


def node_of(domain: int, bus: int, device: int, *, root: Path = Path("/sys/bus/pci/devices")) -> int:
    """The memory node beside a PCI device; -1 when the machine has one node only or does not say."""
    try:
        return int((root / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def prefer_node(address: int, size_bytes: int, node: int) -> str:
    """Have pages of [address, address + size_bytes) that nobody touched yet come from `node` as long as it has any.

    Args: address: page-aligned. node: not negative.
    Returns: why it could not be asked, one line; empty when it was.
    """
    assert 0 <= node < _NODES_MAX, f"memory node {node}"
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"no mbind call is known for {platform.machine()}"
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_NODES_MAX // word_bits))()
    mask[node // word_bits] = 1 << (node % word_bits)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    # The kernel counts one bit less than it is told.
    arguments = (number, address, size_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), _NODES_MAX + 1, 0)
    if call(*(ctypes.c_long(value) for value in arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
