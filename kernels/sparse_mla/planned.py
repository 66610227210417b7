"""Attention by a round's plan: every pick is read where it lies, hot slot, miss scratch, ring or RAM, and no compact copy is made.

The programs of the first block of heads copy what the plan keeps into the hot slots, when they have attended.

Invariants:
1. The bits are those of `sparse_mla_packed` over gathered rows: the same tiles, the same sums.
2. Slots that a round fills are read by nobody in it, so copying and attending of different programs need no order.
3. A row is live as in `kernels/gather`; a pick without an address is unused.

Bytes: a gather's copy is not written and not read again: 2.6 MiB a row and layer of 2,048 picks. On an H200 this was not yet faster than
the gather (docs/performance.md), with copying in programs of their own; a step still gathers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gather.kernel import copied_rows
from kernels.layout import GroupField, RowLayout, TableField, TableLayout
from kernels.round.plan import RoundPlan
from kernels.sparse_mla.kernel import HIP_TILE_HEADS, TILE_HEADS, attend_split, merge_splits, partial_sums, shapes_of

__all__ = ["sparse_mla_round"]

ROWS = tl.constexpr(TableField.ROWS)
SLOTS = tl.constexpr(GroupField.SLOTS)
SLOTS_MAX = tl.constexpr(GroupField.SLOTS_MAX)
BYTE = tl.constexpr(tl.pointer_type(tl.uint8))


@triton.jit
def _planned(selection, slot, miss, source, scratch, scratch_rows, hot, live, offset_bytes, at_pick, inside, ROW_BYTES: tl.constexpr,
             PREFETCHED: tl.constexpr):  # fmt: skip
    """Where picks of one row are read from; 0 where they are not."""
    chosen = tl.load(selection + at_pick, mask=inside, other=-1) >= 0
    from_slot = tl.load(slot + at_pick, mask=inside, other=-1)
    address = tl.load(source + at_pick, mask=inside, other=0)
    address = tl.where(address != 0, address + offset_bytes, 0)
    if PREFETCHED:
        number = tl.load(miss + at_pick, mask=inside, other=-1)
        brought = (number >= 0) & (number < scratch_rows)
        address = tl.where(brought, scratch.to(tl.int64) + number.to(tl.int64) * ROW_BYTES, address)
    address = tl.where(from_slot >= 0, hot + from_slot.to(tl.int64) * ROW_BYTES, address)
    return tl.where(chosen & live, address, 0)


@triton.jit(do_not_specialize=["layer_in_group"])
def _attend_round(query_latent, query_rope, selection, slot, fill, miss, source, table, place_of, scratch, sums, weights, ql_row, ql_head,
                  ql_value, qr_row, qr_head, qr_value, scratch_rows, first_field, layer_in_group, offset_bytes, FIELDS: tl.constexpr,
                  ROW_BYTES: tl.constexpr, PREFETCHED: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, SCALE: tl.constexpr,
                  HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, ROPE_OFFSET: tl.constexpr,
                  PICKS: tl.constexpr, SPLITS: tl.constexpr, ENCODING: tl.constexpr, TILE_P: tl.constexpr,
                  TILE_H: tl.constexpr, HELD: tl.constexpr):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    place = tl.load(place_of + row).to(tl.int64)
    fields = table + tl.maximum(place, 0) * FIELDS
    live = (place >= 0) & (tl.load(fields + ROWS) > 0)
    hot = tl.load(fields + first_field + SLOTS)
    hot += layer_in_group * tl.load(fields + first_field + SLOTS_MAX) * ROW_BYTES
    pick = split * TILE_P + tl.arange(0, TILE_P)
    address = _planned(selection, slot, miss, source, scratch, scratch_rows, hot, live, offset_bytes, row * PICKS + pick, pick < PICKS,
                       ROW_BYTES, PREFETCHED)  # fmt: skip
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    at_latent = tl.multiple_of(address.to(BYTE), 16)
    attend_split(query_latent, query_rope, row, split, head, head < HEADS, at_latent, at_latent + ROPE_OFFSET, address != 0, sums, weights,
                 ql_row, ql_head, ql_value, qr_row, qr_head, qr_value, SCALE, HEADS, LATENT, ROPE, ROPE_BLOCK, SPLITS, ENCODING,
                 HELD)  # fmt: skip
    to_slot = tl.load(fill + row * PICKS + pick, mask=(pick < PICKS) & (tl.program_id(1) == 0), other=-1)
    kept = (to_slot >= 0) & (address != 0)
    if tl.sum(kept.to(tl.int32)) > 0:
        to = tl.where(kept, hot + to_slot.to(tl.int64) * ROW_BYTES, 0)
        copied_rows(tl.where(kept, address, 0), to, WORDS, PADDED)


def sparse_mla_round(
    query_latent: Tensor, query_rope: Tensor, plan: RoundPlan, table: Tensor, table_layout: TableLayout, place_of: Tensor, group: int,
    layer_in_group: int, offset_bytes: int, layout: RowLayout, scale: float, scratch: Tensor | None,
) -> Tensor:  # fmt: skip
    """See the package page. Two launches; capturable."""
    rows, heads, width = query_latent.shape
    picks = plan.picks
    out = torch.empty((rows, heads, width), dtype=query_latent.dtype, device=query_latent.device)
    if picks == 0 or rows == 0:
        return out.zero_()
    brought = scratch if scratch is not None and scratch.shape[0] > 0 else None
    shapes = shapes_of(out.dtype, heads, layout, picks, scale)
    sums, weights = partial_sums(rows, heads, width, picks, out.device)
    words = layout.row_bytes // 4
    _attend_round[(shapes["SPLITS"], triton.cdiv(heads, shapes["TILE_H"]), rows)](
        query_latent, query_rope, plan.selection, plan.slot, plan.fill, plan.miss, plan.source, table, place_of,
        plan.selection if brought is None else brought, sums, weights, *query_latent.stride(), *query_rope.stride(),
        0 if brought is None else brought.shape[0], table_layout.group(group, 0), layer_in_group, offset_bytes, FIELDS=table.shape[1],
        ROW_BYTES=layout.row_bytes, PREFETCHED=brought is not None, WORDS=words, PADDED=triton.next_power_of_2(words),
        ROPE_OFFSET=layout.rope_offset, **shapes,
    )  # fmt: skip
    merge_splits(sums, weights, out)
    return out


def _case(prefetched: bool) -> dict[str, object]:
    layout = RowLayout("q8g64", 512, 64)
    return shapes_of(torch.bfloat16, 64, layout, 2048, 0.0625) | {
        "query_latent": "*bf16", "query_rope": "*bf16", "selection": "*i32", "slot": "*i32", "fill": "*i32", "miss": "*i32",
        "source": "*i64", "table": "*i64", "place_of": "*i32", "scratch": "*u8", "sums": "*fp32", "weights": "*fp32", "ql_row": 32768,
        "ql_head": 512, "ql_value": 1, "qr_row": 4096, "qr_head": 64, "qr_value": 1, "scratch_rows": "i32", "first_field": "i32",
        "layer_in_group": "i32", "offset_bytes": "i32", "FIELDS": TableLayout(22).fields, "ROW_BYTES": layout.row_bytes,
        "PREFETCHED": prefetched, "WORDS": layout.row_bytes // 4, "PADDED": 256, "ROPE_OFFSET": layout.rope_offset,
        "TILE_H": {"cuda": TILE_HEADS, "hip": HIP_TILE_HEADS}, "HELD": {"cuda": True, "hip": False},
    }  # fmt: skip


COMPILE = [(_attend_round, _case(False)), (_attend_round, _case(True))]
