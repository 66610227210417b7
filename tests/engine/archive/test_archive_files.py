"""Archives as files: what is written is what is read, second exports write what is new, stages merge and part again."""

import os
from pathlib import Path

import numpy
import pytest

from engine.archive.identity import Identity
from engine.archive.listing import look, verify
from engine.archive.manifest import Manifest
from engine.archive.reader import Reader
from engine.archive.stages import merge, split
from engine.archive.writer import Writer
from engine.errors import ArchiveFailed, ArchiveRefused, BadSetting, NotAdmitted
from memory.row import KEY_FORMATS, ROW_FORMATS, KeyFormat, RowFormat
from tests.engine.archive.archive_world import SESSION, Picture, export, identity, read, stage_of

LENGTHS = [0, 1, 63, 64, 65, 128, 191, 192, 193, 1000]


def same(found: tuple[Manifest, dict[str, numpy.ndarray]], picture: Picture, of: Identity) -> None:
    """An archive read back is a picture, as a stage has it."""
    manifest, parts = found
    assert (list(manifest.tokens), manifest.rows, manifest.revision) == (picture.tokens, picture.count, picture.revision)
    assert manifest.hidden == (picture.hidden if manifest.first_layer + manifest.layers >= of.main_layers else b"")
    for part in of.parts:
        whole = picture.rows if part.kind == "rows" else picture.keys
        assert numpy.array_equal(parts[part.kind], whole[part.first_layer : part.end_layer]), part.kind


@pytest.mark.parametrize("row", ROW_FORMATS)
@pytest.mark.parametrize("key", KEY_FORMATS)
def test_every_format_comes_back_to_the_byte(tmp_path: Path, row: RowFormat, key: KeyFormat) -> None:
    """Rows, keys, tokens, hidden states and revision of every length across blocks and segments."""
    of = identity(row, key)
    for rows in LENGTHS:
        picture = Picture.drawn(of, rows, rows)
        export(tmp_path / str(rows), of, picture)
        same(read(tmp_path / str(rows), of), picture, of)
        assert verify(tmp_path / str(rows)).rows == rows


def test_a_second_export_writes_what_is_new(tmp_path: Path) -> None:
    """Twenty more rows cost the tail block and the manifest; nothing new costs the manifest alone; both are whole."""
    of = identity()
    first = Picture.drawn(of, 1000, 1)
    whole = export(tmp_path / "a", of, first).written_bytes
    more = first.then(Picture.drawn(of, 20, 2))
    manifest_bytes = (tmp_path / "a/manifest.json").stat().st_size
    again = export(tmp_path / "a", of, more)
    assert again.written_bytes - manifest_bytes < 2 * of.block_bytes < whole / 4
    same(read(tmp_path / "a", of), more, of)
    for fill in (0, 0xFF):  # bytes behind the last row are nobody's, and no reason to write
        idle = export(tmp_path / "a", of, more, fill=fill)
        assert idle.written_bytes == (tmp_path / "a/manifest.json").stat().st_size
    assert verify(tmp_path / "a").rows == 1020


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 65, 192, 500, 511, 512, 999])
def test_a_truncation_writes_a_manifest_alone(tmp_path: Path, kept: int) -> None:
    """A cut anywhere, also inside a block, writes no segment; files that nothing counts are gone; growing again goes on from the cut."""
    of = identity()
    whole = Picture.drawn(of, 1000, 1)
    export(tmp_path / "a", of, whole)
    cut = whole.cut(kept)
    cut.hidden = whole.hidden if kept else b""
    done = export(tmp_path / "a", of, cut)
    assert done.written_bytes == (tmp_path / "a/manifest.json").stat().st_size
    same(read(tmp_path / "a", of), cut, of)
    assert set(os.listdir(tmp_path / "a")) == {"manifest.json", *(one.name for one in done.segments)}
    again = export(tmp_path / "a", of, cut)
    assert again.written_bytes == (tmp_path / "a/manifest.json").stat().st_size
    for rows in (3, 61, 300):
        grown = cut.then(Picture.drawn(of, rows, rows))
        export(tmp_path / "a", of, grown)
        same(read(tmp_path / "a", of), grown, of)


