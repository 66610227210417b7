"""Bit comparison for kernel tests, and the row counts that row invariance is tested at."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

ROWS_BESIDE = (1, 2, 3, 4, 8, 16, 64, 65)


def _assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape, f"{tuple(got.shape)} is not {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype == torch.float32
    differs = got.contiguous().view(torch.int32) != wanted.contiguous().view(torch.int32)
    if bool(differs.any()):
        place = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(differs.sum())} values differ, the first at {place}: {got[place].item()!r}, not {wanted[place].item()!r}"
        )


@pytest.fixture
def assert_same_bits() -> Callable[[Tensor, Tensor], None]:
    """Compare float32 tensors bit for bit, naming the first difference."""
    return _assert_same_bits


@pytest.fixture
def assert_row_invariant() -> Callable[[Callable[[Tensor], Tensor], int], None]:
    """Check an operation given as `compute(picked rows int64 [n]) -> float32 [n, ...]` over `rows` input rows.

    Each row must have the bits it has alone, beside any number of others, at any place, and beside copies of itself.
    """

    def check(compute: Callable[[Tensor], Tensor], rows: int) -> None:
        alone = torch.cat([compute(torch.tensor([row])) for row in range(rows)])
        generator = torch.Generator().manual_seed(rows)
        for count in ROWS_BESIDE:
            for picked in (
                torch.arange(count) % rows,
                torch.randperm(rows, generator=generator).repeat(1 + count // rows)[:count],
                torch.full((count,), rows - 1),
            ):
                _assert_same_bits(compute(picked), alone[picked])

    return check
