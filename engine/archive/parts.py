"""Which bytes of a block are rows and which are keys, and where 64 positions of them lie in a segment.

Arithmetic and views. Knows no files.

Invariants:
1. A piece is `[layer][n][unit_bytes]`, n = 64 but in a segment's last piece; pieces follow one another without gaps.
2. A whole piece of all a stage's layers is one run of a block's bytes: nothing is copied to write or to read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy
import numpy.typing
import xxhash

from engine.archive.manifest import Kind, Segment
from kernels.layout import BLOCK_ROWS

__all__ = ["Bytes", "Part", "checksum", "piece_bytes", "piece_offset", "segment_bytes", "segment_checksum"]

Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]  # whoever needs a buffer takes its `.data`


@dataclass(frozen=True, slots=True)
class Part:
    """The rows, or the keys, of a stage's blocks: uint8 [layers, 64, unit_bytes] from `offset` on."""

    kind: Kind
    offset: int
    first_layer: int  # as the manifest counts: of keys among the layers with an indexer
    layers: int
    unit_bytes: int

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.layers

    def of(self, block: Bytes, first_layer: int, layers: int) -> Bytes:
        """uint8 [layers, 64, unit_bytes]: some of the part's layers in a block, uint8 [block_bytes]. A view."""
        return self._flat(block, first_layer, layers).reshape(layers, BLOCK_ROWS, self.unit_bytes)

    def _flat(self, block: Bytes, first_layer: int, layers: int) -> Bytes:
        assert self.first_layer <= first_layer, f"layer {first_layer} before {self.first_layer}"
        assert first_layer + layers <= self.end_layer, f"layer {first_layer + layers - 1} behind {self.end_layer - 1}"
        layer_bytes = BLOCK_ROWS * self.unit_bytes
        start = self.offset + (first_layer - self.first_layer) * layer_bytes
        return block[start : start + layers * layer_bytes]

    def piece(self, block: Bytes, rows: int, first_layer: int, layers: int) -> Bytes:
        """uint8, flat: the first `rows` positions of some of the part's layers. A view when they are 64."""
        if rows == BLOCK_ROWS:
            return self._flat(block, first_layer, layers)
        return numpy.ascontiguousarray(self.of(block, first_layer, layers)[:, :rows]).reshape(-1)


def piece_bytes(segment: Segment, unit_bytes: int, piece: int) -> int:
    """Bytes of one piece of a segment."""
    rows = min(BLOCK_ROWS, segment.rows - BLOCK_ROWS * piece)
    return segment.layers * rows * unit_bytes


def piece_offset(segment: Segment, unit_bytes: int, piece: int) -> int:
    """Where a piece begins in its file."""
    return segment.layers * BLOCK_ROWS * unit_bytes * piece


def segment_bytes(segment: Segment, unit_bytes: int) -> int:
    """Bytes of a segment's file."""
    return segment.layers * segment.rows * unit_bytes


def checksum(piece: Bytes) -> str:
    """xxh3_128 of a piece, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(piece.data)


def segment_checksum(pieces: Sequence[str]) -> str:
    """A segment's checksum of its pieces'."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(piece) for piece in pieces))
