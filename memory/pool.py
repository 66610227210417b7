"""Long-lived device buffers at exact size.

Holds one allocation a buffer, never a piece of another, so giving one back frees exactly what it took. Knows nothing of what lies in them.

Invariants:
1. taken + reserved bytes <= budget, in allocated bytes (payload rounded up to 64).
2. A buffer is zero-filled, 64-byte aligned, and its storage is exactly its allocated bytes.
3. Buffers are taken outside the streams' work; what first touches one begins with `staging.behind_fills`.
4. Reserved bytes can be taken only with `reserved=True`: an admitted session never finds its memory gone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def __init__(self, device: torch.device, budget_bytes: int | None, ledger: Ledger) -> None:
        assert budget_bytes is None or budget_bytes >= 0, f"budget of {budget_bytes} bytes"
        self.device = device
        self._budget_bytes = budget_bytes
        self._ledger = ledger
        self._taken: dict[int, tuple[Tensor, str]] = {}  # by address
        self._allocated_bytes = 0
        self._reserved_bytes = 0

    def missing_bytes(self, allocated_bytes: int) -> int:
        """How many of `allocated_bytes` are not to be had now; 0 when all are."""
        if self._budget_bytes is None:
            return 0
        return max(0, allocated_bytes - (self._budget_bytes - self._allocated_bytes - self._reserved_bytes))

    def reserve(self, allocated_bytes: int) -> None:
        """Keep bytes for later takes. Raises PoolExhausted; nothing is reserved then."""
        missing = self.missing_bytes(allocated_bytes)
        if missing:
            raise PoolExhausted(missing)
        self._reserved_bytes += allocated_bytes

    def unreserve(self, allocated_bytes: int) -> None:
        """Give up bytes kept by `reserve`."""
        assert 0 <= allocated_bytes <= self._reserved_bytes, f"{allocated_bytes} of {self._reserved_bytes} reserved bytes"
        self._reserved_bytes -= allocated_bytes

    def take(self, size_bytes: int, owner: str, *, reserved: bool = False) -> Tensor:
        """A buffer of its own.

        Args: size_bytes: at least 1. owner: for the ledger. reserved: out of the reserved bytes.
        Returns: uint8 [size_bytes] on the device, zero-filled, 64-byte aligned.
        Raises: PoolExhausted: more than the budget leaves, or than the device has.
        """
        assert size_bytes > 0, f"a buffer of {size_bytes} bytes for {owner}"
        whole = allocated(size_bytes)
        if reserved:
            assert whole <= self._reserved_bytes, f"{owner} takes {whole} of {self._reserved_bytes} reserved bytes"
        else:
            missing = self.missing_bytes(whole)
            if missing:
                raise PoolExhausted(missing)
        assert outside_streams(self.device), f"a buffer for {owner} is taken inside a stream's work"
        try:
            buffer = torch.zeros(whole, dtype=torch.uint8, device=self.device)[:size_bytes]
        except torch.OutOfMemoryError as error:
            raise PoolExhausted(whole) from error
        assert buffer.data_ptr() % ALIGNMENT_BYTES == 0, "the allocator aligns to less than 64 bytes"
        if reserved:
            self._reserved_bytes -= whole
        self._allocated_bytes += whole
        self._taken[buffer.data_ptr()] = (buffer, owner)
        self._ledger.charge("device", owner, size_bytes, whole)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Call it once no operation in flight touches the buffer. Views of any dtype will do."""
        taken, owner = self._taken.pop(buffer.data_ptr())
        size_bytes = taken.numel()
        self._allocated_bytes -= allocated(size_bytes)
        self._ledger.credit("device", owner, size_bytes, allocated(size_bytes))

    def statistics(self) -> PoolStatistics:
        """What is taken and reserved now."""
        payload_bytes = sum(buffer.numel() for buffer, _ in self._taken.values())
        return PoolStatistics(len(self._taken), payload_bytes, self._allocated_bytes, self._reserved_bytes, self._budget_bytes)

    def check_integrity(self) -> None:
        """Assert the invariants against the buffers themselves."""
        physical_bytes = sum(buffer.untyped_storage().nbytes() for buffer, _ in self._taken.values())
        assert physical_bytes == self._allocated_bytes, f"{physical_bytes} bytes in storages, {self._allocated_bytes} counted"
        assert self._reserved_bytes >= 0
        if self._budget_bytes is not None:
            assert self._allocated_bytes + self._reserved_bytes <= self._budget_bytes
