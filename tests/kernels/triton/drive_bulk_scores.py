"""Interpreted index scores of an append's query tile: NaN where no key is, strided queries, ragged tiles, and any order of programs."""

import company
import interpreted
import torch

from kernels.index_score import bulk, index_scores, reference
from kernels.layout import PAGE_KEYS, KeyLayout


def scores_agree(rows: int, keys: int, heads: int, layout: KeyLayout, dtype: torch.dtype) -> None:
    """Scores equal the reference's to rounding up to the last key; columns past the last page are left alone."""
    torch.manual_seed(rows + keys)
    query = torch.randn(rows, heads, 2 * layout.width)[..., ::2].to(dtype)
    weights = torch.randn(heads, rows).t()
    count, kind = -(-keys // PAGE_KEYS), torch.float32 if layout.encoding == "f32" else torch.bfloat16
    pages = torch.full((count + 1, PAGE_KEYS, layout.key_bytes // kind.itemsize), float("nan"), dtype=kind)
    addresses = torch.tensor([pages[count - page].data_ptr() for page in range(count)])  # backwards in memory
    for page in range(count):
        here = min(PAGE_KEYS, keys - page * PAGE_KEYS)
        pages[count - page, :here, : layout.width] = torch.randn(here, layout.width).to(kind)
    told = [torch.full((rows, (count + 1) * PAGE_KEYS), 7.0) for _ in range(3)]
    reference.index_scores(query, weights, addresses, keys, layout, told[0])
    index_scores(query, weights, addresses, keys, layout, told[1])
    company.near(f"{rows} rows, {keys} keys", told[1][:, :keys], told[0][:, :keys], 1e-5)
    assert bool((told[1][:, count * PAGE_KEYS :] == 7.0).all())
    with interpreted.programs_backwards():
        bulk.index_scores(query[:2], weights[:2], addresses, keys, layout, told[2][:2])
    interpreted.same("two rows of them", told[2][:2, :keys], told[1][:2, :keys])


def a_nan_query_stays_alone() -> None:
    """A query of NaN gives NaN scores to its own row only; a NaN head weight too."""
    layout = KeyLayout("bf16", 16)
    page = torch.randn(1, PAGE_KEYS, 16).bfloat16()
    query, weights = torch.randn(18, 2, 16).bfloat16(), torch.randn(18, 2)
    query[3], weights[9] = float("nan"), float("nan")
    out = torch.zeros(18, PAGE_KEYS)
    index_scores(query, weights, torch.tensor([page.data_ptr()]), PAGE_KEYS, layout, out)
    broken = out.isnan()
    assert bool(broken[[3, 9]].all())
    broken[[3, 9]] = False
    assert not bool(broken.any())


def main() -> None:
    scores_agree(17, 1, 3, KeyLayout("bf16", 40), torch.bfloat16)
    scores_agree(19, 130, 5, KeyLayout("bf16", 12), torch.float32)
    if interpreted.WHOLE:
        scores_agree(64, 1025, 16, KeyLayout("bf16", 16), torch.bfloat16)
        scores_agree(17, 1023, 2, KeyLayout("f32", 6), torch.float32)
    a_nan_query_stays_alone()


if __name__ == "__main__":
    main()
