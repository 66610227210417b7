"""`forebay demo-cluster` as a whole; needs ray, which only `make demo-cluster` installs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: the extra forebay[cluster]")
def test_two_nodes_under_ray_one_of_them_killed() -> None:
    """Exit code 0 in under 6 minutes: the stream ended with an error, Ray started the node again and left the other alone, and the
    resumed session's tokens are those of one process."""
    command = [sys.executable, str(ROOT / "server.py"), "demo-cluster", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    for words in ("kill: node process", "the stream's end: a node is away", "answered with 503, Retry-After", "same tokens as one process"):
        assert words in done.stderr, words


def test_without_ray_it_says_what_to_install() -> None:
    """One line and exit code 2, where the environment has no ray."""
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("ray is installed here")
    done = subprocess.run([sys.executable, str(ROOT / "server.py"), "demo-cluster"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "pip install 'forebay[cluster]'" in done.stderr
    assert "Traceback" not in done.stderr
