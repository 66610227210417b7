"""Archives against plain files, on the demo model at small sizes: what is measured is there, and nothing stays behind."""

import json
import os
from pathlib import Path

import pytest

import server


def _bench(*words: str) -> int:
    return server.main(["bench", "archive", "--demo", "--device", "cpu", "--host-memory", "64MiB", *words])


def test_it_says_ratios_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rounds: a table, one line of ratios, all times in the JSON, and an empty directory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    code = _bench("--rows", "700", "--appended", "70", "--rounds", "2", "--directory", str(disk), "--json", str(tmp_path / "out.json"))
    assert code == 0
    said = capsys.readouterr().out
    assert "of a plain write" in said
    assert "import of 70 rows" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert {len(seconds) for seconds in found["seconds"].values()} == {2}
    assert all(second > 0 for seconds in found["seconds"].values() for second in seconds)
    assert found["again_bytes"] < found["payload_bytes"] / 10
    assert found["ratios"]["import_of_append"] < 1
    assert found["ratios"]["fork_of_append"] < 1
    assert -1 < found["ratios"]["resume_of_append"] < 1
    assert os.listdir(disk) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rows", "0"], "--rows must be at least 1"),
        (["--rounds", "none"], "--rounds must be"),
        (["--rows", "1000000"], "the context has"),
        (["--directory", "absent"], "is not a directory"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad count, too many rows, no directory: exit code 2."""
    assert _bench(*words) == 2
    assert says in capsys.readouterr().err
