"""Where a pool's bytes come from: one tensor a buffer, or slabs that hold what was reserved.

A device's allocator rounds: 5.8 MB of key pages, taken one span at a time, cost 6.7 MB each, and memory that is only counted as reserved is
gone when an activation took it first. So on a device a reservation is backed at once, by slabs of exactly its buffers, and a take of a
reserved buffer allocates nothing. On the CPU pages cost nothing until they are written, and each buffer is a tensor of its own.
Knows no budgets and no owners: `pool.py` counts.

Invariants of slabs:
1. Pieces of one size: taken + free == the pieces of its slabs; kept <= free.
2. When a slab has become empty or buffers were forgone, every empty slab goes that nothing kept needs; the last one always does.
3. Pieces are 64-byte aligned, do not overlap, and are zeroed when taken.
"""

import mmap
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

__all__ = ["Backing", "Slabs", "Tensors", "backing_for"]

# Large against the 2 MiB that an allocator rounds to, small against a session: slabs of one size come and go alike, so that one
# session's memory is another's without a hole.
SLAB_BYTES = 256 << 20
_MAPPED_BYTES: Final = 256 << 10  # from here on a mapping's few microseconds are less than zeros take


class Backing(Protocol):
    """Zeroed buffers of whole multiples of 64 bytes. What raises torch.OutOfMemoryError changed nothing."""

    def keep(self, size_bytes: int, count: int) -> None:
        """Have `count` more buffers of that size ready for takes that are `kept`."""
        ...

    def forgo(self, size_bytes: int, count: int) -> None:
        """Give up buffers that were kept."""
        ...

    def take(self, size_bytes: int, *, kept: bool) -> Tensor:
        """uint8 [size_bytes], zeros. `kept`: one of those kept, of exactly this size; that raises nothing."""
        ...

    def give(self, buffer: Tensor) -> None:
        """The inverse of `take`, with the very tensor it returned."""
        ...

    def physical_bytes(self) -> int:
        """Bytes of everything that was allocated."""
        ...

    def check_integrity(self) -> None:
        """Assert the invariants."""
        ...


class Tensors:
    """One tensor a buffer; nothing is kept but by counting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: dict[int, Tensor] = {}  # by address

    def keep(self, size_bytes: int, count: int) -> None:
        """See Backing."""

    def forgo(self, size_bytes: int, count: int) -> None:
        """See Backing."""

    def take(self, size_bytes: int, *, kept: bool) -> Tensor:
        """See Backing. A kept one may be refused all the same."""
        del kept
        buffer = _zeros(size_bytes, self._device)
        self._taken[buffer.data_ptr()] = buffer
        return buffer

    def give(self, buffer: Tensor) -> None:
        """See Backing."""
        del self._taken[buffer.data_ptr()]

    def physical_bytes(self) -> int:
        """See Backing."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._taken.values())

    def check_integrity(self) -> None:
        """See Backing. A tensor is what it says it is."""


def _zeros(size_bytes: int, device: torch.device) -> Tensor:
    """uint8 [size_bytes], zeros; a large one in RAM costs nothing before it is touched, which a library's allocator does at once."""
    if device.type != "cpu" or size_bytes < _MAPPED_BYTES:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    try:
        return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    except OSError as error:
        raise torch.OutOfMemoryError(f"cannot map {size_bytes} bytes: {error.strerror}") from error


@dataclass(slots=True, eq=False)
class _Slab:
    """One allocation, cut into pieces of one size."""

    memory: Tensor
    pieces: int
    free: list[Tensor]

    @property
    def empty(self) -> bool:
        return len(self.free) == self.pieces


@dataclass(slots=True)
class _Size:
    """All slabs of one size of pieces."""

    kept: int = 0
    free: int = 0
    slabs: list[_Slab] = field(default_factory=list)  # oldest first: takes come from the oldest, so that the newest empty first


