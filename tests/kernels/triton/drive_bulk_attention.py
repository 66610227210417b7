"""Interpreted attention of an append's rows: every encoding, selections around a tile's edges, holes, and rows nobody selected."""

import company
import interpreted
import torch

from kernels.layout import RowLayout
from kernels.place import BULK_ROWS
from kernels.quantize.reference import pack_rows, unpack_rows
from kernels.sparse_mla import bulk, reference, sparse_mla_packed

SCALE = 0.2


def history(layout: RowLayout, picks: int, heads: int, query_rows: int = 10) -> tuple[torch.Tensor, ...]:
    """Queries, a packed history whose unselected rows are 0xFF (NaN in every encoding), and selections of 0, 1, .. `picks` picks.

    One row in three has its picks anywhere among its places; the others have them first, then -1.
    """
    torch.manual_seed(picks)
    positions = 3 * picks + 5
    packed = pack_rows(torch.randn(positions, layout.latent) * 3, torch.randn(positions, layout.rope), layout)
    selection = torch.full((query_rows, picks), -1, dtype=torch.int32)
    for row in range(query_rows):
        used = (0, 1, picks, picks // 2, picks - 1)[row % 5]
        chosen = torch.randperm(positions - 1)[:used].sort().values.int() + 1  # position 0 is nobody's
        places = torch.randperm(picks)[:used].sort().values if row % 3 == 0 else torch.arange(used)
        selection[row, places] = chosen
    unseen = torch.ones(positions, dtype=torch.bool)
    unseen[selection[selection >= 0].long()] = False
    assert bool(unseen[0])
    packed[unseen] = 255
    return torch.randn(query_rows, heads, layout.latent), torch.randn(query_rows, heads, layout.rope), packed, selection


def encodings_agree() -> None:
    """float32 queries over every encoding, packed and unpacked: the reference to float32 rounding, zeros for a row without picks."""
    shapes = ((65, "q8g64", 8, 4, 1), (1, "f32", 64, 2, 3), (63, "q8g64", 130, 16, 5), (64, "bf16", 33, 10, 17))
    for picks, encoding, latent, rope, heads in interpreted.some(shapes, 2):
        layout = RowLayout(encoding, latent, rope)  # type: ignore[arg-type]
        query, query_rope, rows, selection = history(layout, picks, heads)
        wanted = reference.sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
        got = bulk.sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
        company.near(f"{picks} {encoding}", got, wanted, 3e-5)
        assert bool((got[(selection < 0).all(1)] == 0).all())
    got = bulk.sparse_mla_indexed(query, query_rope, *unpack_rows(rows, layout), selection, SCALE)
    company.near("unpacked", got, wanted, 3e-5)


def bf16_queries() -> None:
    """bf16 queries (cut instead of rounded, in the interpreter): near the float64 attention of their exact values."""
    for picks, encoding, latent in interpreted.some(((65, "q8g64", 70), (64, "bf16", 130)), 2):
        layout = RowLayout(encoding, latent, 16)  # type: ignore[arg-type]
        query, query_rope, rows, selection = history(layout, picks, 3)
        query, query_rope = query.bfloat16(), query_rope.bfloat16()
        wanted = reference.sparse_mla_packed(query.float(), query_rope.float(), rows, selection, layout, SCALE)
        got = bulk.sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
        assert got.dtype == torch.bfloat16
        company.near(f"bf16 over {encoding}", got, wanted, 2**-6)


def strides_and_company() -> None:
    """Strided queries, rows gathered before, any number of rows and any order of programs give a row the same bits."""
    layout = RowLayout("q8g64", 24, 6)
    query, query_rope, rows, selection = history(layout, 20, 4, BULK_ROWS + 1)
    got = sparse_mla_packed(query, query_rope, rows, selection, layout, SCALE)
    apart = torch.zeros(BULK_ROWS + 1, 4, 2 * 30)
    apart[..., 1:49:2], apart[..., 49:55] = query, query_rope
    with interpreted.programs_backwards():
        strided = sparse_mla_packed(apart[..., 1:49:2], apart[..., 49:55], rows, selection, layout, SCALE)
    interpreted.same("strided", strided, got)
    gathered = rows[selection.long().clamp_min(0)]
    gathered[selection < 0] = 255
    interpreted.same("gathered first", sparse_mla_packed(query, query_rope, gathered, selection, layout, SCALE), got)
    fewer = bulk.sparse_mla_packed(query[60:64], query_rope[60:64], rows, selection[60:64], layout, SCALE)
    interpreted.same("four rows", fewer, got[60:64])


def a_nan_row_shows() -> None:
    """A used row whose scale is NaN makes the rows that selected it NaN, and no other."""
    layout = RowLayout("q8g64", 64, 16)
    query, query_rope, rows, selection = history(layout, 5, 2)
    broken = int(selection[2, 1])
    rows[broken, layout.scales_offset : layout.rope_offset] = 255
    for dtype in (torch.float32, torch.bfloat16):
        got = bulk.sparse_mla_packed(query.to(dtype), query_rope.to(dtype), rows, selection, layout, SCALE)
        chose = (selection == broken).any(1)
        assert bool(got[chose].isnan().all())
        assert not bool(got[~chose].isnan().any())


def main() -> None:
    encodings_agree()
    bf16_queries()
    if interpreted.WHOLE:
        strides_and_company()
    a_nan_row_shows()


if __name__ == "__main__":
    main()
