"""What the drivers of interpreted kernels share: operations that run their Triton kernel on CPU tensors, and the tests of their references.

Import this before anything of kernels/: it replaces the choice between reference and kernel. Only for processes with TRITON_INTERPRET=1.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

import kernels.place

assert os.environ.get("TRITON_INTERPRET") == "1", "interpreted kernels need TRITON_INTERPRET=1 before they are defined"
assert not [name for name in sys.modules if name.startswith("kernels.") and name != "kernels.place" and "layout" not in name
            and "address" not in name], "an operation was imported before its choice of form was replaced"  # fmt: skip

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

_TESTS = Path(__file__).resolve().parents[1]


def run_reference_tests(file: str, *, without: tuple[str, ...]) -> None:
    """Run a reference's own test file with the kernels in its place.

    Args: without: parts of test names that a device cannot keep (a raised assertion), or that are long and covered by the driver.
    """
    chosen = " and ".join(f"not {name}" for name in (*without, "device_without_a_kernel"))
    status = pytest.main([str(_TESTS / file), "-q", "-x", "-k", chosen, "-p", "no:cacheprovider", "-p", "no:xdist"])
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
