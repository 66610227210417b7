"""Triton kernels under Triton's interpreter against their torch references: a driver script an operation, each in its own process.

TRITON_INTERPRET must be set before a kernel is defined, and it changes Triton for the whole process; hence the processes.
A driver (`drive_<operation>.py`) asserts and exits 0. By default it takes a quarter of what it has; the slow tests take all of it, and so
does a driver that is run by itself: `PYTHONPATH=. TRITON_INTERPRET=1 python tests/kernels/triton/drive_gather.py`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]
DRIVERS = sorted(Path(__file__).parent.glob("drive_*.py"))
of_every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.stem.removeprefix("drive_"))


def interpreter(extent: str) -> subprocess.Popen[str]:
    """A process that runs drivers. Args: extent: `whole`, or `part` for a quarter of the cases."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "INTERPRETED_EXTENT": extent}
    command = [sys.executable, str(Path(__file__).with_name("drivers.py"))]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def runs_in(process: subprocess.Popen[str]) -> Iterator[Callable[[Path], None]]:
    """Say how a driver is run in a process, and end the process after the last one."""
    assert process.stdin is not None
    assert process.stdout is not None

    def run(driver: Path) -> None:
        print(driver, file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
        assert answer["status"] == 0, answer["output"]

    with process:
        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def run_part() -> Iterator[Callable[[Path], None]]:
    yield from runs_in(interpreter("part"))


@pytest.fixture(scope="module")
def run_whole() -> Iterator[Callable[[Path], None]]:
    yield from runs_in(interpreter("whole"))


@of_every_driver
def test_kernels_equal_their_references(driver: Path, run_part: Callable[[Path], None]) -> None:
    """The interpreted kernels of an operation do what its reference does, on hostile inputs too."""
    run_part(driver)


@pytest.mark.slow
@of_every_driver
def test_kernels_equal_their_references_in_every_case(driver: Path, run_whole: Callable[[Path], None]) -> None:
    """So they do in all of the reference's own tests and at all of the shapes that a driver has."""
    run_whole(driver)


def test_a_driver_that_fails_fails_its_test(tmp_path: Path, run_part: Callable[[Path], None]) -> None:
    """A broken assertion and a status of its own are told with what was printed, and the next driver runs."""
    broken, leaves, fine = tmp_path / "broken.py", tmp_path / "leaves.py", tmp_path / "fine.py"
    broken.write_text("print('so far')\nassert 1 == 2, 'one is not two'\n")
    leaves.write_text("import sys\nsys.exit(3)\n")
    fine.write_text("import os\nassert os.environ['TRITON_INTERPRET'] == '1'\n")
    with pytest.raises(AssertionError, match=r"(?s)so far.*one is not two"):
        run_part(broken)
    with pytest.raises(AssertionError):
        run_part(leaves)
    run_part(fine)
