"""Triton kernels under Triton's interpreter against their torch references: a driver script an operation, each in its own process.

TRITON_INTERPRET must be set before a kernel is defined, and it changes Triton for the whole process; hence the processes.
A driver (`drive_<operation>.py`) asserts and exits 0.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]
DRIVERS = sorted(Path(__file__).parent.glob("drive_*.py"))


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.stem.removeprefix("drive_"))
def test_kernels_equal_their_references(driver: Path) -> None:
    """The interpreted kernels of an operation do what its reference does, on hostile inputs too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(driver)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
