"""`forebay session` on directories: what it prints, what it refuses, its exit codes."""

import json
from pathlib import Path

import pytest

import server
from tests.engine.archive.archive_world import SESSION, Picture, export, identity, read


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """Two archives below a directory."""
    of = identity()
    for name, rows in (("one", 100), ("two", 300)):
        export(tmp_path / name, of, Picture.drawn(of, rows, rows))
    return tmp_path


def _session(*words: str) -> int:
    return server.main(["session", *words])


def test_list_shows_each_and_what_is_wrong(archives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row an archive, as a table and as JSON; a damaged one makes the exit code 1."""
    assert _session("list", str(archives)) == 0
    shown = capsys.readouterr().out
    assert shown.count(SESSION) == 2
    assert "300" in shown
    assert _session("list", str(archives / "two"), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["session"], facts["rows"], facts["tokens"], facts["layers"], facts["mtp_rows"]) == (SESSION, 300, 301, [0, 5], True)
    next((archives / "one").glob("rows-*")).unlink()
    assert _session("list", str(archives), "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "incomplete" in lines[0]["error"]
    assert lines[1]["rows"] == 300


def test_check_reads_every_byte(archives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound archive says so with its rate; one changed byte is exit code 3 and one line."""
    assert _session("check", str(archives / "two")) == 0
    assert "300 rows" in capsys.readouterr().out
    damaged = next((archives / "two").glob("keys-*"))
    written = bytearray(damaged.read_bytes())
    written[len(written) // 2] ^= 1
    damaged.write_bytes(written)
    assert _session("check", str(archives / "two")) == 3
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == 1
    assert damaged.name in said[0]


def test_split_and_merge(archives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages' archives and the whole again; bad words are exit code 2, layers that are not there 3."""
    names = [str(archives / name) for name in ("left", "right", "whole")]
    assert _session("split", str(archives / "two"), f"0-2:{names[0]}", f"3-5:{names[1]}") == 0
    assert "layers 3 to 5" in capsys.readouterr().out
    assert _session("merge", names[2], names[1], names[0]) == 0
    assert read(archives / "whole", identity())[0].rows == 300
    for words in (["0:left"], ["0-2"], ["2-0:left"], ["0-2:"], ["a-b:left"]):
        assert _session("split", str(archives / "two"), *words) == 2
        assert "FIRST-LAST:TARGET" in capsys.readouterr().err
    assert _session("split", str(archives / "two"), f"0-9:{archives / 'far'}") == 3
    assert _session("list", str(archives / "absent")) == 2


@pytest.mark.parametrize(
    "words", [["list", ""], ["check", ""], ["split", "", "0-2:a"], ["merge", "", "b"], ["merge", "a", "b", ""]], ids=str
)
def test_an_empty_name_is_not_the_present_directory(
    archives: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a shell's variable was not set nothing is looked at or written, and one line with exit code 2 says so."""
    monkeypatch.chdir(archives / "one")
    before = sorted(archives.rglob("*"))
    assert _session(*words) == 2
    assert "must be some text, not ''" in capsys.readouterr().err
    assert sorted(archives.rglob("*")) == before
