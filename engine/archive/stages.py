"""Archives of layer ranges into one of them all, and back. Segments stay as they are; only manifests are written.

Blocking, and without an engine. Knows no sessions in memory.

Invariants:
1. Sources are read only; a target is a directory without an archive, and it has one only when all of it is on disk.
2. Segments are linked where the file system can, else copied; an import compares their bytes with the checksums, as of any archive.
"""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from engine.archive.checks import check, keys_of
from engine.archive.directory import MANIFEST, Directory, said
from engine.archive.manifest import Manifest, Segment, encode
from engine.archive.parts import segment_bytes
from engine.archive.reader import check_file, open_manifest
from engine.errors import ArchiveFailed, ArchiveRefused

__all__ = ["merge", "split"]

_COPY_BYTES: Final = 1 << 24
# Of two archives that are one session's, these may differ.
_OWN: Final = {"model", "first_layer", "layers", "mtp_rows", "weights", "hidden", "segments"}


def merge(sources: Sequence[Path], target: Path) -> Manifest:
    """One archive of several stages' archives of one session. Returns its manifest.

    Args: sources: in any order; their layers must follow one another without gaps.
    Raises: ArchiveRefused: they do not belong together; ArchiveFailed; NotAdmitted.
    """
    assert sources, "nothing to merge"
    with ExitStack() as opened:
        held = [(one, _checked(one)) for one in (_opened(path, opened) for path in sources)]
        held.sort(key=lambda one: one[1].first_layer)
        first = held[0][1]
        for (_, before), (directory, manifest) in pairwise(held):
            _check_follows(before, manifest, directory.where)
        merged = msgspec.structs.replace(
            first, layers=sum(one.layers for _, one in held), mtp_rows=held[-1][1].mtp_rows, hidden=held[-1][1].hidden,
            weights=tuple(weights for _, one in held for weights in one.weights),
            segments=tuple(dict.fromkeys(segment for _, one in held for segment in one.segments)),
        )  # fmt: skip
        _write(target, merged, lambda segment: next(directory for directory, one in held if segment in one.segments))
    return merged


def split(source: Path, stages: Sequence[range], targets: Sequence[Path]) -> list[Manifest]:
    """An archive a stage of one session's archive. Args: stages: ranges of layers, the MTP block's included. Raises: as `merge`."""
    assert len(stages) == len(targets), f"{len(stages)} stages, {len(targets)} directories"
    made = []
    with ExitStack() as opened:
        directory = _opened(source, opened)
        whole = _checked(directory)
        for layers, target in zip(stages, targets, strict=True):
            made.append(_cut(whole, layers, directory.where))
            _write(target, made[-1], lambda _: directory)
    return made


def _opened(path: Path, opened: ExitStack) -> Directory:
    directory = Directory(path, writes=False)
    opened.callback(directory.close)
    return directory


def _checked(directory: Directory) -> Manifest:
    manifest = open_manifest(directory)
    for segment in manifest.segments:
        check_file(directory, segment, segment_bytes(segment, manifest.unit_bytes(segment.kind)))
    return manifest


def _check_follows(before: Manifest, manifest: Manifest, where: str) -> None:
    for name in manifest.__struct_fields__:
        if name not in _OWN and getattr(before, name) != getattr(manifest, name):
            raise ArchiveRefused("foreign", where, f"its {name} is not that of layers {before.first_layer} on: not one session's stages")
    if manifest.first_layer != before.first_layer + before.layers:
        raise ArchiveRefused("format", where, f"it begins with layer {manifest.first_layer}, not {before.first_layer + before.layers}")


def _cut(whole: Manifest, layers: range, where: str) -> Manifest:
    """The manifest of some layers of an archive."""
    held = range(whole.first_layer, whole.first_layer + whole.layers)
    if not layers or layers.step != 1 or layers.start not in held or layers[-1] not in held:
        raise ArchiveRefused("format", where, f"it has layers {held.start} to {held.stop - 1}, not {layers.start} to {layers.stop - 1}")
    having = {"rows": layers, "keys": keys_of(whole.indexer_layers, whole.main_layers, layers)}
    kept = tuple(
        segment
        for segment in whole.segments
        if segment.first_layer < having[segment.kind].stop and having[segment.kind].start < segment.first_layer + segment.layers
    )
    start = layers.start - whole.first_layer
    return msgspec.structs.replace(
        whole, first_layer=layers.start, layers=len(layers), mtp_rows=layers.stop > whole.main_layers,
        weights=whole.weights[start : start + len(layers)], hidden=whole.hidden if layers.stop >= whole.main_layers else b"", segments=kept,
    )  # fmt: skip


def _write(target: Path, manifest: Manifest, source_of: Callable[[Segment], Directory]) -> None:
    """Bring the segments and then the manifest to a directory without an archive."""
    check(manifest, str(target))
    directory = Directory(target, writes=True)
    try:
        with said(directory.where, "write"):
            if directory.manifest() is not None:
                raise ArchiveFailed(f"{directory.where!r} has an archive already; choose another directory")
            directory.check_ours()
            directory.clean(set())
            for segment in manifest.segments:
                _bring(source_of(segment), directory, segment.name)
            directory.commit(MANIFEST, encode(manifest))
    finally:
        directory.close()


def _bring(source: Directory, target: Directory, name: str) -> None:
    try:
        source.link(name, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        _copy(source, target, name)


def _copy(source: Directory, target: Directory, name: str) -> None:
    part, written = target.part(name.partition("-")[0])
    with os.fdopen(source.open_file(name), "rb") as read, os.fdopen(written, "wb") as file:
        while some := read.read(_COPY_BYTES):
            file.write(some)
        file.flush()
        os.fsync(written)
    target.settle(part, name)
