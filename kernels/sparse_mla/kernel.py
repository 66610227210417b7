"""Sparse MLA on a device: attention over the selected rows as they are stored, dequantised in registers.

A program takes a block of heads and a split of a query row's picks and leaves an unnormalised sum, its largest logit and its weight; a
second launch merges the splits. Rows are read from a compact buffer, from a history by position, by address wherever each lies, or by a
round's plan: one body.

Invariants:
1. Splits follow from k alone and are merged in one sum of a fixed shape; a row's result does not depend on the number of rows.
2. An unused pick's row is never read. A used row that holds NaN makes its query row NaN.
3. Products are exact (see `kernels/linear/kernel.py`): int8 and bf16 latents go through the matrix units unrounded, a group's scale is
   applied to the logits before the softmax and to the probabilities after it. Probabilities are three bf16 terms under float32 queries and
   two, 16 bits, under bf16 ones.
4. A split's latents are loaded at once and stay in registers, as stored, for both products (HELD): one chain of address, row, two products.
   AMD's compiler spills them by the thousand, so there they are loaded group by group, twice.

Instructions, not bytes, are what a row costs: int8 to bf16, scales, and the terms of the probabilities. With 64 heads a program does the
first once. On an H200, one and 16 rows: 20 and 82 us; splits of 32 picks 16 and 111, of 128 27 and 56 (fewer sums to write, fewer programs
for one row); a scale group a warp, products in three dimensions, 30 and 234.
Bytes at k 2,048 of 656-byte rows: 1.3 MiB, and the sums: 4 MiB written and read at 32 splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import SCALE_GROUP, RowLayout
from kernels.linear.kernel import dot_exact

__all__ = [
    "HIP_TILE_HEADS", "TILE_HEADS", "attend_split", "merge_splits", "partial_sums", "shapes_of", "sparse_mla", "sparse_mla_addresses",
    "sparse_mla_indexed", "sparse_mla_packed",
]  # fmt: skip

SPLIT_PICKS = 64  # picks of one program
TILE_HEADS = 64  # heads of one program, where there are so many
HIP_TILE_HEADS = 16  # AMD's registers hold no more
WARPS = 4
HELD = 1  # whether bf16 queries keep a split's rows in registers
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
def _latents(at_latent, used, group, LATENT: tl.constexpr, ENCODING: tl.constexpr):
    """A scale group of the picked rows' values as stored, [picks, 64], and each pick's scale."""
    value = group * GROUP + tl.arange(0, GROUP)
    mask = used[:, None]
    if LATENT // GROUP * GROUP != LATENT:
        mask = mask & (value < LATENT)[None, :]
    scale = tl.full([at_latent.shape[0]], 1.0, tl.float32)
    if ENCODING == Q8G64:
        stored = tl.load(at_latent.to(INT8)[:, None] + value[None, :], mask=mask, other=0)
        scale = tl.load((at_latent + (LATENT + LATENT % 2)).to(HALF) + group, mask=used, other=0.0).to(tl.float32)
    elif ENCODING == BF16:
        stored = tl.load(at_latent.to(BRAIN)[:, None] + value[None, :], mask=mask, other=0.0)
    else:
        stored = tl.load(at_latent.to(FLOAT)[:, None] + value[None, :], mask=mask, other=0.0)
    return stored, scale


@triton.jit
def _multiplied(stored):
    """Stored latents as they multiply: int8 as bf16, which is exact."""
    return stored.to(tl.float32).to(tl.bfloat16) if stored.dtype == tl.int8 else stored


@triton.jit
def _rope_logits(from_query, known, at_rope, used, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, ENCODING: tl.constexpr):
    """What the rotary keys add to the logits, [heads, picks]; `from_query` [heads, rope]."""
    value = tl.arange(0, ROPE_BLOCK)
    query = tl.load(from_query, mask=known[:, None] & (value < ROPE)[None, :], other=0.0)
    mask = used[:, None] & (value < ROPE)[None, :]
    if ENCODING == F32:
        key = tl.load(at_rope.to(FLOAT)[:, None] + value[None, :], mask=mask, other=0.0)
    else:
        key = tl.load(at_rope.to(BRAIN)[:, None] + value[None, :], mask=mask, other=0.0)
    return dot_exact(query, tl.trans(key), tl.zeros([known.shape[0], at_rope.shape[0]], tl.float32))


@triton.jit
def _group_logits(from_query, ql_value, known, stored, scale, group, LATENT: tl.constexpr):
    """What one scale group adds to the logits; `from_query` [heads]."""
    value = group * GROUP + tl.arange(0, GROUP)
    query = tl.load(from_query[:, None] + (value * ql_value)[None, :], mask=known[:, None] & (value < LATENT)[None, :], other=0.0)
    return dot_exact(query, tl.trans(_multiplied(stored)), tl.zeros([known.shape[0], scale.shape[0]], tl.float32)) * scale[None, :]


@triton.jit
def _weights(logits, used, SCALE: tl.constexpr):
    """Each head's largest logit, and the picks' weights relative to it."""
    scaled = tl.where(used[None, :], logits * SCALE, float("-inf"))
    largest = tl.max(scaled, 1)
    return largest, tl.exp(scaled - tl.where(largest == float("-inf"), 0.0, largest)[:, None])


@triton.jit
def _store_group(to_sums, known, weight, stored, scale, group, LATENT: tl.constexpr, TERMS: tl.constexpr):
    """One scale group's part of a split's sum; `to_sums` [heads]."""
    part = dot_exact(weight * scale[None, :], _multiplied(stored), tl.zeros([known.shape[0], GROUP], tl.float32), TERMS)
    value = group * GROUP + tl.arange(0, GROUP)
    tl.store(to_sums[:, None] + value[None, :], part, mask=known[:, None] & (value < LATENT)[None, :])


@triton.jit
def attend_split(query_latent, query_rope, row, split, head, known, at_latent, at_rope, used, sums, weights, ql_row, ql_head, ql_value,
                 qr_row, qr_head, qr_value, SCALE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
                 ROPE_BLOCK: tl.constexpr, SPLITS: tl.constexpr, ENCODING: tl.constexpr, HELD: tl.constexpr):  # fmt: skip
    """A block of heads over one split's picks: its largest logit and weight to `weights`, its sum, unless no pick is used, to `sums`."""
    TILE_H: tl.constexpr = head.shape[0]
    groups: tl.constexpr = (LATENT + GROUP - 1) // GROUP
    terms: tl.constexpr = 2 if query_latent.dtype.element_ty == tl.bfloat16 else 3
    to_weight = weights + ((row * HEADS + head) * SPLITS + split) * 2
    if tl.sum(used.to(tl.int32)) == 0:
        tl.store(to_weight, tl.full([TILE_H], float("-inf"), tl.float32), mask=known)
        tl.store(to_weight + 1, tl.zeros([TILE_H], tl.float32), mask=known)
    else:
        turned = tl.arange(0, ROPE_BLOCK)
        from_query = query_rope + row * qr_row + (head * qr_head)[:, None] + (turned * qr_value)[None, :]
        logits = _rope_logits(from_query, known, at_rope, used, ROPE, ROPE_BLOCK, ENCODING)
        from_query = query_latent + row * ql_row + head * ql_head
        to_sums = sums + ((row * SPLITS + split) * HEADS + head) * LATENT
        if HELD:
            held = ()
            for group in tl.static_range(groups):
                stored, scale = _latents(at_latent, used, group, LATENT, ENCODING)
                logits += _group_logits(from_query, ql_value, known, stored, scale, group, LATENT)
                held = held + (stored, scale)  # type: ignore[assignment]  # noqa: RUF005  # Triton compiles no star
            largest, weight = _weights(logits, used, SCALE)
            for group in tl.static_range(groups):
                _store_group(to_sums, known, weight, held[2 * group], held[2 * group + 1], group, LATENT, terms)
        else:
            for group in range(groups):
                stored, scale = _latents(at_latent, used, group, LATENT, ENCODING)
                logits += _group_logits(from_query, ql_value, known, stored, scale, group, LATENT)
            largest, weight = _weights(logits, used, SCALE)
            for group in range(groups):
                stored, scale = _latents(at_latent, used, group, LATENT, ENCODING)
                _store_group(to_sums, known, weight, stored, scale, group, LATENT, terms)
        tl.store(to_weight, largest, mask=known)
        tl.store(to_weight + 1, tl.sum(weight, 1), mask=known)


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
            ROPE_BLOCK: tl.constexpr, ROPE_OFFSET: tl.constexpr, PICKS: tl.constexpr, SPLITS: tl.constexpr, ENCODING: tl.constexpr,
            FORM: tl.constexpr, TILE_P: tl.constexpr, TILE_H: tl.constexpr, HELD: tl.constexpr):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    pick = split * TILE_P + tl.arange(0, TILE_P)
    used, at_latent, at_rope = _picked(latent, rope, selection, row, pick, latent_bytes, rope_bytes, PICKS, FORM, ROPE_OFFSET)
    attend_split(query_latent, query_rope, row, split, head, head < HEADS, at_latent, at_rope, used, sums, weights, ql_row, ql_head,
                 ql_value, qr_row, qr_head, qr_value, SCALE, HEADS, LATENT, ROPE, ROPE_BLOCK, SPLITS, ENCODING, HELD)  # fmt: skip


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
    used = (total != 0.0)[:, None] & (value < LATENT)[None, :]  # sums of a split without picks were not written
    parts = tl.load(sums + ((row * SPLITS + split) * HEADS + head)[:, None] * LATENT + value[None, :], mask=used, other=0.0)
    whole = tl.sum(total * share, 0)
    attended = tl.sum(parts * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + (row * HEADS + head) * LATENT + value, attended.to(out.dtype.element_ty), mask=value < LATENT)


