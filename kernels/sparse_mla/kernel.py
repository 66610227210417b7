"""Sparse MLA on a device: attention over the selected rows as they are stored, dequantised in registers.

A program takes 16 heads and a split of a query row's picks and leaves an unnormalised sum, its largest logit and its weight; a second
launch merges the splits. Rows are read from a compact buffer, from a history by position, by address wherever each lies, or by a round's
plan: one body.

Invariants:
1. Splits follow from k alone and are merged in one sum of a fixed shape; a row's result does not depend on the number of rows.
2. An unused pick's row is never read. A used row that holds NaN makes its query row NaN.
3. Products are exact (see `kernels/linear/kernel.py`): int8 and bf16 latents go through the matrix units unrounded, a group's scale is
   applied to the logits before the softmax and to the probabilities after it, and probabilities are three bf16 terms.
4. All of a tile's latents are loaded at once and stay in registers for both products, a scale group a warp: one chain of address, row, two
   products. Read group by group, each in turn waits for its load.
5. By a plan: no slot that a round fills is read in it, and the first block of heads alone fills; what a fill reads is not written here.

Bytes at k 2,048 of 656-byte rows: 1.3 MiB, read once a block of heads from L2, and the sums: 2 MiB written and read at 16 splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import SCALE_GROUP, RowLayout
from kernels.linear.kernel import dot_exact

__all__ = [
    "GROUP",
    "TILE_HEADS",
    "attend_tile",
    "leave_split",
    "merge_splits",
    "partial_sums",
    "queries_of",
    "shapes_of",
    "sparse_mla",
    "sparse_mla_addresses",
    "sparse_mla_indexed",
    "sparse_mla_packed",
]

SPLIT_PICKS = 128  # picks of one program
TILE_PICKS = 64  # of them at a time
TILE_HEADS = 16
WARPS = 8  # one a scale group of 512 latents
_MERGE_BLOCK = 128
_BAND_ROWS = 32  # rows a launch, so that sums of an append stay within 128 MiB
BYTE = tl.constexpr(tl.pointer_type(tl.uint8))
INT8 = tl.constexpr(tl.pointer_type(tl.int8))
HALF = tl.constexpr(tl.pointer_type(tl.float16))
BRAIN = tl.constexpr(tl.pointer_type(tl.bfloat16))
FLOAT = tl.constexpr(tl.pointer_type(tl.float32))
GROUP = tl.constexpr(SCALE_GROUP)
COMPACT, INDEXED, ADDRESSED = (tl.constexpr(form) for form in range(3))
Q8G64, BF16, F32 = (tl.constexpr(encoding) for encoding in range(3))
_ENCODINGS = {"q8g64": Q8G64.value, "bf16": BF16.value, "f32": F32.value}


@triton.jit
def _latents(at_latent, used, GROUPS: tl.constexpr, LATENT: tl.constexpr, ENCODING: tl.constexpr):
    """The picked rows' values by scale group, [groups, picks, 64], as they multiply, and each pick's scales [groups, picks]."""
    group = tl.arange(0, GROUPS)
    value = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = used[None, :, None] & (value < LATENT)[:, None, :]
    scale = tl.full([GROUPS, at_latent.shape[0]], 1.0, tl.float32)
    if ENCODING == Q8G64:
        stored = tl.load(at_latent.to(INT8)[None, :, None] + value[:, None, :], mask=mask, other=0).to(tl.float32).to(tl.bfloat16)
        from_scale = (at_latent + (LATENT + LATENT % 2)).to(HALF)[None, :] + group[:, None]
        scale = tl.load(from_scale, mask=used[None, :] & (group * GROUP < LATENT)[:, None], other=0.0).to(tl.float32)
    elif ENCODING == BF16:
        stored = tl.load(at_latent.to(BRAIN)[None, :, None] + value[:, None, :], mask=mask, other=0.0)
    else:
        stored = tl.load(at_latent.to(FLOAT)[None, :, None] + value[:, None, :], mask=mask, other=0.0)
    return stored, scale


@triton.jit
def _rope_logits(query, at_rope, used, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, ENCODING: tl.constexpr):
    """What the rotary keys add to the logits, [heads, picks]."""
    value = tl.arange(0, ROPE_BLOCK)
    mask = used[:, None] & (value < ROPE)[None, :]
    if ENCODING == F32:
        key = tl.load(at_rope.to(FLOAT)[:, None] + value[None, :], mask=mask, other=0.0)
    else:
        key = tl.load(at_rope.to(BRAIN)[:, None] + value[None, :], mask=mask, other=0.0)
    return dot_exact(query, tl.trans(key), tl.zeros([query.shape[0], at_rope.shape[0]], tl.float32))


@triton.jit
def queries_of(query_latent, query_rope, row, head, known, ql_row, ql_head, ql_value, qr_row, qr_head, qr_value, GROUPS: tl.constexpr,
             LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr):  # fmt: skip
    """A block of heads: latent queries by group [groups, heads, 64], rotary queries [heads, rope]."""
    value = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    from_query = query_latent + row * ql_row + (head * ql_head)[None, :, None] + (value * ql_value)[:, None, :]
    query = tl.load(from_query, mask=known[None, :, None] & (value < LATENT)[:, None, :], other=0.0)
    turned = tl.arange(0, ROPE_BLOCK)
    from_query = query_rope + row * qr_row + (head * qr_head)[:, None] + (turned * qr_value)[None, :]
    return query, tl.load(from_query, mask=known[:, None] & (turned < ROPE)[None, :], other=0.0)


@triton.jit
def attend_tile(query, query_rope, at_latent, at_rope, used, largest, total, sums, SCALE: tl.constexpr, GROUPS: tl.constexpr,
                 LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, ENCODING: tl.constexpr):  # fmt: skip
    """Add a tile of picks to the running largest logit [heads], weight [heads] and sums [groups, heads, 64]."""
    heads: tl.constexpr = query_rope.shape[0]
    picks: tl.constexpr = at_latent.shape[0]
    stored, scale = _latents(at_latent, used, GROUPS, LATENT, ENCODING)
    by_group = dot_exact(query, tl.trans(stored, 0, 2, 1), tl.zeros([GROUPS, heads, picks], tl.float32))
    logits = tl.sum(by_group * scale[:, None, :], 0) + _rope_logits(query_rope, at_rope, used, ROPE, ROPE_BLOCK, ENCODING)
    logits = tl.where(used[None, :], logits * SCALE, float("-inf"))
    most = tl.maximum(largest, tl.max(logits, 1))
    safe = tl.where(most == float("-inf"), 0.0, most)
    kept = tl.exp(largest - safe)
    weight = tl.exp(logits - safe[:, None])
    spread = tl.broadcast_to(weight[None, :, :], [GROUPS, heads, picks]) * scale[:, None, :]
    return most, total * kept + tl.sum(weight, 1), dot_exact(spread, stored, sums * kept[None, :, None])


@triton.jit
def leave_split(sums, weights, row, split, head, known, largest, total, attended, HEADS: tl.constexpr, LATENT: tl.constexpr,
           SPLITS: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """Store a split's result for `_merge`."""
    to_weight = weights + ((row * HEADS + head) * SPLITS + split) * 2
    tl.store(to_weight, largest, mask=known)
    tl.store(to_weight + 1, total, mask=known)
    value = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    to_sums = sums + (((row * SPLITS + split) * HEADS + head) * LATENT)[None, :, None] + value[:, None, :]
    tl.store(to_sums, attended, mask=known[None, :, None] & (value < LATENT)[:, None, :])