def test_rows_that_come_back_are_counted_again(tmp_path: Path) -> None:
    """A session cut inside a block whose old rows come back, byte for byte, counts the block that is there."""
    of = identity()
    whole = Picture.drawn(of, 320, 1)
    export(tmp_path / "a", of, whole, segment_blocks=100)
    export(tmp_path / "a", of, whole.cut(130), segment_blocks=100)
    done = export(tmp_path / "a", of, whole.cut(192), segment_blocks=100)
    assert done.written_bytes == (tmp_path / "a/manifest.json").stat().st_size
    same(read(tmp_path / "a", of), _at(whole.cut(192), 1), of)


def _at(picture: Picture, revision: int) -> Picture:
    picture.revision = revision
    return picture


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_stay_whole(tmp_path: Path, seed: int) -> None:
    """Growing, cutting, growing differently, with segments of any size: after each export the archive is the session."""
    draw = numpy.random.default_rng(seed)
    of = identity()
    picture = Picture.drawn(of, int(draw.integers(0, 400)), seed)
    for turn in range(12):
        if draw.random() < 0.4:
            kept = int(draw.integers(0, picture.count + 1))
            picture = picture.cut(kept)
            picture.hidden = picture.hidden if kept else b""
        if draw.random() < 0.7:
            picture = picture.then(Picture.drawn(of, int(draw.integers(1, 200)), 1000 * seed + turn))
        export(tmp_path / "a", of, picture, segment_blocks=int(draw.integers(1, 5)), fill=int(draw.integers(256)))
        same(read(tmp_path / "a", of, batch=int(draw.integers(1, 5))), picture, of)


def test_stages_merge_into_one_and_back(tmp_path: Path) -> None:
    """Two stages' archives make the whole model's, which parts elsewhere; after each a stage reads exactly its layers."""
    whole = identity()
    picture = Picture.drawn(whole, 300, 3)
    ranges = [range(3), range(3, 6)]
    for number, layers in enumerate(ranges):
        export(tmp_path / f"stage{number}", stage_of(whole, layers), picture)
    merge([tmp_path / "stage1", tmp_path / "stage0"], tmp_path / "whole")
    same(read(tmp_path / "whole", whole), picture, whole)
    same(read(tmp_path / "whole", stage_of(whole, range(3))), picture, stage_of(whole, range(3)))
    others = [range(4), range(4, 6)]
    split(tmp_path / "whole", others, [tmp_path / "left", tmp_path / "right"])
    for name, layers in zip(("left", "right"), others, strict=True):
        stage = stage_of(whole, layers)
        same(read(tmp_path / name, stage), picture, stage)
    merge([tmp_path / "left", tmp_path / "right"], tmp_path / "again")
    same(read(tmp_path / "again", whole), picture, whole)
    more = picture.then(Picture.drawn(whole, 10, 4))
    assert export(tmp_path / "again", whole, more).written_bytes < 3 * whole.block_bytes + 20_000
    same(read(tmp_path / "again", whole), more, whole)
    same(read(tmp_path / "whole", whole), picture, whole)  # shared files never change


def test_what_does_not_belong_together_is_not_merged(tmp_path: Path) -> None:
    """Gaps, doubles, other turns and directories in use are one line each, and no target has a manifest."""
    whole = identity()
    picture = Picture.drawn(whole, 100, 3)
    for name, layers, one in (
        ("first", range(3), picture), ("last", range(4, 6), picture), ("later", range(3, 6), picture.cut(90)),
        ("good", range(3, 6), picture),
    ):  # fmt: skip
        export(tmp_path / name, stage_of(whole, layers), one)
    for sources in (["first", "last"], ["first", "first"], ["first", "later"], ["first", "good", "good"]):
        with pytest.raises((ArchiveRefused, NotAdmitted)):
            merge([tmp_path / one for one in sources], tmp_path / "target")
    with pytest.raises(ArchiveFailed, match="has an archive already"):
        merge([tmp_path / "first", tmp_path / "good"], tmp_path / "later")
    with pytest.raises(ArchiveRefused, match="layers 0 to 2"):
        split(tmp_path / "first", [range(1, 4)], [tmp_path / "target"])
    with pytest.raises(ArchiveRefused, match="not one session's stages"):
        merge([tmp_path / "first", tmp_path / "later"], tmp_path / "target")
    assert not (tmp_path / "target/manifest.json").exists()


