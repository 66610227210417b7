"""The most likely tokens of a long row: chosen among few, the same as by sorting all."""

import math

import pytest
import torch

from kernels.sample import top_logprobs


def by_sorting(row: torch.Tensor, count: int) -> list[int]:
    """Most likely first, equals by token id, NaN last."""
    values = [-math.inf if math.isnan(value) else value for value in row.tolist()]
    return sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]


@pytest.mark.parametrize("length", [511, 512, 1_024, 10_752, 11_000, 40_007])
@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("kind", ["smooth", "tied", "few", "nan in a chunk", "nan at the end"])
def test_long_rows_give_what_sorting_gives(length: int, count: int, kind: str) -> None:
    """Smooth and heavily tied rows, rows of -inf but for a few, and rows with NaN, of lengths that chunks divide and do not."""
    generator = torch.Generator().manual_seed(length + count)
    row = torch.randn(length, generator=generator)
    if kind == "tied":
        row = torch.randint(-3, 2, (length,), generator=generator).float()
    elif kind == "few":
        row = torch.full((length,), -math.inf)
        row[:: length // 3] = torch.arange(float(len(row[:: length // 3])))
    elif kind.startswith("nan"):
        row[3 if kind == "nan in a chunk" else -1] = math.nan
    values, ids = top_logprobs(row[None], count)
    assert ids[0].tolist() == by_sorting(row, count)
    assert torch.equal(values[0].nan_to_num(7.0), row[ids[0]].nan_to_num(7.0))
