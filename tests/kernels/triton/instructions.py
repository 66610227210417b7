"""Instructions a packed byte of the integer products on sm_90: the loop of each COMPILE entry, disassembled offline.

Run as a script with PYTHONPATH=. (words: only kernels and forms whose line holds all of them). nvdisasm comes with Triton. Prints a line a
form: instructions, a packed byte and lane, of the loop with the most matrix products; of them masks, shifts and conversions (which run at
half the rate); registers, and the warps that fit a multiprocessor by shared memory and by registers.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from compile_kernels import TARGETS, source_of

from kernels.linear import integers
from kernels.moe import integers as moe_integers

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_HALF_RATE = ("LOP3", "SHF", "PRMT", "IADD3", "ISETP", "SEL", "F2FP", "VIADD", "LEA", "PLOP3")
_SHARED, _REGISTERS = 228 * 1024, 65_536  # of a multiprocessor
_LABEL = re.compile(r"\s*\.L_x_(\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z]\w*)(.*?);")


def _tool(name: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / name, option, file.name], capture_output=True, text=True, check=True).stdout


def _loops(text: str) -> list[Counter[str]]:
    """How often each instruction stands between a label and a branch back to it."""
    names: list[str] = []
    label_at: dict[str, int] = {}
    found = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            label_at[label[1]] = len(names)
        elif got := _INSTRUCTION.search(line):
            names.append(got[1])
            back = re.search(r"\.L_x_(\d+)", got[2]) if got[1] == "BRA" else None
            if back and back[1] in label_at:
                found.append(Counter(names[label_at[back[1]] :]))
    return found


def line_of(kernel: Any, given: dict[str, Any]) -> str | None:
    """What is printed of one COMPILE entry; None if it has no loop."""
    source, options = source_of(kernel, given, "cuda")
    made = triton.compile(source, target=next(target for target in TARGETS if target.backend == "cuda"), options=options)
    loops = _loops(_tool("nvdisasm", "-c", made.asm["cubin"]))
    if not loops:
        return None
    loop = max(loops, key=lambda one: one["HMMA"])
    twin = "gate_up" in kernel.fn.__name__ or given["TWIN"]
    chunk = min(given["GROUP"], 64) * 2  # bytes of one output
    packed = (2 if twin else 1) * given["TILE_N"] * given["PARTS"] * chunk / given["num_warps"] / 32
    usage = re.search(r"REG:(\d+)", _tool("cuobjdump", "-res-usage", made.asm["cubin"]))
    registers = int(usage[1]) if usage else 255
    warps = given["num_warps"]
    fit = min(_SHARED // (made.metadata.shared + 1024), _REGISTERS // (registers * 32 * warps)) * warps
    form = f"{kernel.fn.__name__} {given['OUTPUTS']}x{given['WIDTH']} bits={given['BITS']} group={given['GROUP']} zeros={given['ZEROS']}"
    tiling = f"{given['TILE_N']} outputs, {given['PARTS']} parts, {warps} warps, twin={bool(twin)}"
    half = sum(loop[name] for name in _HALF_RATE)
    return f"{form}, {tiling}: {loop.total() / packed:.2f} a byte, {half / packed:.2f} at half rate, {registers} registers, {fit} warps"


def main() -> None:
    for kernel, given in integers.COMPILE + moe_integers.COMPILE:
        line = line_of(kernel, given)
        if line is not None and all(word in line for word in sys.argv[1:]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
