"""Memory that whichever append has a chunk open works in, and how wide its tiles of scores are. Knows no appends."""

import torch
from torch import Tensor

from engine.stage import Stage, activations_bytes
from kernels.layout import PAGE_KEYS
from streams import Event

__all__ = ["LONG_KEYS", "QUERY_TILE", "Scratch", "reserve_scratch", "tile_rows"]

QUERY_TILE = 64  # query rows scored at once, of long histories half as many: bounds the score scratch
LONG_KEYS = 1 << 19


class Scratch:
    """Of whichever append has a chunk open: packed rows of two layers by position, uint8 [rows, row_bytes] each, and room for scores.

    Each is taken once for a whole append: a device's allocator keeps each size that was asked for, and stops the device to ask for more.
    """

    def __init__(self) -> None:
        self.held: list[Tensor | None] = [None, None]
        self._scores: Tensor | None = None

    def scores(self, rows: int, columns: int, end: int, device: torch.device) -> Tensor:
        """Float32 [rows, columns], used until the next call. Args: end: rows that the session has when the append is over."""
        if self._scores is None or self._scores.numel() < rows * columns:
            self._scores = torch.empty(max(rows * columns, _most_scores(end)), device=device)
        return self._scores[: rows * columns].view(rows, columns)


def reserve_scratch(stage: Stage, rows: int) -> tuple[Event[None], ...]:
    """Have a device's allocator ask the driver for the scratch of an append that ends at `rows` rows, and keep it: a later one finds it.

    Done on the streams that will use it, which is how an allocator sorts what it keeps. No more than half of what activations have.
    """
    row_bytes, device = stage.layout.row.row_bytes, stage.device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    while 2 * (2 * rows * row_bytes + 4 * _most_scores(rows)) > activations_bytes(total):
        rows //= 2

    def hold() -> None:
        held = [torch.empty((rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(2)]
        del held

    def score() -> None:
        torch.empty(_most_scores(rows), device=device)

    streams = stage.streams
    return streams.prefetch.submit(hold, label="append.reserve"), streams.compute.submit(score, label="append.reserve")


def tile_rows(keys: int) -> int:
    """Query rows scored at once over so many keys."""
    return QUERY_TILE if keys <= LONG_KEYS else QUERY_TILE // 2


def _most_scores(end: int) -> int:
    """Of any tile of an append that ends at `end` rows."""
    return max(tile_rows(keys) * -(-keys // PAGE_KEYS) * PAGE_KEYS for keys in (end, min(end, LONG_KEYS)))