def shapes_of(dtype: torch.dtype, heads: int, layout: RowLayout, picks: int, scale: float) -> dict[str, int | float]:
    """Launch constants of both attending kernels."""
    return {
        "SCALE": scale, "HEADS": heads, "LATENT": layout.latent, "ROPE": layout.rope,
        "ROPE_BLOCK": max(16, triton.next_power_of_2(layout.rope)), "PICKS": picks, "SPLITS": triton.cdiv(picks, SPLIT_PICKS),
        "ENCODING": _ENCODINGS[layout.encoding], "TILE_P": SPLIT_PICKS, "num_warps": WARPS,
        "HELD": bool(HELD and dtype == torch.bfloat16 and not torch.version.hip),
        "TILE_H": min(HIP_TILE_HEADS if torch.version.hip else TILE_HEADS, max(16, triton.next_power_of_2(heads))),
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
    shapes = shapes_of(out.dtype, heads, layout, picks, scale)
    for start in range(0, rows, _BAND_ROWS):
        count = min(_BAND_ROWS, rows - start)
        ql, qr = query_latent[start:], query_rope[start:]
        sums, weights = partial_sums(count, heads, width, picks, out.device)
        skipped = start * picks if compact else 0
        _attend[(shapes["SPLITS"], triton.cdiv(heads, shapes["TILE_H"]), count)](
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
    return shapes_of(torch.bfloat16, 64, layout, 2048, 0.0625) | {
        "query_latent": query, "query_rope": query, "latent": "*u8", "rope": "*u8", "selection": "*i64" if form == 2 else "*i32",
        "sums": "*fp32", "weights": "*fp32", "ql_row": 32768, "ql_head": 512, "ql_value": 1, "qr_row": 4096, "qr_head": 64, "qr_value": 1,
        "latent_bytes": layout.row_bytes, "rope_bytes": layout.row_bytes, "ROPE_OFFSET": layout.rope_offset, "FORM": form,
        "TILE_H": {"cuda": TILE_HEADS, "hip": HIP_TILE_HEADS}, "HELD": {"cuda": query == "*bf16", "hip": False},
    }  # fmt: skip


COMPILE = [
    (_attend, _case("q8g64", COMPACT.value)),
    (_attend, _case("q8g64", ADDRESSED.value)),
    (_attend, _case("bf16", INDEXED.value)),
    (_attend, _case("q8g64", COMPACT.value, "*fp32")),
    (_merge, {"sums": "*fp32", "weights": "*fp32", "out": "*bf16", "HEADS": 64, "LATENT": 512, "SPLITS": 16, "SPLITS_BLOCK": 16,
              "BLOCK": _MERGE_BLOCK, "num_warps": 4}),
]  # fmt: skip
