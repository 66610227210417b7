"""Processes killed while they export or import: the last complete archive is intact, whenever it happens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("kills", "seed"), [(8, 1), pytest.param(60, 2, marks=pytest.mark.slow)])
def test_whatever_kills_an_export_leaves_a_whole_archive(tmp_path: Path, kills: int, seed: int) -> None:
    """After every kill the archive is one turn's to the byte, no older than before; the next export removes what was left."""
    kill("kill_exports.py", tmp_path, kills, seed)


@pytest.mark.parametrize(("kills", "seed"), [(4, 1), pytest.param(50, 2, marks=pytest.mark.slow)])
def test_whatever_kills_a_server_while_sessions_leave(tmp_path: Path, kills: int, seed: int) -> None:
    """After every kill each archive is its session after some turn, to the byte; after a restart all go on, and nothing stays behind."""
    kill("kill_departures.py", tmp_path, kills, seed)


def kill(name: str, tmp_path: Path, kills: int, seed: int) -> None:
    """Run a script of this directory."""
    script = ROOT / "tests/engine/archive" / name
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "a"), str(kills), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{kills} kills" in done.stdout
