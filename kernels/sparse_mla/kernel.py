"""Sparse MLA on a device: attention over the selected rows as they are stored, dequantised in registers.

A program takes 16 heads and 64 picks of a query row (a split) and leaves an unnormalised sum, its largest logit and its weight; a second
launch merges the splits. Rows are read from a compact buffer, from a history by position, or by address wherever each lies: one body.

Invariants:
1. Splits follow from k alone and are merged in one sum of a fixed shape; a row's result does not depend on the number of rows.
2. An unused pick's row is never read. A used row that holds NaN makes its query row NaN.
3. Products are exact (see `kernels/linear/kernel.py`): int8 and bf16 latents go through the matrix units unrounded, a group's scale is
   applied to the logits before the softmax and to the probabilities after it, and probabilities are three bf16 terms.

Bytes at k 2,048 of 656-byte rows: 1.3 MiB, 32 splits x 4 blocks of heads read it 4 times from L2 and leave 4 MiB of sums: about 2 us of
L2 traffic; 128 programs of one pass each, so latency is one chain of address, row, two products. Sums in registers are 64 wide.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import SCALE_GROUP, RowLayout
from kernels.linear.kernel import dot_exact

__all__ = ["sparse_mla", "sparse_mla_addresses", "sparse_mla_indexed", "sparse_mla_packed"]

SPLIT_PICKS = 64
TILE_HEADS = 16
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
    """Group's values of the picked rows, [picks, 64], as they multiply, and each pick's scale."""
    value = group * GROUP + tl.arange(0, GROUP)
    mask = used[:, None] & (value < LATENT)[None, :]
    scale = tl.full([at_latent.shape[0]], 1.0, tl.float32)
    if ENCODING == Q8G64:
        stored = tl.load(at_latent.to(INT8)[:, None] + value[None, :], mask=mask, other=0).to(tl.float32).to(tl.bfloat16)
        scales_offset: tl.constexpr = LATENT + LATENT % 2
        scale = tl.load((at_latent + scales_offset).to(HALF) + group, mask=used, other=0.0).to(tl.float32)
    elif ENCODING == BF16:
        stored = tl.load(at_latent.to(BRAIN)[:, None] + value[None, :], mask=mask, other=0.0)
    else:
        stored = tl.load(at_latent.to(FLOAT)[:, None] + value[None, :], mask=mask, other=0.0)
    return stored, scale


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
            FORM: tl.constexpr, TILE_P: tl.constexpr, TILE_H: tl.constexpr):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    known = head < HEADS
    pick = split * TILE_P + tl.arange(0, TILE_P)
    used, at_latent, at_rope = _picked(latent, rope, selection, row, pick, latent_bytes, rope_bytes, PICKS, FORM, ROPE_OFFSET)
    to_weight = weights + ((row * HEADS + head) * SPLITS + split) * 2
    if tl.sum(used.to(tl.int32)) == 0:
        tl.store(to_weight, tl.full([TILE_H], float("-inf"), tl.float32), mask=known)
        tl.store(to_weight + 1, tl.zeros([TILE_H], tl.float32), mask=known)
    else:
        groups: tl.constexpr = (LATENT + GROUP - 1) // GROUP
        value = tl.arange(0, ROPE_BLOCK)
        from_query = query_rope + row * qr_row + (head * qr_head)[:, None] + (value * qr_value)[None, :]
        query = tl.load(from_query, mask=known[:, None] & (value < ROPE)[None, :], other=0.0)
        key_mask = used[:, None] & (value < ROPE)[None, :]
        if ENCODING == F32:
            key = tl.load(at_rope.to(FLOAT)[:, None] + value[None, :], mask=key_mask, other=0.0)
        else:
            key = tl.load(at_rope.to(BRAIN)[:, None] + value[None, :], mask=key_mask, other=0.0)
        logits = dot_exact(query, tl.trans(key), tl.zeros([TILE_H, TILE_P], tl.float32))
        for group in range(groups):
            value = group * GROUP + tl.arange(0, GROUP)
            from_query = query_latent + row * ql_row + (head * ql_head)[:, None] + (value * ql_value)[None, :]
            query = tl.load(from_query, mask=known[:, None] & (value < LATENT)[None, :], other=0.0)
            stored, scale = _latents(at_latent, used, group, LATENT, ENCODING)
            logits += dot_exact(query, tl.trans(stored), tl.zeros([TILE_H, TILE_P], tl.float32)) * scale[None, :]
        logits = tl.where(used[None, :], logits * SCALE, float("-inf"))
        largest = tl.max(logits, 1)
        weight = tl.exp(logits - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
        tl.store(to_weight, largest, mask=known)
        tl.store(to_weight + 1, tl.sum(weight, 1), mask=known)
        to_sums = sums + ((row * SPLITS + split) * HEADS + head[:, None]) * LATENT
        for group in range(groups):
            stored, scale = _latents(at_latent, used, group, LATENT, ENCODING)
            part = dot_exact(weight * scale[None, :], stored, tl.zeros([TILE_H, GROUP], tl.float32))
            value = group * GROUP + tl.arange(0, GROUP)
            tl.store(to_sums + value[None, :], part, mask=known[:, None] & (value < LATENT)[None, :])


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
    splits = triton.cdiv(picks, SPLIT_PICKS)
    selection = selection.contiguous()
    compact = form == COMPACT.value
    for start in range(0, rows, _BAND_ROWS):
        count = min(_BAND_ROWS, rows - start)
        ql, qr = query_latent[start:], query_rope[start:]
        sums = torch.empty((count, splits, heads, width), dtype=torch.float32, device=out.device)
        weights = torch.empty((count, heads, splits, 2), dtype=torch.float32, device=out.device)
        skipped = start * picks if compact else 0
        _attend[(splits, triton.cdiv(heads, TILE_HEADS), count)](
            ql, qr, latent.view(-1)[skipped * strides[0] :], rope.view(-1)[skipped * strides[1] :], selection[start:], sums, weights,
            *ql.stride(), *qr.stride(), *strides, SCALE=scale, HEADS=heads, LATENT=width, ROPE=layout.rope,
            ROPE_BLOCK=max(16, triton.next_power_of_2(layout.rope)), ROPE_OFFSET=rope_offset, PICKS=picks, SPLITS=splits,
            ENCODING=_ENCODINGS[layout.encoding], FORM=form, TILE_P=SPLIT_PICKS, TILE_H=TILE_HEADS, num_warps=4,
        )  # fmt: skip
        _merge[(triton.cdiv(width, _MERGE_BLOCK), heads, count)](
            sums, weights, out[start:], HEADS=heads, LATENT=width, SPLITS=splits, SPLITS_BLOCK=triton.next_power_of_2(splits),
            BLOCK=_MERGE_BLOCK, num_warps=4,
        )  # fmt: skip
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
    return {
        "query_latent": query, "query_rope": query, "latent": "*u8", "rope": "*u8", "selection": "*i64" if form == 2 else "*i32",
        "sums": "*fp32", "weights": "*fp32", "ql_row": 32768, "ql_head": 512, "ql_value": 1, "qr_row": 4096, "qr_head": 64, "qr_value": 1,
        "latent_bytes": layout.row_bytes, "rope_bytes": layout.row_bytes, "SCALE": 0.0625, "HEADS": 64, "LATENT": 512, "ROPE": 64,
        "ROPE_BLOCK": 64, "ROPE_OFFSET": layout.rope_offset, "PICKS": 2048, "SPLITS": 32, "ENCODING": _ENCODINGS[encoding], "FORM": form,
        "TILE_P": SPLIT_PICKS, "TILE_H": TILE_HEADS, "num_warps": 4,
    }  # fmt: skip


COMPILE = [
    (_attend, _case("q8g64", COMPACT.value)),
    (_attend, _case("q8g64", ADDRESSED.value)),
    (_attend, _case("bf16", INDEXED.value)),
    (_merge, {"sums": "*fp32", "weights": "*fp32", "out": "*bf16", "HEADS": 64, "LATENT": 512, "SPLITS": 32, "SPLITS_BLOCK": 32,
              "BLOCK": _MERGE_BLOCK, "num_warps": 4}),
]  # fmt: skip
