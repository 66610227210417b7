"""What one session takes of a stage's memory: arithmetic alone, for admission and for planning.

Holds the sums; `placement.py` takes and reserves exactly these bytes. Knows no tensors, no arena and no pool.

Invariants:
1. `offload_needs` and `resident_needs` are to the byte what `open` takes and reserves.
2. Device bytes are those of one card: a peer takes its own.
"""

from dataclasses import dataclass

from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, RING_BLOCKS, STATE_FIELDS, WHOLE, BlockLayout, PageShare
from memory.append import blocks_of, pages_of
from memory.hot import HotCache
from memory.pool import allocated

__all__ = ["Needs", "hot_bytes", "hot_slots", "offload_needs", "page_bytes", "resident_needs", "ring_bytes", "shared_bytes"]


@dataclass(frozen=True, slots=True)
class Needs:
    """Allocated bytes of one session, per tier."""

    host_bytes: int
    device_bytes: int


def hot_slots(hot_rows: int, picks: int, positions_max: int) -> int:
    """Hot slots a group of a session: no more than it has positions, but never fewer than one selection."""
    return max(picks, min(hot_rows, positions_max))


def hot_bytes(layout: BlockLayout, hot_rows: int, picks: int, tokens_max: int) -> int:
    """Bytes of a session's hot caches, slots and maps, of all groups."""
    positions = BLOCK_ROWS * blocks_of(tokens_max)
    slots = hot_slots(hot_rows, picks, positions)
    return sum(allocated(HotCache.bytes_needed(len(group), slots, positions, layout.row.row_bytes)) for group in layout.groups)


def page_bytes(layout: BlockLayout, tokens_max: int, share: PageShare = WHOLE) -> int:
    """Bytes of a session's index-key pages of all key layers, of a share of them."""
    return pages_of(tokens_max, share) * allocated(layout.key_layers * layout.key.page_bytes)


def ring_bytes(layout: BlockLayout) -> int:
    """Bytes of a session's recent ring."""
    return allocated(RING_BLOCKS * layout.block_bytes)


def shared_bytes(layout: BlockLayout, hidden: int, tokens_max: int, share: PageShare = WHOLE) -> int:
    """Device bytes that a session of either placement takes: tables, pages, state and hidden states."""
    tables = allocated(8 * blocks_of(tokens_max)) + allocated(8 * layout.key_layers * max(1, pages_of(tokens_max, share)))
    return tables + page_bytes(layout, tokens_max, share) + allocated(8 * STATE_FIELDS) + allocated(4 * HIDDEN_ROWS * hidden)


def offload_needs(
    layout: BlockLayout, hidden: int, hot_rows: int, picks: int, tokens_max: int, share: PageShare = WHOLE
) -> Needs:  # fmt: skip
    """Of an offloaded session of `tokens_max` rows. `hidden`: values of a hidden state; `picks`: the top-k of a selection."""
    device = shared_bytes(layout, hidden, tokens_max, share) + ring_bytes(layout) + hot_bytes(layout, hot_rows, picks, tokens_max)
    return Needs(blocks_of(tokens_max) * layout.block_bytes, device)


def resident_needs(layout: BlockLayout, hidden: int, tokens_max: int, share: PageShare = WHOLE) -> Needs:
    """Of a resident session of `tokens_max` rows; a barrier alone takes blocks in RAM, and none is reserved."""
    return Needs(0, shared_bytes(layout, hidden, tokens_max, share) + blocks_of(tokens_max) * allocated(layout.block_bytes))
