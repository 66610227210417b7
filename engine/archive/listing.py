"""What lies in directories of archives: for people, without an engine.

Blocking. Knows manifests and files; no model. Nothing is locked for longer than it is looked at.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.archive.directory import MANIFEST, Directory, said
from engine.archive.manifest import Manifest
from engine.archive.parts import checksum, piece_bytes, piece_offset, segment_bytes
from engine.archive.reader import check_file, open_manifest
from engine.archive.vectors import read_all
from engine.errors import ArchiveRefused, BadSetting, ForebayError, shown

__all__ = ["Found", "look", "verify"]


@dataclass(frozen=True, slots=True)
class Found:
    """One directory with a manifest. `manifest` None: `wrong` says why."""

    path: Path
    manifest: Manifest | None
    file_bytes: int  # of the segments that it names
    wrong: str


def look(path: Path) -> list[Found]:
    """The archive that a directory is, or those right below it, by name. Raises BadSetting: there is no such directory."""
    if not path.is_dir():
        raise BadSetting(f"{shown(str(path))} is not a directory")
    if os.path.lexists(path / MANIFEST):
        return [_look_at(path)]
    return [_look_at(below) for below in sorted(path.iterdir()) if os.path.lexists(below / MANIFEST) and not below.is_symlink()]


def _look_at(path: Path) -> Found:
    try:
        directory = Directory(path, writes=False)
        try:
            manifest = open_manifest(directory)
            sizes = [segment_bytes(segment, manifest.unit_bytes(segment.kind)) for segment in manifest.segments]
            for segment, size in zip(manifest.segments, sizes, strict=True):
                check_file(directory, segment, size)
        finally:
            directory.close()
    except ForebayError as error:
        return Found(path, None, 0, str(error))
    return Found(path, manifest, sum(sizes), "")


def verify(path: Path, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Compare every byte of an archive with its checksums.

    Args: progress: called with (bytes read, bytes in all).
    Returns: its manifest. Raises: ArchiveRefused, ArchiveFailed, NotAdmitted.
    """
    directory = Directory(path, writes=False)
    try:
        manifest = open_manifest(directory)
        total = sum(segment_bytes(segment, manifest.unit_bytes(segment.kind)) for segment in manifest.segments)
        done = 0
        for segment in manifest.segments:
            unit = manifest.unit_bytes(segment.kind)
            check_file(directory, segment, segment_bytes(segment, unit))
            with said(directory.where, "read"), os.fdopen(directory.open_file(segment.name), "rb") as file:
                for number, wanted in enumerate(segment.pieces):
                    size = piece_bytes(segment, unit, number)
                    found = read_all(file.fileno(), size, piece_offset(segment, unit, number))
                    if found is None or checksum(found) != wanted:
                        raise ArchiveRefused("damaged", directory.where, f"piece {number} of {segment.name} differs from its checksum")
                    done += size
                    if progress is not None:
                        progress(done, total)
    finally:
        directory.close()
    return manifest
