"""One export: compares with what the archive has, writes what is new, and names it last.

Blocking: called from threads, `same` and `write` from several at a time. Knows blocks as arrays of bytes; no session, no device.

Invariants:
1. What the manifest names is on disk before the manifest is; until then the archive is what it was.
2. Rows that the archive has are counted again only after their bytes here were compared with its checksum, or with its bytes.
3. A failure leaves no file but those of the archive that was there.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy

from engine.archive.checks import check
from engine.archive.directory import MANIFEST, Directory, said
from engine.archive.identity import Identity
from engine.archive.manifest import Manifest, Segment, decode, encode
from engine.archive.parts import Block, Part, checksum, piece_bytes, piece_offset, segment_bytes, segment_checksum
from engine.archive.vectors import begin_flush, read_all, write_all
from engine.errors import ArchiveRefused
from kernels.layout import BLOCK_ROWS
from memory.append import blocks_of

__all__ = ["SEGMENT_BYTES", "Writer"]

SEGMENT_BYTES: Final = 1 << 28  # of rows in a segment, about: what a truncation may leave unused on disk


@dataclass(slots=True)
class _Open:
    """A segment being written."""

    part: Part
    first_block: int
    rows: int
    name: str
    file: int
    pieces: list[str] = field(default_factory=list)  # "" until written

    def segment(self) -> Segment:
        """As the manifest will have it."""
        assert all(self.pieces), "a piece was not written"
        return Segment(
            self.part.kind, self.part.first_layer, self.part.layers, BLOCK_ROWS * self.first_block, self.rows, self.rows,
            segment_checksum(self.pieces), tuple(self.pieces),
        )  # fmt: skip


class Writer:
    """Writes a session's rows to a directory. `close` it, committed or not."""

    def __init__(self, path: Path, identity: Identity, session: str) -> None:
        """Lock the directory, read what it has, remove what killed exports left.

        Raises: ArchiveFailed, NotAdmitted, ArchiveRefused: it holds another session, a newer archive, or something else by that name.
        """
        self._identity = identity
        self._directory = Directory(path, writes=True)
        self._held: tuple[Segment, ...] = ()  # segments of the archive that is there which may be counted again
        self._named: set[str] | None = set()  # files that its manifest names; None: it cannot be read, so nobody knows
        self.there: Manifest | None = None  # of the archive that is there, if its rows may be counted again
        self._open: list[_Open] = []
        self._new: list[Segment] = []
        self._writing = threading.Lock()
        self.written_bytes = 0
        try:
            with said(self._directory.where, "write"):
                self._begin(session)
        except BaseException:
            self._directory.close()
            raise

    def _begin(self, session: str) -> None:
        directory = self._directory
        there = None
        written = directory.manifest()
        if written is None:
            directory.check_ours()
        else:
            try:
                there = decode(written, directory.where)
                check(there, directory.where)
            except ArchiveRefused as error:
                if error.reason == "newer" or b'"forebay archive"' not in written[:64]:
                    raise
                self._named = None  # damaged: it is replaced whole, and its files stay until then
                there = None
        if there is not None and there.session != session:
            raise ArchiveRefused("foreign", directory.where, f"it holds session {there.session}; choose another directory for {session}")
        if there is not None:
            self._named = {segment.name for segment in there.segments}
            self.there = there if self._usable(there) else None
            self._held = () if self.there is None else there.segments
        directory.clean(self._named)

    def _usable(self, there: Manifest) -> bool:
        """Whether its segments can be counted again: of the same model and formats, and all there."""
        identity = self._identity
        same = (there.architecture, there.weights, there.first_layer, there.layers, there.rows_as, there.keys_as) == (
            identity.architecture, identity.weights, identity.first_layer, identity.layers, identity.rows_as, identity.keys_as,
        )  # fmt: skip
        return same and all(self._has(segment) for segment in there.segments)

    def _has(self, segment: Segment) -> bool:
        try:
            file = self._directory.open_file(segment.name)
        except (FileNotFoundError, ArchiveRefused):
            return False
        with os.fdopen(file, "rb"):
            return os.fstat(file).st_size == segment_bytes(segment, self._part(segment).unit_bytes)

    def _part(self, segment: Segment) -> Part:
        """One of its kind: units of all are alike."""
        return next(part for part in self._identity.parts if part.kind == segment.kind)

    # What is there already.

    @property
    def may_have(self) -> int:
        """Blocks at the start that the archive may have."""
        return blocks_of(max((segment.end_row for segment in self._held), default=0))

    def same(self, first: int, blocks: Sequence[Block], rows: int) -> int:
        """How many of some consecutive blocks, from the first on, the archive has as they are here.

        Args: first: number of the first block. blocks: a `Block` each. rows: of the whole session.
        Raises: ArchiveFailed.
        """
        with said(self._directory.where, "read"):
            for place, block in enumerate(blocks):
                within = min(BLOCK_ROWS, rows - BLOCK_ROWS * (first + place))
                if not all(self._part_same(part, first + place, block, within) for part in self._identity.parts):
                    return place
        return len(blocks)

    def _part_same(self, part: Part, number: int, block: Block, within: int) -> bool:
        covered = part.first_layer
        for segment in sorted(self._covering(part, number), key=lambda one: one.first_layer):
            start, end = max(segment.first_layer, part.first_layer), min(segment.first_layer + segment.layers, part.end_layer)
            whole = (start, end) == (segment.first_layer, segment.first_layer + segment.layers)
            if start != covered or not whole or not self._piece_same(segment, part, number, block, within):
                return False
            covered = end
        return covered == part.end_layer

    def _covering(self, part: Part, number: int) -> list[Segment]:
        row, there = BLOCK_ROWS * number, [one for one in self._held if one.kind == part.kind]
        beside = [one for one in there if one.first_layer < part.end_layer and part.first_layer < one.first_layer + one.layers]
        return [one for one in beside if one.first_row <= row < one.end_row]

    def _piece_same(self, segment: Segment, part: Part, number: int, block: Block, within: int) -> bool:
        piece = number - segment.first_row // BLOCK_ROWS
        there = min(BLOCK_ROWS, segment.rows - BLOCK_ROWS * piece)
        if there < within:
            return False  # the tail has grown
        here = part.piece(block, within, segment.first_layer, segment.layers)
        if there == within:
            return checksum(here) == segment.pieces[piece]
        # A cut within a block that the archive has whole: its checksum speaks of rows that are gone here.
        file = self._directory.open_file(segment.name)
        with os.fdopen(file, "rb"):
            size = piece_bytes(segment, part.unit_bytes, piece)
            found = read_all(file, size, piece_offset(segment, part.unit_bytes, piece))
        if found is None or checksum(found) != segment.pieces[piece]:
            return False
        kept, ours = part.planes(found, segment.layers), part.planes(here, segment.layers)
        return all(numpy.array_equal(one[:, :within], other) for one, other in zip(kept, ours, strict=True))

    # What is new.

    def keep(self, rows: int) -> None:
        """Count the first `rows` rows, which are whole blocks or the session's all, as the archive has them; drop the rest."""
        kept = [one for one in self._held if one.first_row < rows]
        # One that was cut inside a block may be counted to that block's end again; only a last one is cut so.
        whole = [min(one.rows, BLOCK_ROWS * blocks_of(one.counted)) for one in kept]
        self._new = [msgspec.structs.replace(one, counted=min(most, rows - one.first_row)) for one, most in zip(kept, whole, strict=True)]

    def begin_segment(self, first: int, rows: int) -> None:
        """Begin a segment of rows and one of keys, of each stage, from block `first` on. Raises ArchiveFailed."""
        assert not self._open, "a segment is open"
        with said(self._directory.where, "write"):
            for part in self._identity.parts:
                if part.layers:
                    name, file = self._directory.part(part.kind)
                    self._open.append(_Open(part, first, rows, name, file, [""] * blocks_of(rows)))

    def write(self, first: int, blocks: Sequence[Block]) -> int:
        """Write some consecutive blocks, each a `Block`, of the open segment. Returns bytes. Raises ArchiveFailed."""
        total = 0
        with said(self._directory.where, "write"):
            for one in self._open:
                place = first - one.first_block
                pieces = []
                for number, block in enumerate(blocks, place):
                    within = min(BLOCK_ROWS, one.rows - BLOCK_ROWS * number)
                    pieces.append(one.part.piece(block, within, one.part.first_layer, one.part.layers))
                    one.pieces[number] = checksum(pieces[-1])
                offset, size_bytes = place * one.part.layers * BLOCK_ROWS * one.part.unit_bytes, sum(piece.size for piece in pieces)
                # Two writers of one file would wait for each other in the kernel, at up to ten times the cost (two busy cores, ext4).
                with self._writing:
                    write_all(one.file, pieces, offset)
                    begin_flush(one.file, offset, size_bytes)
                total += size_bytes
        return total

    def end_segment(self) -> None:
        """All blocks of the open segment are written: bring it to disk and name it. Raises ArchiveFailed."""
        with said(self._directory.where, "write"):
            while self._open:
                one = self._open[0]
                os.fsync(one.file)
                segment = one.segment()
                self._directory.settle(one.name, segment.name)
                os.close(one.file)
                self._open.remove(one)
                self._new.append(segment)
                self.written_bytes += segment_bytes(segment, one.part.unit_bytes)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What the manifest is to name: kept and new ones."""
        return tuple(self._new)

    def commit(self, manifest: Manifest) -> None:
        """Name the manifest: from here on it is the archive. Raises ArchiveFailed; the archive is then what it was."""
        assert not self._open, "a segment is open"
        check(manifest, self._directory.where)
        written = encode(manifest)
        self._named = None  # until it is known which manifest is there
        with said(self._directory.where, "write"):
            self._directory.commit(MANIFEST, written)
            self.written_bytes += len(written)
            self._named = {segment.name for segment in manifest.segments}

    def close(self) -> None:
        """Remove what the archive does not name, and let go of the directory."""
        for one in self._open:
            os.close(one.file)
        self._open = []
        try:
            self._directory.clean(self._named)
        finally:
            self._directory.close()
