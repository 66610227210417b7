"""Compile every Triton kernel under kernels/ for AMD and NVIDIA cards without one; run as a script, in a process of its own.

A kernel module (`kernels/**/kernel*.py`) lists what it launches in COMPILE: pairs of a kernel and a dictionary of argument name to Triton
type ("*i64", "i32", "fp32") or constexpr value, at the model's true shapes; "num_warps" and "num_stages" are launch options. A value may be
a dictionary, "cuda" and "hip". Pointers are 16-byte aligned unless the kernel does not specialise on that. A kernel that is on no list and
is called by no other kernel is a failure; so is one over its target's shared memory (SHARED_BYTES_MAX).

Arguments: architectures (gfx1100, gfx942, 90), all of them if none.
Prints a line a failure, then the number of compilations. Exit status 1 if anything failed.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[3]
TARGETS = [GPUTarget("hip", "gfx1100", 32), GPUTarget("hip", "gfx942", 64), GPUTarget("cuda", 90, 32)]
SHARED_BYTES_MAX = {"hip": 64 * 1024, "cuda": 113 * 1024}  # all that AMD has; NVIDIA's 228 KiB then hold two programs
TYPE = re.compile(r"^\*?([iu](1|8|16|32|64)|fp(16|32|64|8e4nv)|bf16)$")
OPTIONS = ("num_warps", "num_stages")


def jitted(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of a module that Triton compiles."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in found if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)}


def called(functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Names that the bodies mention."""
    return {node.id for function in functions.values() for node in ast.walk(function) if isinstance(node, ast.Name)}


def modules() -> Iterator[tuple[ModuleType, dict[str, ast.FunctionDef]]]:
    """Each module with kernels, imported, and its kernels."""
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        functions = jitted(ast.parse(path.read_text()))
        if functions:
            yield importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), functions


def source_of(kernel: Any, arguments: dict[str, Any], backend: str) -> tuple[ASTSource, dict[str, int]]:
    """What Triton compiles, and launch options."""
    arguments = {name: value[backend] if isinstance(value, dict) else value for name, value in arguments.items()}
    options = {name: value for name, value in arguments.items() if name in OPTIONS}
    given = {name: value for name, value in arguments.items() if name not in OPTIONS}
    missing = set(kernel.arg_names) ^ set(given)
    assert not missing, f"COMPILE differs from the kernel's arguments in {sorted(missing)}"
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = given[name]
        if isinstance(value, str) and TYPE.match(value):
            signature[name] = value
            if value.startswith("*") and not kernel.params[index].do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(index,)] = value
    return ASTSource(kernel, signature, constants, attributes), options


def failures(targets: Sequence[GPUTarget]) -> Iterator[str]:
    """A line for each kernel that is unlisted or does not compile."""
    found = list(modules())
    mentioned = set().union(*(called(functions) for _, functions in found))
    for module, functions in found:
        listed = getattr(module, "COMPILE", [])
        names = {kernel.fn.__name__ for kernel, _ in listed}
        yield from (f"{module.__name__}.{name} is on no target list" for name in functions if name not in names | mentioned)
        for kernel, arguments in listed:
            for target in targets:
                try:
                    source, options = source_of(kernel, arguments, target.backend)
                    shared = triton.compile(source, target=target, options=options).metadata.shared
                except Exception as error:
                    reason = str(error).strip() or type(error).__name__
                    yield f"{module.__name__}.{kernel.fn.__name__} for {target.arch}: {reason}"
                    continue
                if shared > SHARED_BYTES_MAX[target.backend]:
                    yield f"{module.__name__}.{kernel.fn.__name__} for {target.arch}: {shared} bytes of shared memory"


def main() -> int:
    failed = 0
    targets = [target for target in TARGETS if str(target.arch) in sys.argv[1:]] or TARGETS
    for line in failures(targets):
        failed += 1
        print(line, flush=True)
    compiled = sum(len(getattr(module, "COMPILE", [])) for module, _ in modules()) * len(targets)
    print(f"{compiled} compilations, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