class Slabs:
    """Pieces of larger allocations. Loop thread only."""

    def __init__(self, device: torch.device, slab_bytes: int = SLAB_BYTES) -> None:
        """Args: slab_bytes: a slab has no more bytes than that, but one piece at least."""
        self._device = device
        self._slab_bytes = slab_bytes
        self._of: dict[int, _Size] = {}
        self._slab_of: dict[int, _Slab] = {}  # of taken pieces, by address

    def _size(self, size_bytes: int) -> _Size:
        return self._of.setdefault(size_bytes, _Size())

    def _add(self, size: _Size, size_bytes: int, pieces: int) -> None:
        """Slabs of `pieces` free pieces together; all or none."""
        most = max(1, self._slab_bytes // size_bytes)
        counts = [most] * (pieces // most) + [pieces % most] * (pieces % most > 0)
        made = [torch.empty(count * size_bytes, dtype=torch.uint8, device=self._device) for count in counts]
        size.slabs += [_Slab(memory, count, list(memory.split(size_bytes))) for memory, count in zip(made, counts, strict=True)]
        size.free += pieces

    def keep(self, size_bytes: int, count: int) -> None:
        """See Backing. New slabs hold what free pieces do not cover."""
        size = self._size(size_bytes)
        lacking = size.kept + count - size.free
        if lacking > 0:
            self._add(size, size_bytes, lacking)
        size.kept += count

    def forgo(self, size_bytes: int, count: int) -> None:
        """See Backing."""
        size = self._size(size_bytes)
        assert 0 <= count <= size.kept, f"{count} of {size.kept} kept buffers of {size_bytes} bytes"
        size.kept -= count
        self._shrink(size_bytes)

    def take(self, size_bytes: int, *, kept: bool) -> Tensor:
        """See Backing."""
        size = self._size(size_bytes)
        if kept:
            assert size.kept > 0, f"no buffer of {size_bytes} bytes is kept"
            size.kept -= 1
        elif size.free <= size.kept:
            self._add(size, size_bytes, 1)
        slab = next(slab for slab in size.slabs if slab.free)
        piece = slab.free.pop()
        size.free -= 1
        self._slab_of[piece.data_ptr()] = slab
        return piece.zero_()

    def give(self, buffer: Tensor) -> None:
        """See Backing."""
        slab = self._slab_of.pop(buffer.data_ptr())
        slab.free.append(buffer)
        self._of[buffer.numel()].free += 1
        if slab.empty:
            self._shrink(buffer.numel())

    def _shrink(self, size_bytes: int) -> None:
        """Let go of empty slabs that nothing kept needs, the newest first."""
        size = self._of[size_bytes]
        for slab in reversed(list(size.slabs)):
            if slab.empty and slab.pieces <= size.free - size.kept:
                size.slabs.remove(slab)
                size.free -= slab.pieces
        if not size.slabs:
            del self._of[size_bytes]

    def physical_bytes(self) -> int:
        """See Backing."""
        return sum(slab.memory.untyped_storage().nbytes() for size in self._of.values() for slab in size.slabs)

    def check_integrity(self) -> None:
        """See Backing."""
        taken_of: dict[int, list[int]] = {}
        for address, slab in self._slab_of.items():
            taken_of.setdefault(id(slab), []).append(address)
        for size_bytes, size in self._of.items():
            assert 0 <= size.kept <= size.free, f"{size.kept} kept, {size.free} free buffers of {size_bytes} bytes"
            assert size.free == sum(len(slab.free) for slab in size.slabs), f"{size.free} free buffers of {size_bytes} bytes"
            for slab in size.slabs:
                addresses = sorted([piece.data_ptr() for piece in slab.free] + taken_of.pop(id(slab), []))
                first = slab.memory.data_ptr()
                assert addresses == list(range(first, first + slab.pieces * size_bytes, size_bytes)), "pieces are lost or overlap"
        assert not taken_of, "a taken piece belongs to no slab"


def backing_for(device: torch.device) -> Backing:
    """Chosen once, when a pool is made."""
    return Tensors(device) if device.type == "cpu" else Slabs(device)
