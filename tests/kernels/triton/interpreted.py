"""What the drivers of interpreted kernels share: operations that run their Triton kernel on CPU tensors, and the tests of their references.

Import this before anything of kernels/: it replaces the choice between reference and kernel. Only for processes with TRITON_INTERPRET=1.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_builder

import kernels.place

assert os.environ.get("TRITON_INTERPRET") == "1", "interpreted kernels need TRITON_INTERPRET=1 before they are defined"
assert not [name for name in sys.modules if name.startswith("kernels.") and name != "kernels.place" and "layout" not in name
            and "address" not in name], "an operation was imported before its choice of form was replaced"  # fmt: skip

WHOLE = os.environ.get("INTERPRETED_EXTENT", "whole") == "whole"
"""Whether drivers take all that they have; otherwise a quarter of their references' tests, and few of their own shapes."""

T = TypeVar("T")

kernels.place.on_cpu = lambda operation, tensor: False
torch.set_num_threads(1)


def _product(a: Any, b: Any, dtype: Any) -> Any:
    """Matrix product whose every value is summed in one order; on some processors NumPy's depends on where in the matrix a row stands."""
    a, b = a.astype(dtype), b.astype(dtype)
    total = a[..., :, :1] * b[..., :1, :]
    for index in range(1, a.shape[-1]):
        total += a[..., :, index : index + 1] * b[..., index : index + 1, :]
    return total


numpy.matmul = _product  # what `tl.dot` is interpreted by

# The interpreter makes this table anew for every value, and looks through all of Triton's language again for every call of a function
# inside a kernel, which finds it prepared by the launch: a quarter of the drivers' time.
_scalar_dtype = functools.cache(interpreter._get_np_dtype)
_POINTER = numpy.dtype(numpy.uint64)
_prepare: Callable[[Any], Any] = interpreter._patch_lang


def _numpy_dtype(dtype: Any) -> Any:
    """NumPy's dtype of a Triton type, of a block's elements where it is one; a pointer is 64 bits."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _POINTER if isinstance(scalar, tl.pointer_type) else _scalar_dtype(scalar)


def _prepare_once(function: Any) -> Any:
    """Triton's language as the interpreter needs it around a function; nothing where it is so already."""
    languages = [value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
    ready = all(not tl.core.is_builtin(language.load) for language in languages)
    return interpreter._LangPatchScope() if ready else _prepare(function)


interpreter._get_np_dtype = _numpy_dtype
interpreter._patch_lang = _prepare_once

_TESTS = Path(__file__).resolve().parents[1]


def some(cases: Iterable[T], every: int) -> list[T]:
    """All cases, or where a driver takes a part, the first of every so many."""
    return list(cases)[:: 1 if WHOLE else every]


class _Quarter:
    """A plugin of pytest that keeps every fourth test."""

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % 4])
        items[:] = items[::4]


def run_reference_tests(file: str, *, without: tuple[str, ...]) -> None:
    """Run a reference's own test file with the kernels in its place.

    Args: without: parts of test names that a device cannot keep (a raised assertion), or that are long and covered by the driver.
    """
    chosen = " and ".join(f"not {name}" for name in (*without, "device_without_a_kernel"))
    arguments = [str(_TESTS / file), "-q", "-x", "-k", chosen, "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main(arguments, plugins=[] if WHOLE else [_Quarter()])
    assert status == pytest.ExitCode.OK, f"{file} fails with interpreted kernels: {status!r}"


@contextmanager
def programs_backwards() -> Iterator[None]:
    """Run the programs of every launch last to first, as a device may: what depends on their order shows."""
    forwards = interpreter_builder.set_grid_idx

    def backwards(*program: int) -> None:
        forwards(*(extent - 1 - index for extent, index in zip(interpreter_builder.grid_dim, program, strict=True)))

    interpreter_builder.set_grid_idx = backwards
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = forwards


def same(name: str, got: Tensor, wanted: Tensor) -> None:
    """Assert equal dtype, shape and bytes, naming the first difference."""
    assert got.dtype == wanted.dtype, f"{name} is {got.dtype}, not {wanted.dtype}"
    assert got.shape == wanted.shape, f"{name} is {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if torch.equal(got, wanted):
        return
    at = tuple((got != wanted).nonzero()[0].tolist())
    raise AssertionError(f"{name} differs at {at}: {got[at].item()}, not {wanted[at].item()}")
