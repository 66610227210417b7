"""Places where no archive can be written or read: one line each that says why and what to do, and nothing is touched."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.archive.stages import merge
from engine.archive.writer import Writer
from engine.errors import ArchiveFailed, ArchiveRefused, BadRequest, ForebayError
from tests.engine.archive.archive_world import SESSION, Picture, export, identity, read
from tests.engine.archive.engines import engine_of, say


def refused(doing: Callable[[], object], kind: type[ForebayError]) -> str:
    """What a refusal says."""
    with pytest.raises(kind) as caught:
        doing()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _file(path: Path) -> Path:
    path.write_bytes(b"mine")
    return path


def test_an_export_to_what_is_no_directory(tmp_path: Path) -> None:
    """A file, a link to nothing, a place below a file or below nothing: each is named for what it is, and stays."""
    of, picture = identity(), Picture.drawn(identity(), 70, 1)
    file = _file(tmp_path / "file")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    for place in (file, link):
        said = refused(lambda place=place: export(place, of, picture), ArchiveFailed)  # type: ignore[misc]
        assert said == f"cannot write archive '{place}': a file or link has that name; choose another one"
    for place in (file / "a", tmp_path / "absent" / "a"):
        said = refused(lambda place=place: export(place, of, picture), ArchiveFailed)  # type: ignore[misc]
        assert said == f"cannot write archive '{place}': there is no directory '{place.parent}'; make it first"
    assert file.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_an_import_from_what_is_no_archive(tmp_path: Path) -> None:
    """A file, nothing, and a directory of something else are each called what they are."""
    of = identity()
    _file(tmp_path / "file")
    (tmp_path / "photos").mkdir()
    _file(tmp_path / "photos" / "cat.jpg")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "a web page", "start_url": "/"}')
    for name, why in (
        ("file", "it is no directory; name the one that has its manifest.json"),
        ("absent", "there is no such directory"),
        ("photos", "it has no manifest.json"),
    ):
        said = refused(lambda name=name: read(tmp_path / name, of), ArchiveRefused)  # type: ignore[misc]
        assert said.startswith("archive '")
        assert said.endswith(f"{name}' is incomplete: {why}")
    said = refused(lambda: read(tmp_path / "page", of), ArchiveRefused)
    assert said.endswith("page' is damaged: its manifest.json is not one of a Forebay archive")


def test_somebody_elses_directory_is_not_written_to(tmp_path: Path) -> None:
    """A directory that has files and no archive, or another program's manifest.json, stays as it is, at an export and at a merge."""
    of, picture = identity(), Picture.drawn(identity(), 70, 1)
    export(tmp_path / "a", of, picture)
    (tmp_path / "photos").mkdir()
    _file(tmp_path / "photos" / "cat.jpg")
    (tmp_path / "page").mkdir()
    page = tmp_path / "page" / "manifest.json"
    page.write_text('{"name": "a web page", "start_url": "/"}')
    wanted = f"'{tmp_path / 'photos'}' is no archive and has 'cat.jpg' in it; choose an empty or a new directory"
    assert refused(lambda: export(tmp_path / "photos", of, picture), ArchiveFailed) == wanted
    assert refused(lambda: merge([tmp_path / "a"], tmp_path / "photos"), ArchiveFailed) == wanted
    refused(lambda: export(tmp_path / "page", of, picture), ArchiveRefused)
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]
    assert page.read_text() == '{"name": "a web page", "start_url": "/"}'


def test_what_a_killed_export_or_a_server_left_is_no_hindrance(tmp_path: Path) -> None:
    """A first export goes to a directory that has leftovers of one that was killed, or how long the session is to be kept."""
    of, picture = identity(), Picture.drawn(identity(), 70, 1)
    place = tmp_path / "a"
    place.mkdir()
    for name in ("rows-0123456789abcdef.part", f"keys-{'0' * 32}.bin", "retention.json"):
        _file(place / name)
    export(place, of, picture)
    assert read(place, of)[0].rows == 70
    assert (place / "retention.json").exists()
    assert not (place / "rows-0123456789abcdef.part").exists()


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "; its owner must allow it"), (errno.EROFS, "; choose another directory"), (errno.EIO, "")]
)
def test_what_the_system_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str) -> None:
    """Without permission, on a disk that is read only: the system's word, and what to do where there is something."""
    of, picture = identity(), Picture.drawn(identity(), 70, 1)
    export(tmp_path / "a", of, picture)
    real = os.open

    def refuse(path: Any, *more: Any, **named: Any) -> int:
        if str(path) == str(tmp_path / "a"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    for doing, word in ((lambda: read(tmp_path / "a", of), "read"), (lambda: Writer(tmp_path / "a", of, SESSION), "write")):
        said = refused(doing, ArchiveFailed)
        assert said == f"cannot {word} archive '{tmp_path / 'a'}': {os.strerror(number)}{advice}"


async def test_an_empty_name_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an export nor an import takes it for the directory one happens to be in; the session lives on."""
    monkeypatch.chdir(tmp_path)
    async with engine_of() as engine:
        session = await engine.create_session()
        await say(engine, session, (1, 2, 3), 2)
        for name, why in (("", "is empty"), ("a\0b", "zero byte")):
            with pytest.raises(BadRequest, match=why):
                await engine.export_session(session, name)
            with pytest.raises(BadRequest, match=why):
                await engine.import_session(name)
        assert os.listdir(tmp_path) == []
        await engine.export_session(session, tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
