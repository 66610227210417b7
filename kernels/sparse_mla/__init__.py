"""Absorbed latent attention over a selection: queries against latent and rotary key, result in latent space.

Row-invariant: see `kernels`. `sparse_mla` reads rows that a gather brought; `sparse_mla_indexed` reads a history laid out by position,
for appends, and gives the same bits. `sparse_mla_packed` and `sparse_mla_addresses` do the same over packed rows, in a compact buffer or
wherever each lies, which a device dequantises in registers; `sparse_mla_round` finds them by a round's plan. More than BULK_ROWS query
rows over one history are an append's (`bulk.py`). Refused: a smaller k while the history is short (a product's shape would follow the
length), and a batched product over rows (its shape would follow their number).
"""

import torch
from torch import Tensor

from kernels.layout import RowLayout, TableLayout
from kernels.place import BULK_ROWS, on_cpu
from kernels.round.plan import RoundPlan
from kernels.sparse_mla import reference

__all__ = ["sparse_mla", "sparse_mla_addresses", "sparse_mla_indexed", "sparse_mla_packed", "sparse_mla_round"]


def sparse_mla(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """Attend to gathered rows. Softmax in float32.

    query_latent  [rows, heads, latent]  float    absorbed with the key half of kv_b; any strides
    query_rope    [rows, heads, rope]    float    rotated; any strides
    latent        [rows, k, latent]      float32  row of each pick
    rope          [rows, k, rope]        float32  rotated key of each pick
    selection     [rows, k]              int32    positions; -1: unused, contributes nothing whatever its row holds
    returns       [rows, heads, latent]  query's dtype  zeros for a row with no picks
    Args: scale: the softmax scale, from the query's width before absorption.
    """
    _check(query_latent, query_rope, latent, rope, selection)
    assert latent.shape[:2] == selection.shape, f"{tuple(selection.shape)} picks, rows {tuple(latent.shape)}"
    if on_cpu("sparse_mla", query_latent):
        return reference.sparse_mla(query_latent, query_rope, latent, rope, selection, scale)
    from kernels.sparse_mla import kernel

    return kernel.sparse_mla(query_latent, query_rope, latent, rope, selection, scale)


def sparse_mla_indexed(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """Attend to rows of one history, with the bits of gathering them first.

    latent        [positions, latent]    float32  rows nobody selected are not read
    rope          [positions, rope]      float32
    All else as in `sparse_mla`; selected positions are below `positions`.
    """
    _check(query_latent, query_rope, latent, rope, selection)
    assert latent.dim() == 2, f"a history is [positions, latent], not {tuple(latent.shape)}"
    if on_cpu("sparse_mla_indexed", query_latent):
        return reference.sparse_mla_indexed(query_latent, query_rope, latent, rope, selection, scale)
    if query_latent.shape[0] > BULK_ROWS:
        from kernels.sparse_mla import bulk

        return bulk.sparse_mla_indexed(query_latent, query_rope, latent, rope, selection, scale)
    from kernels.sparse_mla import kernel

    return kernel.sparse_mla_indexed(query_latent, query_rope, latent, rope, selection, scale)


def sparse_mla_packed(query_latent: Tensor, query_rope: Tensor, rows: Tensor, selection: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """Attend to packed rows, with the values that `unpack_rows` gives them.

    rows       [rows, k, row_bytes]      uint8  gathered: the row of each pick
            or [positions, row_bytes]    uint8  a history by position
    All else as in `sparse_mla`; an unused pick's bytes may be anything.
    """
    _check_packed(query_latent, query_rope, layout)
    assert rows.shape[-1] == layout.row_bytes, f"rows of {rows.shape[-1]} bytes, not {layout.row_bytes}"
    assert rows.is_contiguous(), "rows are not contiguous"
    assert rows.dim() == 2 or rows.shape[:2] == selection.shape, f"{tuple(selection.shape)} picks, rows {tuple(rows.shape)}"
    if on_cpu("sparse_mla_packed", query_latent):
        return reference.sparse_mla_packed(query_latent, query_rope, rows, selection, layout, scale)
    if query_latent.shape[0] > BULK_ROWS:
        from kernels.sparse_mla import bulk

        return bulk.sparse_mla_packed(query_latent, query_rope, rows, selection, layout, scale)
    from kernels.sparse_mla import kernel

    return kernel.sparse_mla_packed(query_latent, query_rope, rows, selection, layout, scale)


def sparse_mla_addresses(
    query_latent: Tensor, query_rope: Tensor, addresses: Tensor, layout: RowLayout, scale: float, offset_bytes: int = 0
) -> Tensor:
    """Attend to packed rows where they lie: hot slot, ring, or registered RAM.

    addresses     [rows, k]  int64  of each pick's packed row less `offset_bytes`, multiples of 16; 0: unused
    offset_bytes             a multiple of 16: distance from layer 0 to this layer when addresses are those of layer 0
    All else as in `sparse_mla`.
    """
    _check_packed(query_latent, query_rope, layout)
    if on_cpu("sparse_mla_addresses", query_latent):
        return reference.sparse_mla_addresses(query_latent, query_rope, addresses, layout, scale, offset_bytes)
    from kernels.sparse_mla import kernel

    return kernel.sparse_mla_addresses(query_latent, query_rope, addresses, layout, scale, offset_bytes)


def sparse_mla_round(
    query_latent: Tensor,
    query_rope: Tensor,
    plan: RoundPlan,
    table: Tensor,
    table_layout: TableLayout,
    place_of: Tensor,
    group: int,
    layer_in_group: int,
    offset_bytes: int,
    layout: RowLayout,
    scale: float,
    scratch: Tensor | None,
) -> Tensor:
    """Attend to one layer's rows as a plan finds them, and fill the hot slots it assigned: `gather_round` and `sparse_mla_packed` in one.

    The bits are theirs. On a device no compact copy is made, and a selected pick that has no address is unused.
    plan, table, table_layout, place_of, group, layer_in_group, offset_bytes, scratch: as in `kernels.gather.gather_round`.
    query_latent, query_rope, scale, the result: as in `sparse_mla`, a row each of the plan's.
    """
    _check_packed(query_latent, query_rope, layout)
    assert query_latent.shape[0] == plan.rows, f"{query_latent.shape[0]} queries for a plan of {plan.rows} rows"
    if on_cpu("sparse_mla_round", query_latent):
        return reference.sparse_mla_round(
            query_latent, query_rope, plan, table, table_layout, place_of, group, layer_in_group, offset_bytes, layout, scale, scratch
        )
    from kernels.sparse_mla import planned

    return planned.sparse_mla_round(
        query_latent, query_rope, plan, table, table_layout, place_of, group, layer_in_group, offset_bytes, layout, scale, scratch
    )


def _check_packed(query_latent: Tensor, query_rope: Tensor, layout: RowLayout) -> None:
    assert query_latent.shape[2] == layout.latent, f"queries are {query_latent.shape[2]} wide, rows {layout.latent}"
    assert query_rope.shape[2] == layout.rope, f"rotary queries are {query_rope.shape[2]} wide, keys {layout.rope}"


def _check(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor) -> None:
    assert latent.dtype == rope.dtype == torch.float32, f"rows are {latent.dtype} and {rope.dtype}"
    assert query_latent.shape[2] == latent.shape[-1], f"queries are {query_latent.shape[2]} wide, rows {latent.shape[-1]}"
    assert query_rope.shape[2] == rope.shape[-1], f"rotary queries are {query_rope.shape[2]} wide, keys {rope.shape[-1]}"
    assert query_latent.shape[0] == selection.shape[0], f"{query_latent.shape[0]} queries, {selection.shape[0]} selections"
