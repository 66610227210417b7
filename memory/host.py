"""Host memory at exact size, straight from the kernel.

Holds one anonymous private mapping a buffer. Pages are touched lazily on the CPU: a buffer costs RAM only where it was written.
Knows nothing of blocks. Registration is a seam: a device's registration makes the mapping readable by the device and answers with the
device address; without one the host address is the address.

Invariants:
1. `address` is page-aligned and valid until `close`; the mapping itself lives as long as any tensor over it.
2. Registration happens once, when the buffer is made, never while decoding.
"""

import mmap
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from memory.errors import ArenaFull

__all__ = ["HostBuffer", "available_bytes", "NoRegistration", "Registration"]


class Registration(Protocol):
    """Makes host memory readable by a device."""

    def register(self, host_address: int, size_bytes: int) -> int:
        """Returns the device address of the same bytes. Raises what the driver raises; nothing is registered then."""
        ...

    def unregister(self, host_address: int) -> None:
        """The inverse; called once for each successful `register`."""
        ...

    def announce(self) -> None:
        """All that was wanted is registered: log it, if there is anything to say."""
        ...


class NoRegistration:
    """The CPU's: host addresses are device addresses."""

    def register(self, host_address: int, size_bytes: int) -> int:
        assert host_address != 0
        assert size_bytes > 0
        return host_address

    def unregister(self, host_address: int) -> None:
        assert host_address != 0

    def announce(self) -> None:
        """Nothing happened that anybody must know."""


class HostBuffer:
    """`size_bytes` of zero-filled host memory. Raises ArenaFull when the machine has no such mapping to give."""

    def __init__(self, size_bytes: int, registration: Registration) -> None:
        assert size_bytes > 0, f"a host buffer of {size_bytes} bytes"
        # Private, because a shared anonymous mapping is accounted as shared memory and may be limited apart from RAM.
        try:
            mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ArenaFull(size_bytes) from error
        # Advice only, and not known to every kernel. A forked child must not turn our pages into copy-on-write ones:
        # the device would go on writing the old page.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                try:
                    mapping.madvise(getattr(mmap, advice))
                except OSError:
                    continue
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.size_bytes = size_bytes
        self.allocated_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._registration = registration
        try:
            self.address = registration.register(self.bytes.data_ptr(), size_bytes)
        except BaseException:
            # Now, not when the error is forgotten: registering touched the pages, and whoever reports the error may need RAM.
            del mapping
            self.bytes = torch.empty(0, dtype=torch.uint8)
            raise

    def close(self) -> None:
        """Unregister and drop the mapping; the kernel takes it back when the last view of it is gone."""
        self._registration.unregister(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.address = 0


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of RAM that can be taken without swapping or being killed: what the kernel estimates, cut to what the process's control groups
    leave. In a container the kernel speaks of the whole machine, and a mirror of half of that would end the process.

    Args: root: where /proc and /sys are.
    Raises: OSError: the kernel gives no estimate.
    """
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return max(0, min([int(line.split()[1]) * 1024, *_group_rooms(root)]))
    raise OSError("/proc/meminfo has no MemAvailable line")


def _group_rooms(root: Path) -> list[int]:
    """Bytes that each control group above the process leaves; those without a limit are absent."""
    mounts = {"": (root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")}
    mounts["memory"] = (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    rooms = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        found = next((mounts[name] for name in controllers.split(",") if name in mounts), None)
        if found is None:
            continue
        mount, limit, usage, cached = found
        own = Path(path.lstrip("/"))
        # A container may be told a path that it cannot see below its own mount: what is absent limits nothing.
        for folder in (mount / own, *(mount / above for above in own.parents)):
            rooms.append(_room(folder / limit, folder / usage, folder / "memory.stat", cached))
    return [room for room in rooms if room is not None]


def _room(limit: Path, usage: Path, statistics: Path, cached: str) -> int | None:
    """Limit less usage; file pages that nobody used lately count as free. None: no limit, or none that can be read."""
    try:
        most, used = int(limit.read_text()), int(usage.read_text())
        lines = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
    return most - used + int(lines.get(cached, 0))
