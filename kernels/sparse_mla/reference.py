"""Absorbed MLA over the selected rows, one query row at a time over exactly k picks. Knows no positions' meaning.

Invariants:
1. Every query row runs the same shapes, [heads, latent] by [k, latent], however few of its picks are used.
2. Unused picks are masked before the softmax, and their latents zeroed (0 times NaN is NaN): what memory holds there never shows.
3. Operands are copied to aligned scratch first, so where a row lies changes no bit.
"""

import torch
from torch import Tensor

from kernels.address import rows_at
from kernels.gather import reference as gather_reference
from kernels.layout import RowLayout, TableLayout
from kernels.place import live_rows
from kernels.quantize.reference import unpack_rows
from kernels.round.plan import RoundPlan
from kernels.tile import empty_tiles

__all__ = ["sparse_mla", "sparse_mla_addresses", "sparse_mla_indexed", "sparse_mla_packed", "sparse_mla_round"]


def sparse_mla(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """Attend to gathered rows: pick p of row t lies at [t, p]; see the package page."""
    rows, picks = selection.shape
    place = torch.arange(rows * picks).view(rows, picks)
    places = torch.where(selection >= 0, place, -1)
    return _attend(query_latent, query_rope, latent.reshape(rows * picks, -1), rope.reshape(rows * picks, -1), places, scale)


def sparse_mla_indexed(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """Attend to rows of one history, read by position; see the package page."""
    return _attend(query_latent, query_rope, latent, rope, selection.long(), scale)


def sparse_mla_packed(query_latent: Tensor, query_rope: Tensor, rows: Tensor, selection: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """Unpack, then attend; see the package page."""
    attend = sparse_mla if rows.dim() == 3 else sparse_mla_indexed
    return attend(query_latent, query_rope, *unpack_rows(rows, layout), selection, scale)


def sparse_mla_addresses(
    query_latent: Tensor, query_rope: Tensor, addresses: Tensor, layout: RowLayout, scale: float, offset_bytes: int
) -> Tensor:
    """Copy rows from their addresses, then attend; see the package page."""
    rows = torch.zeros((*addresses.shape, layout.row_bytes), dtype=torch.uint8)
    used = addresses != 0
    rows[used] = rows_at(addresses[used] + offset_bytes, layout.row_bytes)
    selection = torch.where(used, 0, -1)
    return sparse_mla_packed(query_latent, query_rope, rows, selection, layout, scale)


def sparse_mla_round(
    query_latent: Tensor, query_rope: Tensor, plan: RoundPlan, table: Tensor, table_layout: TableLayout, place_of: Tensor, group: int,
    layer_in_group: int, offset_bytes: int, layout: RowLayout, scale: float, scratch: Tensor | None,
) -> Tensor:  # fmt: skip
    """Gather, then attend; see the package page."""
    rows = torch.empty((plan.rows, plan.picks, layout.row_bytes), dtype=torch.uint8)
    row_bytes = layout.row_bytes
    gather_reference.gather_round(plan, table, table_layout, place_of, group, layer_in_group, offset_bytes, row_bytes, rows, scratch)
    _, live = live_rows(table, place_of)
    selection = torch.where(live[:, None], plan.selection, -1)
    return sparse_mla_packed(query_latent, query_rope, rows, selection, layout, scale)


def _attend(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, places: Tensor, scale: float) -> Tensor:
    """The one loop behind both. `places` [rows, k] int64 indexes `latent` and `rope`; -1: unused."""
    rows, heads, width = query_latent.shape
    picks = places.shape[1]
    out = torch.zeros((rows, heads, width))
    one_latent = empty_tiles((heads, width), torch.float32)
    one_rope = empty_tiles((heads, query_rope.shape[2]), torch.float32)
    picked_latent = torch.empty((picks, width))
    picked_rope = torch.empty((picks, query_rope.shape[2]))
    logits = torch.empty((heads, picks))
    unused = places < 0
    used = (picks - unused.sum(1)).tolist()
    readable = places.clamp_min(0)
    for row in range(rows):
        if used[row] == 0:
            continue
        torch.index_select(latent, 0, readable[row], out=picked_latent)
        torch.index_select(rope, 0, readable[row], out=picked_rope)
        if used[row] < picks:
            picked_latent.masked_fill_(unused[row, :, None], 0.0)
        one_latent.copy_(query_latent[row])
        one_rope.copy_(query_rope[row])
        torch.mm(one_latent, picked_latent.t(), out=logits)
        logits.addmm_(one_rope, picked_rope.t())
        logits.mul_(scale)
        if used[row] < picks:
            logits.masked_fill_(unused[row], float("-inf"))
        torch.softmax(logits, 1, out=logits)
        torch.mm(logits, picked_latent, out=out[row])
    return out.to(query_latent.dtype)
