"""The hot caches of one session, one a selection group, and how they grow beyond their usual size into memory to spare.

A cache that may be elastic takes what the pool has beyond a margin, up to a slot for every position: then a row is read from RAM once at
most. Beside it stay reserved the buffers of its usual size, so a shrink needs no memory that somebody else may have taken meanwhile.
Decides nothing about when; knows no streams: whoever calls does so with nothing of the session in flight.

Invariants:
1. All caches of a session have equally many slots, at least the usual.
2. `extra_bytes` is what a shrink frees: of caches of the usual size nothing, and nothing is reserved beside them.
3. What is mapped keeps its rows when caches are replaced; where the new ones are smaller, the rows that were pinned last.
"""

from contextlib import ExitStack
from functools import partial
from typing import Self

import torch

from kernels.layout import BlockLayout
from memory.errors import PoolExhausted
from memory.hot import HotCache
from memory.pool import Pool, allocated

__all__ = ["HotCaches", "keep_rows"]

_WORTHWHILE = 1.25  # times the usual slots; for less nobody shrinks later


class HotCaches:
    """Caches of one session, or none while it rests. Loop thread only."""

    def __init__(self, pool: Pool) -> None:
        self.caches: list[HotCache] = []
        self._pool = pool
        self._layers: list[int] = []  # of each group
        self._usual = 0  # slots
        self._reserved: list[int] = []  # bytes of a buffer of the usual size, a group; empty unless the caches are larger

    @classmethod
    def take(cls, pool: Pool, layout: BlockLayout, positions: int, usual: int, margin_bytes: int | None) -> Self:
        """Empty caches for a session of `positions` positions.

        Args: usual: slots a group. margin_bytes: what larger caches leave of the pool; None: they have the usual size.
        Raises: PoolExhausted: not even the usual size is to be had; nothing is held then.
        """
        found = cls(pool)
        found._layers, found._usual = [len(group) for group in layout.groups], usual
        row_bytes = layout.row.row_bytes
        slots = usual if margin_bytes is None else found._affordable(positions, row_bytes, margin_bytes)
        if slots > usual:
            try:
                found._fill(positions, slots, row_bytes)
                return found
            except PoolExhausted:  # the device has less than was counted: an allocator's rounding
                pass
        found._fill(positions, usual, row_bytes)
        return found

    def _bytes(self, positions: int, slots: int, row_bytes: int) -> list[int]:
        return [HotCache.bytes_needed(layers, slots, positions, row_bytes) for layers in self._layers]

    def _affordable(self, positions: int, row_bytes: int, margin_bytes: int) -> int:
        """Slots for which the pool has room beside the usual caches and the margin; the usual ones if not many more."""
        spare = self._pool.spare_bytes()
        if spare is None or self._usual >= positions:
            return self._usual
        fixed = sum(map(allocated, self._bytes(positions, 0, row_bytes))) + sum(
            map(allocated, self._bytes(positions, self._usual, row_bytes))
        )
        rounding = len(self._layers) * (allocated(1) + 32)
        a_slot = sum(self._layers) * row_bytes + 8 * len(self._layers)
        slots = min(positions, (spare - margin_bytes - fixed - rounding) // a_slot)
        return slots if slots == positions or slots >= _WORTHWHILE * self._usual else self._usual

    def _fill(self, positions: int, slots: int, row_bytes: int) -> None:
        pool = self._pool
        with ExitStack() as undo:
            reserved = self._bytes(positions, self._usual, row_bytes) if slots > self._usual else []
            for size in reserved:
                pool.reserve(size, 1)
                undo.callback(pool.unreserve, size, 1)
            caches = []
            for layers in self._layers:
                caches.append(HotCache(layers, slots, positions, row_bytes, take=pool.take))
                undo.callback(pool.give, caches[-1].buffer)
            undo.pop_all()
        self.caches, self._reserved = caches, reserved

    @property
    def extra_bytes(self) -> int:
        """Device bytes that a shrink would free."""
        return sum(allocated(cache.buffer.numel()) for cache in self.caches) if self._reserved else 0

    def shrink(self) -> None:
        """Back to the usual size, in the buffers reserved for it; nothing if the caches are no larger."""
        if not self._reserved:
            return
        take = partial(self._pool.take, reserved=True)
        smaller = []
        for layers, old in zip(self._layers, self.caches, strict=True):
            new = HotCache(layers, self._usual, old.slot_of.shape[0], old.slots.shape[2], take=take)
            keep_rows(old, new)
            smaller.append(new)
        for old in self.caches:
            self._pool.give(old.buffer)
        self.caches, self._reserved = smaller, []

    def replace(self, new: "HotCaches") -> None:
        """Hold what `new` holds, with the rows of the present caches in it; `new` holds nothing then."""
        for before, after in zip(self.caches, new.caches, strict=bool(self.caches)):
            keep_rows(before, after)
        self.give()
        self.caches, self._layers, self._usual, self._reserved = new.caches, new._layers, new._usual, new._reserved
        new.caches, new._reserved = [], []

    def give(self) -> None:
        """Give everything back; nothing if it holds nothing."""
        for cache in self.caches:
            self._pool.give(cache.buffer)
        for size in self._reserved:
            self._pool.unreserve(size, 1)
        self.caches, self._reserved = [], []


def keep_rows(old: HotCache, new: HotCache) -> None:
    """Copy what `old` holds to the empty `new` of no fewer positions; where that has fewer slots, the rows pinned last."""
    slots, positions = new.position_of.shape[0], old.slot_of.shape[0]
    assert new.slot_of.shape[0] >= positions, f"{new.slot_of.shape[0]} positions for {positions}"
    if slots >= old.position_of.shape[0]:
        held = old.position_of.shape[0]
        new.slots[:, :held].copy_(old.slots)
        new.slot_of[:positions].copy_(old.slot_of)
        new.position_of[:held].copy_(old.position_of)
        new.pin_round[:held].copy_(old.pin_round)
        new.hand.copy_(old.hand)
        return
    # A slot that holds nothing was unmapped by a cut and may have a pin all the same.
    used = torch.where(old.position_of >= 0, old.pin_round, -2)
    chosen = torch.topk(used, slots).indices.sort().values
    torch.index_select(old.slots, 1, chosen, out=new.slots)
    torch.index_select(old.position_of, 0, chosen, out=new.position_of)
    torch.index_select(old.pin_round, 0, chosen, out=new.pin_round)
    # One place more takes the writes of slots that hold nothing: a boolean index would wait for the device.
    spread = torch.full((positions + 1,), -1, dtype=torch.int32, device=old.slot_of.device)
    target = torch.where(new.position_of >= 0, new.position_of, positions).long()
    spread.scatter_(0, target, torch.arange(slots, dtype=torch.int32, device=spread.device))
    new.slot_of[:positions].copy_(spread[:positions])