@triton.jit
def _picked(
    latent, rope, selection, row, pick, latent_bytes, rope_bytes, PICKS: tl.constexpr, FORM: tl.constexpr, ROPE_OFFSET: tl.constexpr
):
    """Which picks are used, and where their latents and their keys begin; `latent_bytes` is an address's offset, or a row's length."""
    at_pick = row * PICKS + pick
    chosen = tl.load(selection + at_pick, mask=pick < PICKS, other=0 if FORM == ADDRESSED else -1)
    if FORM == ADDRESSED:
        used = chosen != 0
        at_latent = tl.multiple_of((chosen + latent_bytes).to(BYTE), 16)
        at_rope = at_latent + ROPE_OFFSET
    else:
        used = chosen >= 0
        at = chosen.to(tl.int64) if FORM == INDEXED else at_pick
        at_latent = latent + at * latent_bytes
        at_rope = rope + at * rope_bytes + ROPE_OFFSET
    return used, at_latent, at_rope


@triton.jit
def _attend(query_latent, query_rope, latent, rope, selection, sums, weights, ql_row, ql_head, ql_value, qr_row, qr_head, qr_value,
            latent_bytes, rope_bytes, SCALE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
            GROUPS: tl.constexpr, ROPE_BLOCK: tl.constexpr, ROPE_OFFSET: tl.constexpr, PICKS: tl.constexpr, SPLITS: tl.constexpr,
            SPLIT_P: tl.constexpr, ENCODING: tl.constexpr, FORM: tl.constexpr, TILE_P: tl.constexpr, TILE_H: tl.constexpr):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    known = head < HEADS
    query, turned = queries_of(query_latent, query_rope, row, head, known, ql_row, ql_head, ql_value, qr_row, qr_head, qr_value, GROUPS,
                             LATENT, ROPE, ROPE_BLOCK)  # fmt: skip
    largest = tl.full([TILE_H], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H], tl.float32)
    attended = tl.zeros([GROUPS, TILE_H, GROUP], tl.float32)
    for start in range(0, SPLIT_P, TILE_P):
        pick = split * SPLIT_P + start + tl.arange(0, TILE_P)
        used, at_latent, at_rope = _picked(latent, rope, selection, row, pick, latent_bytes, rope_bytes, PICKS, FORM, ROPE_OFFSET)
        if tl.sum(used.to(tl.int32)) > 0:
            largest, total, attended = attend_tile(query, turned, at_latent, at_rope, used, largest, total, attended, SCALE, GROUPS,
                                                    LATENT, ROPE, ROPE_BLOCK, ENCODING)  # fmt: skip
    leave_split(sums, weights, row, split, head, known, largest, total, attended, HEADS, LATENT, SPLITS, GROUPS)


