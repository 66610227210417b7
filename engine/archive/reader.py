"""One import: checks a directory against an engine, then reads blocks, each compared with its checksum.

Blocking: called from threads, `read` from several at a time. Knows blocks as arrays of bytes; no session, no device.

Invariants:
1. A reader that exists has checked manifest, model, formats and the size of every segment that it will read; it has read no row.
2. `read` returns only after all bytes it put anywhere were compared with the manifest's checksums.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.archive.checks import check, check_fits
from engine.archive.directory import Directory, said
from engine.archive.identity import Identity
from engine.archive.manifest import Manifest, Segment, decode
from engine.archive.parts import Block, Bytes, Part, checksum, piece_bytes, piece_offset, segment_bytes
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


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive pieces of one segment, and the blocks they belong to."""

    segment: Segment
    part: Part
    piece: int  # number of the first
    blocks: Sequence[Block]

    def size_bytes(self, place: int) -> int:
        """Of the piece in the file that belongs to block `place` of these."""
        return piece_bytes(self.segment, self.part.unit_bytes, self.piece + place)

    @property
    def direct(self) -> int:
        """How many, from the first on, lie in their blocks as they lie in the file: whole ones, of layers that the stage has."""
        segment, part = self.segment, self.part
        fits = part.first_layer <= segment.first_layer and segment.first_layer + segment.layers <= part.end_layer
        return min(len(self.blocks), segment.rows // BLOCK_ROWS - self.piece) if fits else 0


class Reader:
    """Reads a session's blocks as one stage has them. `close` it."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Lock the directory and check everything but the rows' own bytes. Raises ArchiveRefused, ArchiveFailed, NotAdmitted."""
        self._directory = Directory(path, writes=False)
        self._reading = threading.Lock()
        self._files: dict[tuple[str, int], tuple[str, int]] = {}  # by kind and first layer: the segment read last, and its descriptor
        try:
            self.manifest = open_manifest(self._directory)
            check_fits(self.manifest, identity, self._directory.where)
            self._segments = {part: self._of(part) for part in identity.parts}
            self._parts = identity.parts
            for part in identity.parts:
                for segment in self._segments[part]:
                    check_file(self._directory, segment, segment_bytes(segment, part.unit_bytes))
        except BaseException:
            self.close()
            raise

    def _of(self, part: Part) -> list[Segment]:
        """Segments with rows of the stage's layers."""
        return [
            segment
            for segment in self.manifest.segments
            if part.layers  # a stage inside one group has no keys
            and segment.kind == part.kind
            and segment.first_layer < part.end_layer
            and part.first_layer < segment.first_layer + segment.layers
        ]

    def read(self, first: int, blocks: Sequence[Block]) -> int:
        """Fill some consecutive blocks, each a `Block`, from number `first` on, as far as they have rows.

        Returns: bytes. Raises: ArchiveRefused: damaged or truncated, naming file and rows. ArchiveFailed.
        """
        total, unchecked = 0, []
        # Two readers of one disk take half as long again as one (two cores, ext4, 215 MiB). While one thread reads, others compare.
        with said(self._directory.where, "read"), self._reading:
            for part in self._parts:
                for segment in self._segments[part]:
                    start = max(first, segment.first_row // BLOCK_ROWS)
                    stop = min(first + len(blocks), -(-segment.end_row // BLOCK_ROWS))
                    if start < stop:
                        run = _Run(segment, part, start - segment.first_row // BLOCK_ROWS, blocks[start - first : stop - first])
                        unchecked.append((run, self._read_run(run)))
                        total += sum(run.size_bytes(place) for place in range(len(run.blocks)))
        for run, views in unchecked:
            for place, view in enumerate(views):
                self._compare(view, run.segment, run.piece + place)
        return total

    def _file(self, segment: Segment) -> int:
        """Descriptor of a segment's file; that of the rows before is closed. Under `_reading` only."""
        key = segment.kind, segment.first_layer
        name, file = self._files.get(key, ("", -1))
        if name != segment.name:
            before, file = file, self._directory.open_file(segment.name)
            self._files[key] = segment.name, file
            if name:
                os.close(before)
        return file

    def _read_run(self, run: _Run) -> list[Bytes]:
        """Read a run: by one system call the pieces that fit their blocks as they are, which are returned and yet to be compared; the
        others one by one, since they take memory of their own, compared before they are put into their blocks."""
        segment, unit, file = run.segment, run.part.unit_bytes, self._file(run.segment)
        views = [run.part.piece(block, BLOCK_ROWS, segment.first_layer, segment.layers) for block in run.blocks[: run.direct]]
        if not read_into(file, views, piece_offset(segment, unit, run.piece)):
            raise self._short(segment)
        for place in range(run.direct, len(run.blocks)):
            found = read_all(file, run.size_bytes(place), piece_offset(segment, unit, run.piece + place))
            if found is None:
                raise self._short(segment)
            self._compare(found, segment, run.piece + place)
            _scatter(found, segment, run.part, run.blocks[place])
        return views

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
        """Let go of the directory and its files."""
        for _, file in self._files.values():
            os.close(file)
        self._files = {}
        self._directory.close()


def _scatter(found: Bytes, segment: Segment, part: Part, block: Block) -> None:
    """A piece that is short, or that has layers which the stage has not, to its places in a block."""
    start, end = max(segment.first_layer, part.first_layer), min(segment.first_layer + segment.layers, part.end_layer)
    for there, here in zip(part.planes(found, segment.layers), part.of(block, start, end - start), strict=True):
        here[:, : there.shape[1]] = there[start - segment.first_layer : end - segment.first_layer]
