"""Interpreted sparse attention: the reference's own tests, then packed rows in every encoding, form and length of selection."""

import company
import interpreted
import torch

from kernels.layout import RowLayout
from kernels.quantize.reference import pack_rows, unpack_rows
from kernels.sparse_mla import kernel, reference, sparse_mla_addresses, sparse_mla_indexed, sparse_mla_packed

SCALE = 0.2


def packed_rows(layout: RowLayout, rows: int, picks: int, used: list[int]) -> tuple[torch.Tensor, ...]:
    """Queries, gathered packed rows (0xFF, NaN in every encoding, where unused) and a selection of `used` picks a row, in any place."""
    torch.manual_seed(picks)
    packed = pack_rows(torch.randn(rows * picks, layout.latent) * 3, torch.randn(rows * picks, layout.rope), layout).view(rows, picks, -1)
    selection = torch.full((rows, picks), -1, dtype=torch.int32)
    for row, count in enumerate(used):
        selection[row, torch.randperm(picks)[:count]] = 7
    packed[selection < 0] = 255
    return torch.randn(rows, 5, layout.latent), torch.randn(rows, 5, layout.rope), packed, selection


def packed_forms_agree(encoding: str, latent: int, rope: int) -> None:
    """Compact rows, addressed rows and unpacked rows agree with the reference, unused splits too; packed forms to the bit."""
    layout = RowLayout(encoding, latent, rope)  # type: ignore[arg-type]
    picks = 130
    query, query_rope, rows, selection = packed_rows(layout, 4, picks, [picks, 0, 1, 63])
    wanted = reference.sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
    got = sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
    company.near(encoding, got, wanted, 3e-5)
    assert bool((got[1] == 0).all())
    places = rows.data_ptr() + torch.arange(4 * picks).view(4, picks) * layout.row_bytes
    addresses = torch.where(selection >= 0, places, 0)
    interpreted.same("by address", sparse_mla_addresses(query, query_rope, addresses, layout, SCALE), got)
    shifted = torch.where(addresses != 0, addresses - 4096, 0)  # of a layer 4,096 bytes earlier; unused stays unused
    interpreted.same("by address and offset", sparse_mla_addresses(query, query_rope, shifted, layout, SCALE, 4096), got)
    company.near("reference by address", reference.sparse_mla_addresses(query, query_rope, shifted, layout, SCALE, 4096), wanted, 1e-6)
    by_position = torch.where(selection >= 0, torch.arange(4 * picks, dtype=torch.int32).view(4, picks), -1)
    history = rows.view(-1, layout.row_bytes)
    interpreted.same("by position", sparse_mla_packed(query, query_rope, history, by_position, layout, SCALE), got)
    company.near("unpacked", sparse_mla_indexed(query, query_rope, *unpack_rows(history, layout), by_position, SCALE), wanted, 3e-5)


def bf16_queries() -> None:
    """bf16 queries over q8g64 rows give the float64 attention of their exact values, rounded once (cut, in the interpreter)."""
    layout = RowLayout("q8g64", 70, 16)
    query, query_rope, rows, selection = packed_rows(layout, 2, 65, [65, 64])
    query, query_rope = query.bfloat16(), query_rope.bfloat16()
    wanted = reference.sparse_mla_packed(query.float(), query_rope.float(), rows, selection, layout, SCALE)
    company.near("bf16 queries", sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE), wanted, 2**-7)


def company_changes_no_bit() -> None:
    """A row has the same bits alone and in any company, across launches of a few rows each."""
    layout = RowLayout("q8g64", 24, 6)
    query, query_rope, rows, selection = packed_rows(layout, 3, 66, [66, 2, 40])
    kernel._BAND_ROWS, whole = 3, kernel._BAND_ROWS
    company.row_invariant(
        lambda p: sparse_mla_packed(query[p], query_rope[p], rows[p].contiguous(), selection[p], layout, SCALE), 3, (1, 2, 4, 8)
    )
    kernel._BAND_ROWS = whole


def a_nan_row_shows() -> None:
    """A used row whose group is NaN makes its own query row NaN, and no other."""
    layout = RowLayout("q8g64", 64, 16)
    query, query_rope, rows, selection = packed_rows(layout, 2, 3, [3, 3])
    rows[1, 2, layout.scales_offset : layout.rope_offset] = 255
    got = sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
    assert bool(got[1].isnan().all())
    assert not bool(got[0].isnan().any())


def main() -> None:
    packed_forms_agree("q8g64", 130, 16)
    if interpreted.WHOLE:
        packed_forms_agree("bf16", 33, 10)
        packed_forms_agree("f32", 64, 2)
        company_changes_no_bit()
    bf16_queries()
    a_nan_row_shows()
    interpreted.run_reference_tests("test_sparse_mla.py", without=("company", "256", "5-40", "16-33"))


if __name__ == "__main__":
    main()
