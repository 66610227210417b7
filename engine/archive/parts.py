"""Which bytes of a block are rows and which are keys, and where 64 positions of them lie in a segment.

Arithmetic and views. Knows no files.

Invariants:
1. A piece is `[layer]` of n units, n = 64 but in a segment's last piece; pieces follow one another without gaps. n units are
   `[n][unit_bytes]`, or, of e4m3 keys, `[n]` values and then `[n]` scales: their planes.
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

__all__ = ["Block", "Bytes", "Part", "checksum", "piece_bytes", "piece_offset", "segment_bytes", "segment_checksum"]

Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]  # whoever needs a buffer takes its `.data`
Block: TypeAlias = Bytes | tuple[Bytes, ...]  # 64 rows: uint8 [block_bytes] of one stage, or one of each of several


@dataclass(frozen=True, slots=True)
class Part:
    """The rows, or the keys, of a stage's blocks: `layers` times 64 units, from `offset` on."""

    kind: Kind
    offset: int
    first_layer: int  # as the manifest counts: of keys among the layers with an indexer
    layers: int
    unit_bytes: int
    scale_bytes: int = 0  # of a unit, that lie behind the other bytes of all of them
    stage: int = 0  # whose blocks these are, among several stages

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.layers

    def of(self, block: Block, first_layer: int, layers: int) -> list[Bytes]:
        """Planes of some of the part's layers in a block. Views."""
        return self.planes(self._flat(block, first_layer, layers), layers)

    def planes(self, piece: Bytes, layers: int) -> list[Bytes]:
        """A piece of some layers, flat, as uint8 [layers, n, bytes] once or, with scales, twice. Views."""
        by_layer = piece.reshape(layers, -1)
        units = by_layer.shape[1] // self.unit_bytes
        cut = units * (self.unit_bytes - self.scale_bytes)
        parts = [by_layer[:, :cut], by_layer[:, cut:]] if self.scale_bytes else [by_layer]
        return [part.reshape(layers, units, -1) for part in parts]

    def _flat(self, block: Block, first_layer: int, layers: int) -> Bytes:
        assert self.first_layer <= first_layer, f"layer {first_layer} before {self.first_layer}"
        assert first_layer + layers <= self.end_layer, f"layer {first_layer + layers - 1} behind {self.end_layer - 1}"
        layer_bytes = BLOCK_ROWS * self.unit_bytes
        start = self.offset + (first_layer - self.first_layer) * layer_bytes
        own = block[self.stage] if isinstance(block, tuple) else block
        return own[start : start + layers * layer_bytes]

    def piece(self, block: Block, rows: int, first_layer: int, layers: int) -> Bytes:
        """uint8, flat: the first `rows` positions of some of the part's layers. A view when they are 64."""
        if rows == BLOCK_ROWS:
            return self._flat(block, first_layer, layers)
        found = numpy.empty(layers * rows * self.unit_bytes, numpy.uint8)
        for some, plane in zip(self.planes(found, layers), self.of(block, first_layer, layers), strict=True):
            some[:] = plane[:, :rows]
        return found


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
