"""What a measurement was made on: device, driver, versions, commit, settings of the host.

Facts only; a fact that cannot be had is null. Changes nothing.
"""

import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine.doctor import Tree, examine, rows
from engine.doctor.tree import Unread

__all__ = ["commit", "driver", "machine"]

_PACKAGES = ("forebay", "torch", "triton", "aiohttp", "uvloop", "transformers")
_ROOT = Path(__file__).resolve().parent.parent.parent
_PROBE_S = 120.0
_HASH = re.compile(r"[0-9a-f]{40,64}")
# In a process of its own: a context of ours would stay on the device that is measured.
_PROBE = """
import json, torch
found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps({"devices": [{"name": one.name, "bytes": one.total_memory} for one in found],
                  "cuda": torch.version.cuda, "hip": torch.version.hip}))
"""


def _output(words: list[str], timeout_s: float) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=_ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit(root: Path = _ROOT) -> dict[str, Any] | None:
    """The commit this code stands at and whether files differ from it (None: unknown); None outside a clone or without git.

    A copy without a clone may say where it came from in a file `.commit`: what `git rev-parse HEAD` printed.
    """
    if not (root / ".git").exists():
        try:
            said = (root / ".commit").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return {"commit": said, "changed_files": None} if _HASH.fullmatch(said) else None
    found = _output(["git", "-C", str(root), "rev-parse", "HEAD"], 10.0)
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"], 30.0)
    return None if found is None or changed is None else {"commit": found, "changed_files": len(changed.splitlines())}


def driver(tree: Tree) -> str | None:
    """The version of the card's kernel driver."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        text = tree.read(path)
        if not isinstance(text, Unread) and text:
            return text.splitlines()[0]
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu(tree: Tree) -> str | None:
    text = tree.read("/proc/cpuinfo")
    found = None if isinstance(text, Unread) else re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else None


def machine(*, probe: bool) -> dict[str, Any]:
    """Everything, as JSON values. `probe`: ask for the devices too, which takes seconds. May wait: not for the loop's thread."""
    tree = Tree()
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    probed = _output([sys.executable, "-c", _PROBE], _PROBE_S) if probe else None
    return {
        "date": measured_at,
        "device": json.loads(probed.splitlines()[-1]) if probed else None,
        "driver": driver(tree),
        "cpu": _cpu(tree),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "source": commit(),
        "host_settings": rows(examine(tree)),
    }
