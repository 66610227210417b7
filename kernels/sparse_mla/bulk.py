"""Sparse MLA of many query rows: a program a row and block of heads, over all of the row's picks. For appends.

A softmax runs along the picks with its sum of latents in registers, so nothing is left to merge: the decode kernel's partial sums, 4 MiB a
row at k 2,048, would be 8 GiB for 2,048 rows.

Invariants:
1. An unused pick's row is never read, and picks past the last used one cost nothing. A row's result does not depend on the number of rows.
2. A used row that holds NaN makes its query row NaN and no other.
3. bf16 queries: logits are exact as in `kernel.py` (int8 latents unrounded, a group's scale after its product); the sum of latents is of
   probabilities and dequantised latents rounded to bf16, with float32 sums. float32 queries, or float32 rows: float32 throughout.

Floor at 2,048 rows, k 2,048, 64 heads: 0.6 TFLOP, 1.5 ms at 400 TFLOP/s; rows are read twice from L2, 5 GiB. The sum of latents
takes 128 registers a thread of 256, so one program a multiprocessor; its two halves of 256 values each go through 32 KiB of shared memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import SCALE_GROUP, RowLayout
from kernels.linear.kernel import dot_exact

__all__ = ["sparse_mla_indexed", "sparse_mla_packed"]

INT8 = tl.constexpr(tl.pointer_type(tl.int8))
HALF = tl.constexpr(tl.pointer_type(tl.float16))
BRAIN = tl.constexpr(tl.pointer_type(tl.bfloat16))
FLOAT = tl.constexpr(tl.pointer_type(tl.float32))
GROUP = tl.constexpr(SCALE_GROUP)
Q8G64, BF16, F32 = (tl.constexpr(encoding) for encoding in range(3))
_ENCODINGS = {"q8g64": Q8G64.value, "bf16": BF16.value, "f32": F32.value}


@triton.jit
def _stored(at_latent, used, value, LATENT: tl.constexpr, ENCODING: tl.constexpr):
    """Values of the picked rows as they are stored, [picks, values]; zeros where unused."""
    mask = used[:, None] & (value < LATENT)[None, :]
    if ENCODING == Q8G64:
        return tl.load(at_latent.to(INT8)[:, None] + value[None, :], mask=mask, other=0).to(tl.float32)
    elif ENCODING == BF16:
        return tl.load(at_latent.to(BRAIN)[:, None] + value[None, :], mask=mask, other=0.0)
    else:
        return tl.load(at_latent.to(FLOAT)[:, None] + value[None, :], mask=mask, other=0.0)


@triton.jit
def _latents(at_latent, used, first, COUNT: tl.constexpr, LATENT: tl.constexpr, ENCODING: tl.constexpr, EXACT: tl.constexpr):
    """Dequantised values first .. first + COUNT - 1 of the picked rows, [picks, COUNT], as they multiply."""
    if ENCODING == Q8G64:  # group by group, so that a thread loads a scale once for all its values
        width: tl.constexpr = GROUP if COUNT > GROUP else COUNT
        start = first + tl.arange(0, COUNT // width) * width
        value = start[:, None] + tl.arange(0, width)[None, :]
        mask = used[:, None, None] & (value < LATENT)[None, :, :]
        stored = tl.load(at_latent.to(INT8)[:, None, None] + value[None, :, :], mask=mask, other=0).to(tl.float32)
        scales = (at_latent + LATENT + LATENT % 2).to(HALF)[:, None] + (start // GROUP)[None, :]
        scale = tl.load(scales, mask=used[:, None] & (start < LATENT)[None, :], other=0.0).to(tl.float32)
        latents = tl.reshape(stored * scale[:, :, None], [at_latent.shape[0], COUNT])
    else:
        value = first + tl.arange(0, COUNT)
        latents = _stored(at_latent, used, value, LATENT, ENCODING)
    return latents.to(tl.float32) if EXACT else latents.to(tl.bfloat16)


@triton.jit
def _logits(query_latent, ql_head, ql_value, query_rope, head, known, at_latent, at_rope, used, LATENT: tl.constexpr, ROPE: tl.constexpr,
            ROPE_BLOCK: tl.constexpr, ENCODING: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Products of a row's heads with the picked rows, [heads, picks]; `query_rope` is loaded, latent queries come group by group."""
    turn = tl.arange(0, ROPE_BLOCK)
    mask = used[:, None] & (turn < ROPE)[None, :]
    if ENCODING == F32:
        key = tl.load(at_rope.to(FLOAT)[:, None] + turn[None, :], mask=mask, other=0.0)
    else:
        key = tl.load(at_rope.to(BRAIN)[:, None] + turn[None, :], mask=mask, other=0.0)
    if EXACT:
        key = key.to(tl.float32)
    nothing = tl.zeros([head.shape[0], used.shape[0]], tl.float32)
    logits = dot_exact(query_rope, tl.trans(key), nothing)
    for group in tl.range(0, (LATENT + GROUP - 1) // GROUP, num_stages=STAGES):
        value = group * GROUP + tl.arange(0, GROUP)
        from_query = query_latent + (head * ql_head)[:, None] + (value * ql_value)[None, :]
        query = tl.load(from_query, mask=known[:, None] & (value < LATENT)[None, :], other=0.0)
        if (ENCODING == Q8G64) & (not EXACT):
            stored = _stored(at_latent, used, value, LATENT, ENCODING).to(tl.bfloat16)
            scale = tl.load((at_latent + LATENT + LATENT % 2).to(HALF) + group, mask=used, other=0.0).to(tl.float32)
            logits += dot_exact(query, tl.trans(stored), nothing) * scale[None, :]
        else:
            logits = dot_exact(query, tl.trans(_latents(at_latent, used, group * GROUP, GROUP, LATENT, ENCODING, EXACT)), logits)
    return logits


@triton.jit
def _end_of(selection, row, PICKS: tl.constexpr, PICKS_BLOCK: tl.constexpr):
    """One past the row's last used pick."""
    pick = tl.arange(0, PICKS_BLOCK)
    chosen = tl.load(selection + row * PICKS + pick, mask=pick < PICKS, other=-1)
    return tl.max(tl.where(chosen >= 0, pick + 1, 0))


@triton.jit
def _attend_row(query_latent, query_rope, latent, rope, selection, out, ql_row, ql_head, ql_value, qr_row, qr_head, qr_value, latent_bytes,
                rope_bytes, SCALE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, HALF_BLOCK: tl.constexpr, ROPE: tl.constexpr,
                ROPE_BLOCK: tl.constexpr, ROPE_OFFSET: tl.constexpr, PICKS: tl.constexpr, PICKS_BLOCK: tl.constexpr,
                ENCODING: tl.constexpr, EXACT: tl.constexpr, TILE_P: tl.constexpr, TILE_H: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    known = head < HEADS
    end = _end_of(selection, row, PICKS, PICKS_BLOCK)
    turn = tl.arange(0, ROPE_BLOCK)
    from_query = query_rope + row * qr_row + (head * qr_head)[:, None] + (turn * qr_value)[None, :]
    turned = tl.load(from_query, mask=known[:, None] & (turn < ROPE)[None, :], other=0.0)
    largest = tl.full([TILE_H], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H], tl.float32)
    left = tl.zeros([TILE_H, HALF_BLOCK], tl.float32)
    right = tl.zeros([TILE_H, HALF_BLOCK], tl.float32)
    for start in range(0, end, TILE_P):
        pick = start + tl.arange(0, TILE_P)
        chosen = tl.load(selection + row * PICKS + pick, mask=pick < PICKS, other=-1).to(tl.int64)
        used = chosen >= 0
        at_latent = latent + chosen * latent_bytes
        at_rope = rope + chosen * rope_bytes + ROPE_OFFSET
        logits = _logits(query_latent + row * ql_row, ql_head, ql_value, turned, head, known, at_latent, at_rope, used, LATENT, ROPE,
                         ROPE_BLOCK, ENCODING, EXACT, STAGES)  # fmt: skip
        logits = tl.where(used[None, :], logits * SCALE, float("-inf"))
        most = tl.maximum(largest, tl.max(logits, 1))
        level = tl.where(most == float("-inf"), 0.0, most)
        share = tl.exp(largest - level)
        weight = tl.exp(logits - level[:, None])
        total = total * share + tl.sum(weight, 1)
        if not EXACT:
            weight = weight.to(tl.bfloat16)
        left = dot_exact(weight, _latents(at_latent, used, 0, HALF_BLOCK, LATENT, ENCODING, EXACT), left * share[:, None])
        right = dot_exact(weight, _latents(at_latent, used, HALF_BLOCK, HALF_BLOCK, LATENT, ENCODING, EXACT), right * share[:, None])
        largest = most
    whole = tl.where(total == 0.0, 1.0, total)[:, None]
    value = tl.arange(0, HALF_BLOCK)
    to_out = out + (row * HEADS + head)[:, None] * LATENT + value[None, :]
    tl.store(to_out, (left / whole).to(out.dtype.element_ty), mask=known[:, None] & (value < LATENT)[None, :])
    tl.store(to_out + HALF_BLOCK, (right / whole).to(out.dtype.element_ty), mask=known[:, None] & (value + HALF_BLOCK < LATENT)[None, :])


def _shapes(heads: int, layout: RowLayout, picks: int, exact: bool) -> dict[str, int | bool]:
    """Launch constants; float32 takes small tiles for its registers and shared memory."""
    tile_heads = 16 if exact else max(16, min(64, triton.next_power_of_2(heads)))
    return {
        "HEADS": heads, "LATENT": layout.latent, "HALF_BLOCK": max(16, triton.next_power_of_2(layout.latent) // 2), "ROPE": layout.rope,
        "ROPE_BLOCK": max(16, triton.next_power_of_2(layout.rope)), "PICKS": picks, "PICKS_BLOCK": triton.next_power_of_2(picks),
        "ENCODING": _ENCODINGS[layout.encoding], "EXACT": exact, "TILE_P": 16 if exact else 64, "TILE_H": tile_heads, "STAGES": 2,
        "num_warps": 8 if tile_heads > 16 else 4,
    }  # fmt: skip


def _launch(
    query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, layout: RowLayout, scale: float,
    *, strides: tuple[int, int], rope_offset: int,
) -> Tensor:  # fmt: skip
    """`latent` and `rope` are uint8 from whose starts rows lie `strides` bytes apart."""
    rows, heads, width = query_latent.shape
    picks = selection.shape[1]
    out = torch.empty((rows, heads, width), dtype=query_latent.dtype, device=query_latent.device)
    if picks == 0:
        return out.zero_()
    shapes = _shapes(heads, layout, picks, torch.float32 in (query_latent.dtype, query_rope.dtype) or layout.encoding == "f32")
    _attend_row[(rows, triton.cdiv(heads, shapes["TILE_H"]))](
        query_latent, query_rope, latent, rope, selection.contiguous(), out, *query_latent.stride(), *query_rope.stride(), *strides,
        SCALE=scale, ROPE_OFFSET=rope_offset, **shapes,
    )  # fmt: skip
    return out


def sparse_mla_indexed(query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, selection: Tensor, scale: float) -> Tensor:
    """See the package page."""
    layout = RowLayout("f32", latent.shape[1], rope.shape[1])
    parts = latent.contiguous().view(torch.uint8), rope.contiguous().view(torch.uint8)
    strides = 4 * layout.latent, 4 * layout.rope
    return _launch(query_latent, query_rope, *parts, selection, layout, scale, strides=strides, rope_offset=0)


def sparse_mla_packed(query_latent: Tensor, query_rope: Tensor, rows: Tensor, selection: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """See the package page."""
    if rows.dim() == 3:  # a copy of the picks is a history of its own: one kernel for both, made before a prompt is long enough for copies
        numbers = torch.arange(selection.numel(), dtype=torch.int32, device=selection.device).view(selection.shape)
        selection = torch.where(selection >= 0, numbers, -1)
    strides = layout.row_bytes, layout.row_bytes
    return _launch(query_latent, query_rope, rows, rows, selection, layout, scale, strides=strides, rope_offset=layout.rope_offset)


def _case(encoding: str, query: str = "*bf16") -> dict[str, object]:
    layout = RowLayout(encoding, 512, 64)  # type: ignore[arg-type]  # one of the three
    return {
        "query_latent": query, "query_rope": query, "latent": "*u8", "rope": "*u8", "selection": "*i32", "out": query, "ql_row": 32768,
        "ql_head": 512, "ql_value": 1, "qr_row": 4096, "qr_head": 64, "qr_value": 1, "latent_bytes": layout.row_bytes,
        "rope_bytes": layout.row_bytes, "SCALE": 0.0625, "ROPE_OFFSET": layout.rope_offset,
        **_shapes(64, layout, 2048, query == "*fp32" or encoding == "f32"),
    }  # fmt: skip


COMPILE = [
    (_attend_row, _case("q8g64")),
    (_attend_row, _case("bf16")),
    (_attend_row, _case("f32")),
    (_attend_row, _case("q8g64", "*fp32")),
]
