"""New rows and keys on a device: one program norms, rotates, packs and stores one row, or one key twice; beside them, of a whole layer,
programs norm the query latent and widen the head weights.

Invariants:
1. Roundings are the reference's: the norm rounds to the projection's dtype before the weight and again behind it, every product of the
   rotation too, and the quantiser is `kernels/quantize`'s own.
2. A row is reduced in a shape given by its width alone, whatever the number of rows.
3. No multiplication is fused with an addition: that would change float32 bits of the rotation.

Bytes of one GLM row: 1.1 KiB read, 656 written; of a key 0.8 KiB read, 512 written. Nothing beside a launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import KeyLayout, RowLayout
from kernels.norm.kernel import rms_scaled
from kernels.quantize.kernel import (
    FLOAT_MAX,
    GROUP,
    e4m3_codes,
    e4m3_scale,
    key_shape,
    row_shape,
    store_quantized,
    store_scaled,
    store_wide,
    store_zeros,
)
from kernels.rope.kernel import turned
from kernels.row_write.source import NewKeys, NewRows

__all__ = ["write_keys", "write_layer", "write_rows"]


@triton.jit
def _table_row(cos, sin, row, stride, pair, known):
    """Float32 cosines and sines of one row's pairs."""
    c = tl.load(cos + row.to(tl.int64) * stride + pair, mask=known, other=0).to(tl.float32)
    s = tl.load(sin + row.to(tl.int64) * stride + pair, mask=known, other=0).to(tl.float32)
    return c, s


