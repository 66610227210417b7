"""Every Triton kernel compiles offline for AMD's wave 32 and wave 64 and for NVIDIA's sm_90, within the shared memory each has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    """No kernel is unlisted, fails to compile at the model's shapes, or needs more shared memory than every target has."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_kernels.py")
    # A process a target: compiling is one thread's work, and this test is the longest of all.
    running = [
        subprocess.Popen(
            [sys.executable, str(script), each], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for each in ("gfx1100", "gfx942", "90")
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], "\n".join(said)
    assert all(" 0 failures" in each for each in said), said
