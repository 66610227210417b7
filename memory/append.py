"""One chunk of an append: where its rows, keys and pages go, and how it ends.

Holds addresses only. The session that made it owns the buffers behind them.

Invariants:
1. `block_addresses[b]` is readable for every position below `first + rows` once `ready` and the chunk's own writes have run.
2. A chunk ends exactly once: `finish` or `abandon`. Until `finish`'s event completed, the session's counts are as before the chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import torch
from torch import Tensor

from kernels.layout import BLOCK_ROWS, PAGE_KEYS, WHOLE, BlockLayout, PageShare
from memory.copyback import Copyback
from memory.staging import pinned
from streams import Event, Stream

__all__ = ["Addresses", "AppendChunk", "Destinations", "blocks_of", "pages_of"]

Addresses = numpy.typing.NDArray[numpy.int64]


def blocks_of(rows: int) -> int:
    """Blocks that the first `rows` positions lie in."""
    return -(-rows // BLOCK_ROWS)


def pages_of(rows: int, share: PageShare = WHOLE) -> int:
    """Pages of a share that the first `rows` positions lie in, a key layer."""
    return share.pages(-(-rows // PAGE_KEYS))


class Destinations:
    """Device tensors of a chunk's addresses, `targets` (blocks, rows, keys, pages), and the work that fills them."""

    def __init__(
        self, layout: BlockLayout, first: int, rows: int, block_addresses: Addresses, page_addresses: Addresses, device: torch.device,
        share: PageShare = WHOLE,
    ) -> None:  # fmt: skip
        """Make the targets, empty, and touch no row.

        Args: block_addresses: [blocks], page_addresses: [key layers, pages of the share], both covering positions below `first + rows`.
        """
        position = numpy.arange(first, first + rows, dtype=numpy.int64)
        block, row = block_addresses[position // BLOCK_ROWS], position % BLOCK_ROWS
        assert block_addresses.all(), "a block of the chunk's history has no address"
        number = position // PAGE_KEYS
        here = number % share.devices == share.device
        pages = page_addresses[:, number[here] // share.devices]
        assert pages.all(), "a page of the chunk has no address"
        at = position[here]
        keys = numpy.zeros((page_addresses.shape[0], rows), dtype=numpy.int64)
        keys[:, here] = pages + at % PAGE_KEYS // BLOCK_ROWS * layout.key.run_bytes + at % BLOCK_ROWS * layout.key.step_bytes
        self._values = tuple(
            pinned(torch.from_numpy(numpy.ascontiguousarray(values)), device)
            for values in (
                block_addresses,
                block + row * layout.row.row_bytes,
                block + layout.keys_offset + row * layout.key.step_bytes,
                keys,
            )
        )
        blocks, rows_to, keys_to, pages_to = (torch.empty(values.shape, dtype=torch.int64, device=device) for values in self._values)
        self.targets = (blocks, rows_to, keys_to, pages_to)

    def fill(self) -> None:
        """Work: write the addresses into the targets."""
        for target, values in zip(self.targets, self._values, strict=True):
            target.copy_(values, non_blocking=True)


@dataclass(frozen=True, slots=True)
class AppendChunk:
    """Rows `first` to `first + rows - 1`.

    block_addresses    [blocks]            int64  device  where positions 64 b to 64 b + 63 are, history and chunk
    row_destinations   [rows]              int64  device  each new row in layer 0; other layers `row_offset` further
    key_destinations   [rows]              int64  device  each new key of key layer 0 in the same block
    page_destinations  [key layers, rows]  int64  device  each new key in its page; 0 where that is another device's

    ready: the tensors are filled and the partial tail block is where the chunk writes. Use nothing before it (`after=[chunk.ready]`).

    finish(compute, copyback, after) -> Event: submit the end of the chunk. `after`: the last event of the chunk's own work. When the
    event completed, every whole block is in RAM (offload), the tail is in the session's ring, LOGICAL and MIRRORED stand in the state
    and the counts were raised. If `after` failed, the event fails and the counts stay as before; a failed copy breaks the session.

    abandon(after): drop the chunk. `after`: its own work that may be in flight. Counts, blocks and pages are as before it.
    """

    first: int
    rows: int
    block_addresses: Tensor
    row_destinations: Tensor
    key_destinations: Tensor
    page_destinations: Tensor
    ready: Event[None]
    finish: Callable[[Stream, Copyback, Event[Any]], Event[None]]
    abandon: Callable[[Sequence[Event[Any]]], None]
    peer: "AppendChunk | None" = None  # of a session on two devices: the same rows at the peer, which end with this one