@triton.jit
def _store_row(
    latent, column, first, second, pair, start, QUANTIZED: tl.constexpr, WIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    SCALES_OFFSET: tl.constexpr, ROPE_OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Pack one row and store it at address `start`; 0: nowhere."""
    wanted = start != 0
    known = 2 * pair < ROPE
    if QUANTIZED:
        store_quantized(tl.reshape(latent, (GROUPS_PADDED, GROUP)), start, wanted, LATENT, SCALES_OFFSET, GROUPS_PADDED)
    else:
        store_wide(latent, column, start, wanted & (column < LATENT), WIDE)
    store_wide(first, 2 * pair, start + ROPE_OFFSET, wanted & known, WIDE)
    store_wide(second, 2 * pair + 1, start + ROPE_OFFSET, wanted & known, WIDE)
    store_zeros(start + ROPE_OFFSET + ROPE * WIDE, wanted, ROW_BYTES - ROPE_OFFSET - ROPE * WIDE)


@triton.jit
def _write_row(
    row, at, projected, weight, cos, sin, destinations, copies, positions, projected_stride, table_stride, offset_bytes, copies_offset, eps,
    COPIES: tl.constexpr, SKIP_FIRST: tl.constexpr,
    QUANTIZED: tl.constexpr, WIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS_PADDED: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate, pack and store one row, whose address and position lie at `at`, once and to its copies."""
    address = tl.load(destinations + at)
    values = projected + row.to(tl.int64) * projected_stride
    columns: tl.constexpr = GROUPS_PADDED * GROUP if QUANTIZED else LATENT_PADDED
    column = tl.arange(0, columns)
    given = tl.load(values + column, mask=column < LATENT, other=0)
    weights = tl.load(weight + column, mask=column < LATENT, other=0).to(tl.float32)
    latent = rms_scaled(given, weights, eps, LATENT).to(given.dtype).to(tl.float32)
    pair = tl.arange(0, ROPE_PADDED)  # twice as many as there are
    known = 2 * pair < ROPE
    even = tl.load(values + LATENT + 2 * pair, mask=known, other=0)
    odd = tl.load(values + LATENT + 2 * pair + 1, mask=known, other=0)
    c, s = _table_row(cos, sin, row, table_stride, pair, known)
    first, second = turned(even, odd, c, s)
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if SKIP_FIRST:
        present = tl.load(positions + at) > 0
        latent = tl.where(present, latent, 0.0)
        first = tl.where(present, first, 0.0)
        second = tl.where(present, second, 0.0)
    _store_row(latent, column, first, second, pair, tl.where(address != 0, address + offset_bytes, 0), QUANTIZED, WIDE, LATENT, ROPE,
               SCALES_OFFSET, ROPE_OFFSET, ROW_BYTES, GROUPS_PADDED)  # fmt: skip
    for number in range(COPIES):
        copy = tl.load(copies + row.to(tl.int64) * COPIES + number)
        _store_row(latent, column, first, second, pair, tl.where(copy != 0, copy + copies_offset, 0), QUANTIZED, WIDE, LATENT, ROPE,
                   SCALES_OFFSET, ROPE_OFFSET, ROW_BYTES, GROUPS_PADDED)  # fmt: skip


@triton.jit
def _quantized_key(even, odd, pair, WIDTH: tl.constexpr):
    """A key's values in pairs as codes, zeros past WIDTH, and its scale's bits."""
    even = tl.where(2 * pair < WIDTH, even, 0.0)
    odd = tl.where(2 * pair + 1 < WIDTH, odd, 0.0)
    finite = tl.min(((tl.abs(even) <= FLOAT_MAX) & (tl.abs(odd) <= FLOAT_MAX)).to(tl.int32)) > 0
    even = tl.where(finite, even, 0.0)
    odd = tl.where(finite, odd, 0.0)
    scale, divisor = e4m3_scale(tl.max(tl.maximum(tl.abs(even), tl.abs(odd))), finite)
    return e4m3_codes(even, divisor), e4m3_codes(odd, divisor), scale


@triton.jit
def _store_codes(even, odd, pair, scale, address, VALUES_BYTES: tl.constexpr):
    """Store one quantised key by its address; 0: nowhere."""
    wanted = address != 0
    store_scaled(even, 2 * pair, scale, address, wanted, 2 * pair < VALUES_BYTES, VALUES_BYTES)
    store_scaled(odd, 2 * pair + 1, scale, address, wanted, 2 * pair < VALUES_BYTES, VALUES_BYTES)


@triton.jit
def _store_key(even, odd, pair, start, WIDE: tl.constexpr, WIDTH: tl.constexpr, KEY_BYTES: tl.constexpr):
    """Store one key at address `start`; 0: nowhere."""
    wanted = start != 0
    store_wide(even, 2 * pair, start, wanted & (2 * pair < WIDTH), WIDE)
    store_wide(odd, 2 * pair + 1, start, wanted & (2 * pair + 1 < WIDTH), WIDE)
    store_zeros(start + WIDTH * WIDE, wanted, KEY_BYTES - WIDTH * WIDE)


@triton.jit
def _write_key(
    row, at, projected, weight, bias, cos, sin, destinations, pages, positions, projected_stride, table_stride, offset_bytes, eps,
    SKIP_FIRST: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, KEY_BYTES: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and pack one key, and store it twice; its addresses and position lie at `at`."""
    address = tl.load(destinations + at)
    pair = tl.arange(0, PADDED)  # twice as many as there are
    at_even = 2 * pair
    at_odd = 2 * pair + 1
    values = projected + row.to(tl.int64) * projected_stride
    given = tl.load(values + at_even, mask=at_even < WIDTH, other=0)
    even = given.to(tl.float32)
    odd = tl.load(values + at_odd, mask=at_odd < WIDTH, other=0).to(tl.float32)
    mean = (tl.sum(even) + tl.sum(odd)) / WIDTH
    even = tl.where(at_even < WIDTH, even - mean, 0.0)
    odd = tl.where(at_odd < WIDTH, odd - mean, 0.0)
    scale = tl.rsqrt((tl.sum(even * even) + tl.sum(odd * odd)) / WIDTH + eps)
    even = even * scale * tl.load(weight + at_even, mask=at_even < WIDTH, other=0).to(tl.float32)
    odd = odd * scale * tl.load(weight + at_odd, mask=at_odd < WIDTH, other=0).to(tl.float32)
    even = (even + tl.load(bias + at_even, mask=at_even < WIDTH, other=0).to(tl.float32)).to(given.dtype)
    odd = (odd + tl.load(bias + at_odd, mask=at_odd < WIDTH, other=0).to(tl.float32)).to(given.dtype)
    c, s = _table_row(cos, sin, row, table_stride, pair, pair < PAIRS)
    first, second = turned(even, odd, c, s)
    even = tl.where(pair < PAIRS, first, even).to(tl.float32)
    odd = tl.where(pair < PAIRS, second, odd).to(tl.float32)
    if SKIP_FIRST:
        present = tl.load(positions + at) > 0
        even = tl.where(present, even, 0.0)
        odd = tl.where(present, odd, 0.0)
    in_block = tl.where(address != 0, address + offset_bytes, 0)
    in_page = tl.load(pages + at)
    if WIDE == 1:
        even_codes, odd_codes, key_scale = _quantized_key(even, odd, pair, WIDTH)
        _store_codes(even_codes, odd_codes, pair, key_scale, in_block, KEY_BYTES - 4)
        _store_codes(even_codes, odd_codes, pair, key_scale, in_page, KEY_BYTES - 4)
    else:
        _store_key(even, odd, pair, in_block, WIDE, WIDTH, KEY_BYTES)
        _store_key(even, odd, pair, in_page, WIDE, WIDTH, KEY_BYTES)


@triton.jit
def _write_rows(
    projected, weight, cos, sin, destinations, positions, projected_stride, table_stride, every, offset_bytes, eps,
    SKIP_FIRST: tl.constexpr,
    QUANTIZED: tl.constexpr, WIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS_PADDED: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    _write_row(row, row * every, projected, weight, cos, sin, destinations, destinations, positions, projected_stride, table_stride,
               offset_bytes, 0, eps, 0, SKIP_FIRST, QUANTIZED, WIDE, LATENT, ROPE, SCALES_OFFSET, ROPE_OFFSET, ROW_BYTES, GROUPS_PADDED,
               LATENT_PADDED, ROPE_PADDED)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _write_keys(
    projected, weight, bias, cos, sin, destinations, pages, positions, projected_stride, table_stride, every, offset_bytes, eps,
    SKIP_FIRST: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, KEY_BYTES: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    _write_key(row, row * every, projected, weight, bias, cos, sin, destinations, pages, positions, projected_stride, table_stride,
               offset_bytes, eps, SKIP_FIRST, PAIRS, WIDE, WIDTH, KEY_BYTES, PADDED)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _write_layer(
    latent, latent_weight, latent_out, source, weight, key_source, key_weight, key_bias, heads, heads_out, cos, sin, destinations,
    copies, key_destinations, pages, latent_stride, source_stride, key_stride, heads_stride, table_stride, offset_bytes, copies_offset,
    key_offset_bytes, latent_eps, eps, key_eps, COPIES: tl.constexpr, FULL: tl.constexpr, QUERY: tl.constexpr,
    QUERY_PADDED: tl.constexpr, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    PAIRS: tl.constexpr, KEY_WIDE: tl.constexpr, KEY_WIDTH: tl.constexpr, KEY_BYTES: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    QUANTIZED: tl.constexpr, WIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS_PADDED: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)  # 0: query latent, 1: row, 2: key, 3: head weights
    wide = row.to(tl.int64)
    if part == 0:
        column = tl.arange(0, QUERY_PADDED)
        given = tl.load(latent + wide * latent_stride + column, mask=column < QUERY, other=0)
        weights = tl.load(latent_weight + column, mask=column < QUERY, other=0).to(tl.float32)
        normed = rms_scaled(given, weights, latent_eps, QUERY).to(given.dtype)
        tl.store(latent_out + wide * QUERY + column, normed, mask=column < QUERY)
    if part == 1:
        _write_row(row, row, source, weight, cos, sin, destinations, copies, destinations, source_stride, table_stride, offset_bytes,
                   copies_offset, eps, COPIES, False, QUANTIZED, WIDE, LATENT, ROPE, SCALES_OFFSET, ROPE_OFFSET, ROW_BYTES, GROUPS_PADDED,
                   LATENT_PADDED, ROPE_PADDED)  # fmt: skip
    if FULL:
        if part == 2:
            _write_key(row, row, key_source, key_weight, key_bias, cos, sin, key_destinations, pages, pages, key_stride, table_stride,
                       key_offset_bytes, key_eps, False, PAIRS, KEY_WIDE, KEY_WIDTH, KEY_BYTES, KEY_PADDED)  # fmt: skip
        if part == 3:
            head = tl.arange(0, HEADS_PADDED)
            x = tl.load(heads + wide * heads_stride + head, mask=head < HEADS, other=0).to(tl.float32)
            tl.store(heads_out + wide * HEADS + head, x, mask=head < HEADS)


def _dense(values: Tensor) -> Tensor:
    return values if values.stride(-1) == 1 else values.contiguous()


def _padded(count: int) -> int:
    return int(triton.next_power_of_2(count))


def _alike(*vectors: Tensor | None) -> tuple[list[Tensor | None], int]:
    """Vectors whose values lie equally far apart, and how far: themselves where they do."""
    apart = {vector.stride(0) for vector in vectors if vector is not None}
    if len(apart) == 1:
        return list(vectors), apart.pop()
    return [None if vector is None else vector.contiguous() for vector in vectors], 1


def _table(rope_table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines whose rows lie equally far apart, each row side by side."""
    cos, sin = _dense(rope_table[0]), _dense(rope_table[1])
    return (cos, sin) if cos.stride(0) == sin.stride(0) else (cos.contiguous(), sin.contiguous())


def write_rows(new: NewRows, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
    """See the package page. One launch; capturable."""
    rows, projected = new.projected.shape[0], _dense(new.projected)
    (destinations, positions), every = _alike(new.destinations, positions)
    cos, sin = _table(rope_table)
    if rows:
        _write_rows[(rows,)](
            projected, new.weight.contiguous(), cos, sin, destinations, destinations if positions is None else positions,
            projected.stride(0), cos.stride(0), every, new.offset_bytes, new.eps, positions is not None, **row_shape(new.layout),
            enable_fp_fusion=False,
        )  # fmt: skip


def write_keys(new: NewKeys, rope_table: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
    """See the package page. One launch; capturable."""
    rows, projected = new.projected.shape[0], _dense(new.projected)
    (destinations, pages, positions), every = _alike(new.destinations, new.pages, positions)
    cos, sin = _table(rope_table)
    if rows:
        _write_keys[(rows,)](
            projected, new.weight.contiguous(), new.bias.contiguous(), cos, sin, destinations, pages,
            destinations if positions is None else positions, projected.stride(0), cos.stride(0), every, new.offset_bytes, new.eps,
            positions is not None, cos.shape[1], **key_shape(new.layout), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def write_layer(
    latent: Tensor, weight: Tensor, eps: float, rows: NewRows, keys: NewKeys | None, head_weights: Tensor | None,
    rope_table: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See the package page. One launch; capturable."""
    count, width = latent.shape
    latent, source = _dense(latent), _dense(rows.projected)
    cos, sin = _table(rope_table)
    normed = torch.empty((count, width), dtype=latent.dtype, device=latent.device)
    if keys is None or head_weights is None:
        key, heads, wide_heads = source, source, None
        key_weight = key_bias = rows.weight
        to_key, pages, key_offset, key_eps = rows.destinations, rows.destinations, 0, 0.0
        shape = dict.fromkeys(("HEADS", "HEADS_PADDED", "KEY_WIDE", "KEY_WIDTH", "KEY_BYTES", "KEY_PADDED"), 0)
    else:
        key, heads = _dense(keys.projected), _dense(head_weights)
        wide_heads = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
        key_weight, key_bias = keys.weight, keys.bias
        to_key, pages, key_offset, key_eps = keys.destinations, keys.pages, keys.offset_bytes, keys.eps
        shape = _full_shape(keys.layout, heads.shape[1])
    if count:
        _write_layer[(count, 2 if keys is None else 4)](
            latent, weight.contiguous(), normed, source, rows.weight.contiguous(), key, key_weight.contiguous(), key_bias.contiguous(),
            heads, normed if wide_heads is None else wide_heads, cos, sin, rows.destinations.contiguous(),
            rows.destinations if rows.copies is None else rows.copies, to_key.contiguous(), pages.contiguous(), latent.stride(0),
            source.stride(0), key.stride(0), heads.stride(0), cos.stride(0), rows.offset_bytes, rows.copies_offset_bytes, key_offset, eps,
            rows.eps, key_eps, 0 if rows.copies is None else rows.copies.shape[1], keys is not None, QUERY=width,
            QUERY_PADDED=_padded(width), PAIRS=cos.shape[1], **shape, **row_shape(rows.layout), enable_fp_fusion=False,
        )  # fmt: skip
    return normed, wide_heads


def _full_shape(layout: KeyLayout, heads: int) -> dict[str, int]:
    """What a layer with an indexer adds to the shape."""
    key = key_shape(layout)
    return {
        "HEADS": heads, "HEADS_PADDED": _padded(heads), "KEY_WIDE": key["WIDE"], "KEY_WIDTH": key["WIDTH"], "KEY_BYTES": key["KEY_BYTES"],
        "KEY_PADDED": key["PADDED"],
    }  # fmt: skip


_AT = dict.fromkeys(("destinations", "positions"), "*i64") | dict.fromkeys(
    ("projected_stride", "table_stride", "every", "offset_bytes"), "i32"
)
_HALF = dict.fromkeys(("projected", "weight", "cos", "sin"), "*bf16") | _AT | {"eps": "fp32", "SKIP_FIRST": False}
_FULL = dict.fromkeys(("projected", "weight", "cos", "sin"), "*fp32") | _AT | {"eps": "fp32", "SKIP_FIRST": True}
_KEY = {"pages": "*i64", "PAIRS": 32, "num_warps": 1}
_GLM, _TINY = RowLayout("q8g64", 512, 64), RowLayout("f32", 32, 8)
_FLOATS = ("latent", "latent_weight", "latent_out", "source", "weight", "key_source", "key_weight", "key_bias", "heads", "cos", "sin")
_LAYER: dict[str, str | int] = {}
_LAYER |= dict.fromkeys(("destinations", "copies", "key_destinations", "pages"), "*i64")
_LAYER |= dict.fromkeys(("latent_eps", "eps", "key_eps"), "fp32")
_LAYER |= dict.fromkeys(("latent_stride", "source_stride", "key_stride", "heads_stride", "table_stride"), "i32")
_LAYER |= {"offset_bytes": "i32", "copies_offset": "i64", "key_offset_bytes": "i32", "COPIES": 0, "heads_out": "*fp32", "FULL": True}
_LAYER |= {"QUERY": 2048, "QUERY_PADDED": 2048}
_LAYER |= {"PAIRS": 32} | _full_shape(KeyLayout("bf16", 128), 32)
_SMALL = {"QUERY": 32, "QUERY_PADDED": 32, "PAIRS": 4}
_SHARED = {"FULL": False} | dict.fromkeys(("HEADS", "HEADS_PADDED", "KEY_WIDE", "KEY_WIDTH", "KEY_BYTES", "KEY_PADDED"), 0)
COMPILE = [
    (_write_rows, _HALF | row_shape(_GLM)),
    (_write_rows, _HALF | row_shape(_GLM) | {"SKIP_FIRST": True}),
    (_write_rows, _FULL | row_shape(_GLM)),
    (_write_rows, _HALF | row_shape(RowLayout("bf16", 512, 64))),
    (_write_rows, _FULL | row_shape(_TINY)),
    (_write_rows, _HALF | row_shape(RowLayout("q8g64", 24, 8))),
    (_write_keys, _HALF | _KEY | {"bias": "*bf16"} | key_shape(KeyLayout("bf16", 128))),
    (_write_keys, _HALF | _KEY | {"bias": "*bf16", "SKIP_FIRST": True} | key_shape(KeyLayout("bf16", 128))),
    (_write_keys, _FULL | _KEY | {"bias": "*fp32", "PAIRS": 4} | key_shape(KeyLayout("f32", 16))),
    (_write_layer, _LAYER | dict.fromkeys(_FLOATS, "*bf16") | row_shape(_GLM)),
    (_write_layer, _LAYER | dict.fromkeys(_FLOATS, "*bf16") | row_shape(_GLM) | _full_shape(KeyLayout("e4m3", 128), 32)),
    (_write_layer, _LAYER | dict.fromkeys(_FLOATS, "*bf16") | row_shape(_GLM) | _SHARED),
    (_write_layer, _LAYER | dict.fromkeys(_FLOATS, "*bf16") | row_shape(_GLM) | _SHARED | {"COPIES": 4}),
    (_write_layer, _LAYER | dict.fromkeys(_FLOATS, "*fp32") | row_shape(_TINY) | _full_shape(KeyLayout("f32", 16), 12) | _SMALL),
]
