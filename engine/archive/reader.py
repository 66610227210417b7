"""One import: checks a directory against an engine, then reads blocks, each compared with its checksum.

Blocking: called from threads, `read` from two at a time. Knows blocks as arrays of bytes; no session, no device.

Invariants:
1. A reader that exists has checked manifest, model, formats and the size of every segment that it will read; it has read no row.
2. `read` returns only after all bytes it put anywhere were compared with the manifest's checksums.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.archive.checks import check, check_fits
from engine.archive.directory import Directory, said
from engine.archive.identity import Identity
from engine.archive.manifest import Manifest, Segment, decode
from engine.archive.parts import Bytes, Part, checksum, piece_bytes, piece_offset, segment_bytes
from engine.archive.vectors import read_all, read_into
from engine.errors import ArchiveRefused
from kernels.layout import BLOCK_ROWS

__all__ = ["Reader", "open_manifest"]


def open_manifest(directory: Directory) -> Manifest:
    """The checked manifest of a locked directory. Raises ArchiveRefused, ArchiveFailed."""
    with said(directory.where, "read"):
        written = directory.manifest()
    if written is None:
        raise ArchiveRefused("missing", directory.where, "it has no manifest.json")
    manifest = decode(written, directory.where)
    check(manifest, directory.where)
    return manifest


def check_file(directory: Directory, segment: Segment, size_bytes: int) -> None:
    """Raise ArchiveRefused (missing, truncated, damaged) unless a segment's file is there and of its size."""
    with said(directory.where, "read"):
        try:
            file = directory.open_file(segment.name)
        except FileNotFoundError as error:
            raise ArchiveRefused("missing", directory.where, f"{segment.name} is not there") from error
        with os.fdopen(file, "rb"):
            found = os.fstat(file).st_size
    if found != size_bytes:
        raise ArchiveRefused("truncated", directory.where, f"{segment.name} has {found} bytes, not {size_bytes}")


class Reader:
    """Reads a session's blocks as one stage has them. `close` it."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Lock the directory and check everything but the rows' own bytes. Raises ArchiveRefused, ArchiveFailed, NotAdmitted."""
        self._directory = Directory(path, writes=False)
        try:
            self.manifest = open_manifest(self._directory)
            check_fits(self.manifest, identity, self._directory.where)
            self._segments = {part.kind: self._of(part) for part in identity.parts}
            self._parts = identity.parts
            for part in identity.parts:
                for segment in self._segments[part.kind]:
                    check_file(self._directory, segment, segment_bytes(segment, part.unit_bytes))
        except BaseException:
            self._directory.close()
            raise

    def _of(self, part: Part) -> list[Segment]:
        """Segments with rows of the stage's layers."""
        return [
            segment
            for segment in self.manifest.segments
            if segment.kind == part.kind
            and segment.first_layer < part.end_layer
            and part.first_layer < segment.first_layer + segment.layers
        ]

    def read(self, first: int, blocks: Sequence[Bytes]) -> int:
        """Fill some consecutive blocks, each uint8 [block_bytes], from number `first` on, as far as they have rows.

        Returns: bytes. Raises: ArchiveRefused: damaged or truncated, naming file and rows. ArchiveFailed.
        """
        total = 0
        with said(self._directory.where, "read"), ExitStack() as opened:
            for part in self._parts:
                for segment in self._segments[part.kind]:
                    start = max(first, segment.first_row // BLOCK_ROWS)
                    stop = min(first + len(blocks), -(-segment.end_row // BLOCK_ROWS))
                    if start < stop:
                        file = self._directory.open_file(segment.name)
                        opened.callback(os.close, file)
                        total += self._read_run(segment, part, file, start, blocks[start - first : stop - first])
        return total

    def _read_run(self, segment: Segment, part: Part, file: int, first: int, blocks: Sequence[Bytes]) -> int:
        """Consecutive pieces of one segment, by one system call where they fit their blocks as they are."""
        piece, unit = first - segment.first_row // BLOCK_ROWS, part.unit_bytes
        fits = part.first_layer <= segment.first_layer and segment.first_layer + segment.layers <= part.end_layer
        sizes = [piece_bytes(segment, unit, piece + place) for place in range(len(blocks))]
        whole = segment.layers * BLOCK_ROWS * unit
        direct = len([size for size in sizes if size == whole]) if fits else 0
        views = [part.piece(block, BLOCK_ROWS, segment.first_layer, segment.layers) for block in blocks[:direct]]
        if not read_into(file, views, piece_offset(segment, unit, piece)):
            raise self._short(segment)
        for place, block in enumerate(blocks):
            if place < direct:
                self._compare(views[place], segment, piece + place)
                continue
            found = read_all(file, sizes[place], piece_offset(segment, unit, piece + place))
            if found is None:
                raise self._short(segment)
            self._compare(found, segment, piece + place)
            self._scatter(found, segment, part, block)
        return sum(sizes)

    def _scatter(self, found: Bytes, segment: Segment, part: Part, block: Bytes) -> None:
        """A piece that is short, or that has layers which the stage has not, to its places in a block."""
        start, end = max(segment.first_layer, part.first_layer), min(segment.first_layer + segment.layers, part.end_layer)
        layers = found.reshape(segment.layers, -1, part.unit_bytes)[start - segment.first_layer : end - segment.first_layer]
        part.of(block, start, end - start)[:, : layers.shape[1]] = layers

    def _compare(self, piece: Bytes, segment: Segment, number: int) -> None:
        if checksum(piece) != segment.pieces[number]:
            first = segment.first_row + BLOCK_ROWS * number
            last = min(first + BLOCK_ROWS, segment.first_row + segment.rows) - 1
            end = segment.first_layer + segment.layers - 1
            what = f"rows {first} to {last} of {segment.kind} of layers {segment.first_layer} to {end}"
            raise ArchiveRefused("damaged", self._directory.where, f"{what} in {segment.name} differ from their checksum")

    def _short(self, segment: Segment) -> ArchiveRefused:
        return ArchiveRefused("truncated", self._directory.where, f"{segment.name} ended before its last row")

    def close(self) -> None:
        """Let go of the directory."""
        self._directory.close()
