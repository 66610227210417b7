"""Long-lived device buffers at exact size.

Counts what is taken and reserved, in classes of equal size; the bytes come from `backing.py`. Knows nothing of what lies in them.

Invariants:
1. taken + reserved bytes <= budget, in allocated bytes (payload rounded up to 64).
2. A buffer is zero-filled and 64-byte aligned; all buffers and reservations together are no less than what their backing allocated, but
   for what the device's allocator rounds up and for slabs that others still hold a part of.
3. Buffers are taken outside the streams' work; what first touches one begins with `staging.behind_fills`.
4. Reserved bytes can be taken only with `reserved=True`: an admitted session never finds its memory gone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from memory.backing import Backing, backing_for
from memory.errors import PoolExhausted
from memory.ledger import Ledger
from memory.staging import outside_streams

__all__ = ["ALIGNMENT_BYTES", "Pool", "PoolStatistics", "allocated"]

ALIGNMENT_BYTES = 64  # a cache line; rows need 16


def allocated(payload_bytes: int) -> int:
    """Bytes that a buffer of `payload_bytes` takes from the budget."""
    return -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Allocated bytes, but for `payload_bytes`. `budget_bytes` None: no limit."""

    buffers: int
    payload_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    budget_bytes: int | None


class Pool:
    """Buffers of one device within a budget. Loop thread only."""

    def __init__(self, device: torch.device, budget_bytes: int | None, ledger: Ledger, *, backing: Backing | None = None) -> None:
        """Take nothing yet. Args: backing: the device's own unless given."""
        assert budget_bytes is None or budget_bytes >= 0, f"budget of {budget_bytes} bytes"
        self.device = device
        self._budget_bytes = budget_bytes
        self._ledger = ledger
        self._backing = backing or backing_for(device)
        self._taken: dict[int, tuple[Tensor, int, str]] = {}  # whole buffer, payload bytes, owner; by address
        self._allocated_bytes = 0
        self._reserved: dict[int, int] = {}  # buffers, by allocated bytes
        self._reserved_bytes = 0

    def missing_bytes(self, allocated_bytes: int) -> int:
        """How many of `allocated_bytes` are not to be had now; 0 when all are."""
        if self._budget_bytes is None:
            return 0
        return max(0, allocated_bytes - (self._budget_bytes - self._allocated_bytes - self._reserved_bytes))

    def spare_bytes(self) -> int | None:
        """Allocated bytes that are neither taken nor reserved; None: no limit."""
        return None if self._budget_bytes is None else self._budget_bytes - self._allocated_bytes - self._reserved_bytes

    def reserve(self, size_bytes: int, count: int) -> None:
        """Keep `count` buffers of `size_bytes` each for later takes. Raises PoolExhausted; nothing is reserved then."""
        whole = allocated(size_bytes)
        missing = self.missing_bytes(whole * count)
        if missing:
            raise PoolExhausted(missing)
        if count == 0:
            return
        assert outside_streams(self.device), "buffers are reserved inside a stream's work"
        try:
            self._backing.keep(whole, count)
        except torch.OutOfMemoryError as error:
            raise PoolExhausted(whole * count) from error
        self._reserve(whole, count)

    def _reserve(self, whole: int, count: int) -> None:
        left = self._reserved.get(whole, 0) + count
        assert left >= 0, f"{-count} of {left - count} reserved buffers of {whole} bytes"
        self._reserved[whole] = left
        self._reserved_bytes += whole * count

    def unreserve(self, size_bytes: int, count: int) -> None:
        """Give up buffers kept by `reserve`."""
        assert count >= 0, f"{count} buffers given up"
        if count == 0:
            return
        whole = allocated(size_bytes)
        self._reserve(whole, -count)
        self._backing.forgo(whole, count)

    def take(self, size_bytes: int, owner: str, *, reserved: bool = False) -> Tensor:
        """A buffer.

        Args: size_bytes: at least 1. owner: for the ledger. reserved: one of those reserved, of this size.
        Returns: uint8 [size_bytes] on the device, zero-filled, 64-byte aligned.
        Raises: PoolExhausted: more than the budget leaves, or than the device has; never, on a device, with `reserved`.
        """
        assert size_bytes > 0, f"a buffer of {size_bytes} bytes for {owner}"
        assert outside_streams(self.device), f"a buffer for {owner} is taken inside a stream's work"
        whole = allocated(size_bytes)
        if reserved:
            assert self._reserved.get(whole, 0) > 0, f"{owner} takes {whole} bytes, and no buffer of that size is reserved"
        else:
            missing = self.missing_bytes(whole)
            if missing:
                raise PoolExhausted(missing)
        try:
            buffer = self._backing.take(whole, kept=reserved)
        except torch.OutOfMemoryError as error:
            raise PoolExhausted(whole) from error
        assert buffer.data_ptr() % ALIGNMENT_BYTES == 0, "the allocator aligns to less than 64 bytes"
        if reserved:
            self._reserve(whole, -1)
        self._allocated_bytes += whole
        self._taken[buffer.data_ptr()] = (buffer, size_bytes, owner)
        self._ledger.charge("device", owner, size_bytes, whole)
        return buffer[:size_bytes]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Call it once no operation in flight touches the buffer. Views of any dtype will do."""
        whole, size_bytes, owner = self._taken.pop(buffer.data_ptr())
        self._allocated_bytes -= whole.numel()
        self._ledger.credit("device", owner, size_bytes, whole.numel())
        self._backing.give(whole)

    def statistics(self) -> PoolStatistics:
        """What is taken and reserved now."""
        payload_bytes = sum(size_bytes for _, size_bytes, _ in self._taken.values())
        return PoolStatistics(len(self._taken), payload_bytes, self._allocated_bytes, self._reserved_bytes, self._budget_bytes)

    def check_integrity(self) -> None:
        """Assert the invariants against the buffers themselves."""
        self._backing.check_integrity()
        held_bytes = sum(buffer.numel() for buffer, _, _ in self._taken.values())
        assert held_bytes == self._allocated_bytes, f"buffers of {held_bytes} bytes, {self._allocated_bytes} counted"
        physical_bytes = self._backing.physical_bytes()
        assert physical_bytes >= held_bytes, f"{physical_bytes} bytes allocated for buffers of {held_bytes}"
        assert all(count >= 0 for count in self._reserved.values()), f"reserved buffers {self._reserved}"
        assert sum(whole * count for whole, count in self._reserved.items()) == self._reserved_bytes
        if self._budget_bytes is not None:
            assert self._allocated_bytes + self._reserved_bytes <= self._budget_bytes
