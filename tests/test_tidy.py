"""Style as a test: sizes, import direction, banned names, typed signatures, unused modules, and words that must not land."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "memory", "streams", "kernels")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 100  # Triton bodies
PUBLIC_METHODS_MAX = 10
MAY_IMPORT = {
    "server": {"engine"},
    "engine": {"engine", "memory", "streams", "kernels"},
    "memory": {"memory", "streams", "kernels"},
    "streams": {"streams"},
    "kernels": {"kernels"},
}
BANNED_NAMES = re.compile(
    r"(^|_)(manager|handler|helpers?|utils?|misc|common|base|data|info)$|(Manager|Handler|Helper|Utils?|Base|Data|Info)$"
)
BANNED_FUNCTIONS = re.compile(r"^(process|do)_")
# The words themselves stand here only as a pattern.
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
CUDA_ONLY = re.compile(r"\b(cupy|pycuda|cuda\.bindings|libcudart|torch\.backends\.cudnn|nvtx)\b")
# Modules that are entry points and so need no importer.
ENTRY_POINTS = {"server", "engine.demo_training.train", "engine.demo_training.evaluate"}


def sources() -> list[Path]:
    found = [ROOT / "server.py"] if (ROOT / "server.py").exists() else []
    return found + sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sources()}


def test_files_and_functions_stay_small(trees: dict[Path, ast.Module]) -> None:
    """No file over 400 lines, function over 70, Triton body over 100, class with over 10 public methods."""
    wrong = []
    for path, tree in trees.items():
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES_MAX:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = KERNEL_LINES_MAX if is_triton(node) else FUNCTION_LINES_MAX
                if size > limit:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines")
            if isinstance(node, ast.ClassDef):
                public = [
                    item.name
                    for item in node.body
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not item.name.startswith("_")
                    and not any("property" in ast.unparse(decorator) for decorator in item.decorator_list)
                ]
                if len(public) > PUBLIC_METHODS_MAX:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {len(public)} public methods")
    assert not wrong, "\n".join(wrong)


def test_imports_point_down(trees: dict[Path, ast.Module]) -> None:
    """server knows engine; engine knows memory, streams, kernels; memory knows streams, kernels; those two know nobody."""
    ours = {*PACKAGES, "server"}
    wrong = []
    for path, tree in trees.items():
        mine = module_of(path).split(".")[0]
        for name in imports_of(tree):
            top = name.split(".")[0]
            if top in ours and top not in MAY_IMPORT[mine]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_names_say_what_a_thing_is(trees: dict[Path, ast.Module]) -> None:
    """No module, class or function carries a name from the list of names that say nothing."""
    wrong = [str(path.relative_to(ROOT)) for path in trees if BANNED_NAMES.search(path.stem)]
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and BANNED_NAMES.search(node.name):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} class {node.name}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and BANNED_FUNCTIONS.search(node.name):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not wrong, "\n".join(wrong)


def test_signatures_are_typed(trees: dict[Path, ast.Module]) -> None:
    """Every parameter and result is annotated, Triton bodies excepted; public signatures do not say Any."""
    wrong = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_triton(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [item.arg for item in arguments if item.annotation is None and item.arg not in ("self", "cls")]
            if bare or node.returns is None:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {bare or 'no result type'}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_holds(trees: dict[Path, ast.Module]) -> None:
    """Each module begins with a docstring."""
    wrong = [str(path.relative_to(ROOT)) for path, tree in trees.items() if not ast.get_docstring(tree)]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_used(trees: dict[Path, ast.Module]) -> None:
    """Each module is imported by another one of ours, or is an entry point."""
    imported = {name for tree in trees.values() for name in imports_of(tree)}
    imported |= set(re.findall(r"engine\.commands\.\w+", " ".join(path.read_text() for path in trees)))
    unused = [module_of(path) for path in trees if path.stem != "__init__" and module_of(path) not in imported | ENTRY_POINTS]
    assert not unused, "\n".join(unused)


def test_nothing_unfinished_lands(trees: dict[Path, ast.Module]) -> None:
    """No placeholder word, no call that exists on one vendor's cards only."""
    wrong = []
    for path in trees:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if UNFINISHED.search(line) or CUDA_ONLY.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_the_rules_can_fail(tmp_path: Path) -> None:
    """Each rule's pattern catches a planted offence, so that a silent rule cannot pass for a kept one."""
    assert BANNED_NAMES.search("SessionManager")
    assert BANNED_NAMES.search("string_utils")
    assert not BANNED_NAMES.search("database")
    assert BANNED_FUNCTIONS.search("process_request")
    assert UNFINISHED.search("raise " + "NotImplemented" + "Error")
    planted = ast.parse("import engine.stage\nfrom memory import ring\n")
    assert {"engine.stage", "memory", "memory.ring"} == set(imports_of(planted))
    assert "engine" not in MAY_IMPORT["kernels"]
    assert "memory" not in MAY_IMPORT["streams"]