@triton.jit
def _merge(sums, weights, out, HEADS: tl.constexpr, LATENT: tl.constexpr, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_BLOCK)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    from_weight = weights + ((row * HEADS + head) * SPLITS + split) * 2
    largest = tl.load(from_weight, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(from_weight + 1, mask=split < SPLITS, other=0.0)
    most = tl.max(largest, 0)
    share = tl.exp(largest - tl.where(most == float("-inf"), 0.0, most))
    used = (split < SPLITS)[:, None] & (value < LATENT)[None, :]
    parts = tl.load(sums + ((row * SPLITS + split) * HEADS + head)[:, None] * LATENT + value[None, :], mask=used, other=0.0)
    whole = tl.sum(total * share, 0)
    attended = tl.sum(parts * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + (row * HEADS + head) * LATENT + value, attended.to(out.dtype.element_ty), mask=value < LATENT)


def shapes_of(heads: int, layout: RowLayout, picks: int, scale: float) -> dict[str, int | float]:
    """Launch constants of both attending kernels."""
    return {
        "SCALE": scale, "HEADS": heads, "LATENT": layout.latent, "ROPE": layout.rope,
        "GROUPS": triton.next_power_of_2(triton.cdiv(layout.latent, SCALE_GROUP)),
        "ROPE_BLOCK": max(16, triton.next_power_of_2(layout.rope)), "PICKS": picks, "SPLITS": triton.cdiv(picks, SPLIT_PICKS),
        "SPLIT_P": SPLIT_PICKS, "ENCODING": _ENCODINGS[layout.encoding], "TILE_P": TILE_PICKS, "TILE_H": TILE_HEADS, "num_warps": WARPS,
    }  # fmt: skip


def partial_sums(rows: int, heads: int, width: int, picks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for what splits leave: sums, and their largest logits and weights."""
    splits = triton.cdiv(picks, SPLIT_PICKS)
    sums = torch.empty((rows, splits, heads, width), dtype=torch.float32, device=device)
    return sums, torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=device)


def merge_splits(sums: Tensor, weights: Tensor, out: Tensor) -> None:
    """Merge splits into `out` [rows, heads, latent]."""
    rows, splits, heads, width = sums.shape
    _merge[(triton.cdiv(width, _MERGE_BLOCK), heads, rows)](
        sums, weights, out, HEADS=heads, LATENT=width, SPLITS=splits, SPLITS_BLOCK=triton.next_power_of_2(splits), BLOCK=_MERGE_BLOCK,
        num_warps=4,
    )  # fmt: skip


def _launch(
    query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, layout: RowLayout, scale: float,
    *, strides: tuple[int, int], rope_offset: int, form: int,
) -> Tensor:  # fmt: skip
    """`latent` and `rope` are uint8 views from whose starts picks lie `strides` bytes apart; band by band of query rows."""
    rows, heads, width = query_latent.shape
    picks = selection.shape[1]
    out = torch.empty((rows, heads, width), dtype=query_latent.dtype, device=query_latent.device)
    if picks == 0:
        return out.zero_()
    selection = selection.contiguous()
    compact = form == COMPACT.value
    shapes = shapes_of(heads, layout, picks, scale)
    for start in range(0, rows, _BAND_ROWS):
        count = min(_BAND_ROWS, rows - start)
        ql, qr = query_latent[start:], query_rope[start:]
        sums, weights = partial_sums(count, heads, width, picks, out.device)
        skipped = start * picks if compact else 0
        _attend[(shapes["SPLITS"], triton.cdiv(heads, TILE_HEADS), count)](
            ql, qr, latent.view(-1)[skipped * strides[0] :], rope.view(-1)[skipped * strides[1] :], selection[start:], sums, weights,
            *ql.stride(), *qr.stride(), *strides, ROPE_OFFSET=rope_offset, FORM=form, **shapes,
        )  # fmt: skip
        merge_splits(sums, weights, out[start:])
    return out


def _unpacked(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float, form: int) -> Tensor:
    layout = RowLayout("f32", latent.shape[-1], rope.shape[-1])
    strides = 4 * layout.latent, 4 * layout.rope
    parts = latent.contiguous().view(torch.uint8), rope.contiguous().view(torch.uint8)
    return _launch(query_latent, query_rope, *parts, selection, layout, scale, strides=strides, rope_offset=0, form=form)


def sparse_mla(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """See the package page."""
    return _unpacked(query_latent, query_rope, latent, rope, selection, scale, COMPACT.value)


def sparse_mla_indexed(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """See the package page."""
    return _unpacked(query_latent, query_rope, latent, rope, selection, scale, INDEXED.value)


def sparse_mla_packed(query_latent: Tensor, query_rope: Tensor, rows: Tensor, selection: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """See the package page."""
    strides = layout.row_bytes, layout.row_bytes
    form = COMPACT.value if rows.dim() == 3 else INDEXED.value
    return _launch(
        query_latent, query_rope, rows, rows, selection, layout, scale, strides=strides, rope_offset=layout.rope_offset, form=form
    )


def sparse_mla_addresses(
    query_latent: Tensor, query_rope: Tensor, addresses: Tensor, layout: RowLayout, scale: float, offset_bytes: int
) -> Tensor:
    """See the package page."""
    nothing = torch.empty(0, dtype=torch.uint8, device=addresses.device)
    return _launch(
        query_latent, query_rope, nothing, nothing, addresses, layout, scale, strides=(offset_bytes, 0), rope_offset=layout.rope_offset,
        form=ADDRESSED.value,
    )  # fmt: skip


def _case(encoding: str, form: int, query: str = "*bf16") -> dict[str, object]:
    layout = RowLayout(encoding, 512, 64)  # type: ignore[arg-type]
    return shapes_of(64, layout, 2048, 0.0625) | {
        "query_latent": query, "query_rope": query, "latent": "*u8", "rope": "*u8", "selection": "*i64" if form == 2 else "*i32",
        "sums": "*fp32", "weights": "*fp32", "ql_row": 32768, "ql_head": 512, "ql_value": 1, "qr_row": 4096, "qr_head": 64, "qr_value": 1,
        "latent_bytes": layout.row_bytes, "rope_bytes": layout.row_bytes, "ROPE_OFFSET": layout.rope_offset, "FORM": form,
    }  # fmt: skip


COMPILE = [
    (_attend, _case("q8g64", COMPACT.value)),
    (_attend, _case("q8g64", ADDRESSED.value)),
    (_attend, _case("bf16", INDEXED.value)),
    (_attend, _case("q8g64", COMPACT.value, "*fp32")),
    (_merge, {"sums": "*fp32", "weights": "*fp32", "out": "*bf16", "HEADS": 64, "LATENT": 512, "SPLITS": 16, "SPLITS_BLOCK": 16,
              "BLOCK": _MERGE_BLOCK, "num_warps": 4}),
]  # fmt: skip