def test_a_directory_is_one_sessions_and_one_exports_at_a_time(tmp_path: Path) -> None:
    """Another session, a second writer, a reader beside a writer are refused; two readers are not."""
    of = identity()
    picture = Picture.drawn(of, 100, 1)
    export(tmp_path / "a", of, picture)
    with pytest.raises(ArchiveRefused, match=f"it holds session {SESSION}"):
        export(tmp_path / "a", of, picture, session="f" * 16)
    readers = [Reader(tmp_path / "a", of) for _ in range(2)]
    with pytest.raises(NotAdmitted, match="being exported or imported"):
        Writer(tmp_path / "a", of, SESSION)
    for reader in readers:
        reader.close()
    writer = Writer(tmp_path / "a", of, SESSION)
    with pytest.raises(NotAdmitted, match="being exported or imported"):
        Reader(tmp_path / "a", of)
    writer.close()
    same(read(tmp_path / "a", of), picture, of)


def test_leftovers_are_ignored_and_cleaned(tmp_path: Path) -> None:
    """Parts and segments of a killed export change nothing; the next one removes them, and no file of anybody else's."""
    of = identity()
    picture = Picture.drawn(of, 100, 1)
    export(tmp_path / "a", of, picture)
    stale = [f"rows-{'1' * 16}.part", f"manifest-{'2' * 16}.part", f"rows-{'3' * 32}.bin", f"keys-{'4' * 32}.bin"]
    others = ["notes.txt", "rows-1.bin", f"rows-{'5' * 32}.bin.old"]
    for name in (*stale, *others):
        (tmp_path / "a" / name).write_bytes(b"left")
    same(read(tmp_path / "a", of), picture, of)
    export(tmp_path / "a", of, picture)
    left = set(os.listdir(tmp_path / "a"))
    assert left.isdisjoint(stale)
    assert set(others) <= left


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename", "open"])
@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_full_disk_leaves_the_archive_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int) -> None:
    """Whatever call the system refuses, the error is one line, nothing new stays, and the next export succeeds."""
    of = identity()
    picture = Picture.drawn(of, 100, 1)
    export(tmp_path / "a", of, picture)
    before = {name: (tmp_path / "a" / name).read_bytes() for name in os.listdir(tmp_path / "a")}
    more = picture.then(Picture.drawn(of, 300, 2))
    real, left = getattr(os, call), [nth]

    def refuse(*arguments: object, **named: object) -> object:
        written = call != "open" or int(arguments[1]) & os.O_CREAT  # type: ignore[call-overload]
        if written:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ArchiveFailed, match="No space left on device; make room") as caught:
        export(tmp_path / "a", of, more)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(os, call, real)
    assert {name: (tmp_path / "a" / name).read_bytes() for name in os.listdir(tmp_path / "a")} == before
    export(tmp_path / "a", of, more)
    same(read(tmp_path / "a", of), more, of)


def test_a_refusal_of_the_last_sync_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When only the directory's last sync fails, whichever manifest is there has all its files."""
    of = identity()
    picture = Picture.drawn(of, 100, 1)
    export(tmp_path / "a", of, picture)
    more = picture.then(Picture.drawn(of, 300, 2))
    real_rename, real_sync, renamed = os.rename, os.fsync, []

    def rename(source: str, target: str, **named: int) -> None:
        real_rename(source, target, **named)
        renamed.append(target)

    def sync(file: int) -> None:
        if "manifest.json" in renamed:
            raise OSError(5, "Input/output error")
        real_sync(file)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(ArchiveFailed, match="Input/output error"):
        export(tmp_path / "a", of, more)
    monkeypatch.undo()
    same(read(tmp_path / "a", of), more, of)
    assert verify(tmp_path / "a").rows == 400


def test_a_list_says_what_is_there(tmp_path: Path) -> None:
    """An archive alone, several below a directory, a damaged one among them; what is no directory is refused."""
    of = identity()
    for name, rows in (("one", 100), ("two", 0), ("bad", 70)):
        export(tmp_path / name, of, Picture.drawn(of, rows, 1))
    (tmp_path / "bad/manifest.json").write_bytes(b"{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    found = look(tmp_path)
    assert [(one.path.name, one.manifest is None) for one in found] == [("bad", True), ("one", False), ("two", False)]
    assert "damaged" in found[0].wrong
    assert found[1].file_bytes == found[1].manifest.payload_bytes > 0  # type: ignore[union-attr]
    assert [one.path for one in look(tmp_path / "one")] == [tmp_path / "one"]
    with pytest.raises(BadSetting, match="is not a directory"):
        look(tmp_path / "absent")
