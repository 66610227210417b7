"""The hot cache of one session and selection group: a fixed number of slots, and the maps that say what they hold.

Holds one buffer. The maps are changed by `kernels/round` through the step table, in step order; nothing here decides what is kept.
Knows no streams: whoever calls `clear` or `unmap_from` does so in stream order.

Invariants (`check_integrity`):
1. slot_of and position_of are inverse: slot_of[p] = s exactly when position_of[s] = p.
2. A mapped position is mirrored: a rollback of rows not yet in RAM never touches a map.
3. 0 <= hand < slots; no pin lies in a later round than the session's.
4. One selection of a step fits: slots >= top-k is the caller's to ask for; with fewer, rows are read through and stay right.
Maps are int32: positions pass 32,767.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.layout import GROUP_FIELDS, GroupField
from kernels.round import unmap_positions

__all__ = ["HotCache", "HotStatistics", "Take"]

Take: TypeAlias = Callable[[int, str], Tensor]  # (bytes, owner) -> uint8 [bytes] on the device, 16-byte aligned


@dataclass(frozen=True, slots=True)
class HotStatistics:
    """What a hot cache holds, and the bytes of each part."""

    slots: int
    mapped: int  # slots that hold a row
    row_bytes: int  # bytes of all slots of all layers
    map_bytes: int  # bytes of slot maps, pins and hand


def _padded(size: int) -> int:
    return -(-size // 16) * 16


class HotCache:
    """Slots and maps in one buffer taken at construction; `buffer` goes back to where it came from when the session ends."""

    def __init__(self, layers: int, slots: int, positions_max: int, row_bytes: int, *, take: Take, owner: str = "hot") -> None:
        """Take the buffer and map nothing.

        Args: layers: of the group. slots: a layer. positions_max: positions a session may reach. row_bytes: a multiple of 16.
            take: called once; what it raises (no room) leaves nothing behind. owner: whose bytes these are.
        """
        assert layers > 0, f"a hot cache serves layers, not {layers}"
        assert slots > 0, f"a hot cache has slots, not {slots}"
        assert positions_max > 0, f"a session has positions, not {positions_max}"
        assert row_bytes % 16 == 0, f"row_bytes {row_bytes} is not a multiple of 16"
        self.buffer = take(self.bytes_needed(layers, slots, positions_max, row_bytes), owner)
        assert self.buffer.data_ptr() % 16 == 0, "the hot cache's buffer is not 16-byte aligned"
        cut = 0

        def part(count: int, dtype: torch.dtype) -> Tensor:
            nonlocal cut
            size = count * dtype.itemsize
            view = self.buffer[cut : cut + size].view(dtype)
            cut += _padded(size)
            return view

        self.slots = part(layers * slots * row_bytes, torch.uint8).view(layers, slots, row_bytes)
        self.slot_of = part(positions_max, torch.int32)
        self.position_of = part(slots, torch.int32)
        self.pin_round = part(slots, torch.int32)
        self.hand = part(1, torch.int32)
        self.clear()

    @staticmethod
    def bytes_needed(layers: int, slots: int, positions_max: int, row_bytes: int) -> int:
        """Bytes of the one buffer, for admission: rows exactly, each map rounded up to 16."""
        return layers * slots * row_bytes + _padded(4 * positions_max) + 2 * _padded(4 * slots) + 16

    def table_fields(self) -> list[int]:
        """This group's fields of a step table place, in GroupField order."""
        fields = [0] * GROUP_FIELDS
        fields[GroupField.SLOTS] = self.slots.data_ptr()
        fields[GroupField.SLOT_OF] = self.slot_of.data_ptr()
        fields[GroupField.POSITION_OF] = self.position_of.data_ptr()
        fields[GroupField.PIN_ROUND] = self.pin_round.data_ptr()
        fields[GroupField.HAND] = self.hand.data_ptr()
        fields[GroupField.SLOTS_MAX] = self.slots.shape[1]
        return fields

    def clear(self) -> None:
        """Unmap everything and forget all pins. The rows' bytes stay; nothing refers to them."""
        self.slot_of.fill_(-1)
        self.position_of.fill_(-1)
        self.pin_round.fill_(-1)
        self.hand.zero_()

    def unmap_from(self, position: int) -> None:
        """Unmap every slot that holds a position at or past `position`: a truncation below the mirrored rows."""
        unmap_positions(self.slot_of, self.position_of, position)

    def mapped(self) -> Tensor:
        """int64 [] on the device: slots that hold a row now."""
        return (self.position_of >= 0).sum()

    def statistics(self, mapped: int) -> HotStatistics:
        """`mapped`: what the tensor of that name was when somebody looked."""
        return HotStatistics(
            slots=self.slots.shape[1],
            mapped=mapped,
            row_bytes=self.slots.numel(),
            map_bytes=self.buffer.numel() - self.slots.numel(),
        )

    def check_integrity(self, *, mirrored: int | None = None, round_now: int | None = None) -> None:
        """Assert the invariants. Costs a pass over the maps; call it between steps.

        Args: mirrored: rows proved to be in RAM. round_now: ROUND of the session's state. None: not checked against.
        """
        slots, positions = self.slots.shape[1], self.slot_of.shape[0]
        assert int(self.slot_of.min()) >= -1, f"slot_of holds {int(self.slot_of.min())}"
        assert int(self.slot_of.max()) < slots, f"slot_of holds {int(self.slot_of.max())} of {slots} slots"
        assert int(self.position_of.min()) >= -1, f"position_of holds {int(self.position_of.min())}"
        assert int(self.position_of.max()) < positions, f"position_of holds {int(self.position_of.max())} of {positions} positions"
        held = (self.position_of >= 0).nonzero().flatten()
        back = self.slot_of[self.position_of[held].long()].long()
        assert torch.equal(back, held), f"slots {held[back != held].tolist()} hold positions that are mapped elsewhere"
        mapped = int((self.slot_of >= 0).sum())
        assert mapped == held.numel(), f"{mapped} positions are mapped, {held.numel()} slots hold one"
        assert 0 <= int(self.hand) < slots, f"hand {int(self.hand)} of {slots} slots"
        if mirrored is not None:
            assert int(self.position_of.max()) < mirrored, f"position {int(self.position_of.max())} is mapped, {mirrored} rows are mirrored"
        if round_now is not None:
            assert int(self.pin_round.max()) <= round_now, f"a slot is pinned in round {int(self.pin_round.max())}, it is {round_now}"
