"""Interpreted index scores: the reference's own tests, then bf16 by bf16, groups of rows, and a length that the device holds."""

import company
import interpreted
import torch

from kernels.index_score import index_scores, kernel, reference
from kernels.layout import KeyLayout

LAYOUT = KeyLayout("bf16", 40)


def pages_of(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One page with these keys and NaN after them, and its address."""
    page = torch.full((1024, LAYOUT.key_bytes // 2), float("nan"), dtype=torch.bfloat16)
    page[: keys.shape[0], :40] = keys
    return page, torch.tensor([page.data_ptr()])


def bf16_queries_and_keys() -> None:
    """bf16 queries score as in float32 to its rounding, and a tensor of the length does what the number does."""
    torch.manual_seed(1)
    query, weights = torch.randn(3, 5, 40).bfloat16(), torch.randn(3, 5)
    page, pages = pages_of(torch.randn(130, 40).bfloat16())
    told = [torch.full((3, 1024), 7.0) for _ in range(3)]
    reference.index_scores(query, weights, pages, 130, LAYOUT, told[0])
    index_scores(query, weights, pages, 130, LAYOUT, told[1])
    kernel.index_scores(query, weights, pages, torch.tensor([130]), LAYOUT, told[2])
    company.near("scores", told[1][:, :130], told[0][:, :130], 2e-6)
    interpreted.same("by a tensor", told[2][:, :130], told[1][:, :130])
    del page


def company_changes_no_bit() -> None:
    """A row's scores have the same bits in groups of one, two and four rows, on any number of programs."""
    torch.manual_seed(2)
    query, weights = torch.randn(3, 4, 40).bfloat16(), torch.randn(3, 4)
    page, pages = pages_of(torch.randn(70, 40).bfloat16())

    def compute(picked: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(picked.shape[0], 1024)
        index_scores(query[picked], weights[picked], pages, 70, LAYOUT, out)
        return out[:, :70].contiguous()

    company.row_invariant(compute, 3, (1, 2, 3, 4, 5, 9))
    del page


def main() -> None:
    bf16_queries_and_keys()
    kernel.PROGRAMS = 3
    company_changes_no_bit()
    kernel.PROGRAMS = 1
    # Few of the shapes: an interpreted program takes milliseconds.
    without = (
        "company",
        "length_or_address",
        "1024-",
        "1-4-64",
        "63-4-64",
        "1-1-f32",
        "3-40-bf16",
        "12-6-f32",
        "1025-4-64",
        "1025-1-1",
        "1025-3-40",
    )
    interpreted.run_reference_tests("test_index_score.py", without=without)


if __name__ == "__main__":
    main()
