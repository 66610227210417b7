"""Packing on a device: the reference's bytes exactly, NaN patterns included, on every card.

One program packs one row and stores it where it belongs; nothing passes through a buffer between. Rounding is written out so that no
card's own instruction decides it: divisions are correctly rounded, halves go to even by adding and taking away 1.5 * 2^23 (exact up to
2^22), and bfloat16 and e4m3 are rounded on the bits.

Invariants: those of the reference; a row's bytes depend on that row alone, whatever the number of rows.

Bytes of one GLM row: 2.3 KiB of float32 read, 656 written; a step of 64 rows is 0.2 MiB. Latency rules: two dependent loads (destination,
values) and one reduction. Unpacking 2,048 rows: 1.28 MiB read, 4.5 MiB written: 1.4 us at 4.3 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import BLOCK_ROWS, SCALE_GROUP, KeyLayout, RowLayout

__all__ = [
    "FLOAT_MAX", "GROUP", "append_keys", "append_rows", "e4m3_as_bfloat16", "e4m3_codes", "e4m3_scale", "key_shape",
    "pack_keys", "pack_rows", "row_shape",
    "store_quantized", "store_scaled", "store_wide", "store_zeros", "unpack_keys", "unpack_rows",
]  # fmt: skip

GROUP = tl.constexpr(SCALE_GROUP)
SCALE_MAX = tl.constexpr(65504.0)  # float16's largest
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
HALVES_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23
NAN16 = tl.constexpr(0x7E00)
NAN32 = tl.constexpr(0x7FC00000)
TINY = tl.constexpr(2.0**-126)  # float32's smallest normal
RUN = tl.constexpr(BLOCK_ROWS)
UINT8 = tl.constexpr(tl.pointer_type(tl.uint8))
INT8 = tl.constexpr(tl.pointer_type(tl.int8))
INT16 = tl.constexpr(tl.pointer_type(tl.int16))
INT32 = tl.constexpr(tl.pointer_type(tl.int32))
FLOAT16 = tl.constexpr(tl.pointer_type(tl.float16))


@triton.jit
def _bfloat16_bits(x):
    """Bits of the nearest bfloat16, ties to even, as int16; any NaN becomes 0x7FC0."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def store_wide(x, column, start, wanted, WIDE: tl.constexpr):
    """Store float32 values at places `column` behind address `start` as bfloat16 (WIDE 2) or float32 (WIDE 4)."""
    if WIDE == 2:
        tl.store(tl.multiple_of(start.to(INT16), 2) + column, _bfloat16_bits(x), mask=wanted)
    else:
        tl.store(start.to(INT32) + column, x.to(tl.int32, bitcast=True), mask=wanted)


@triton.jit
def store_zeros(start, wanted, COUNT: tl.constexpr):
    """Zero fewer than 16 bytes."""
    byte = tl.arange(0, 16)
    tl.store(start.to(UINT8) + byte, tl.zeros((16,), tl.uint8), mask=wanted & (byte < COUNT))


@triton.jit
def store_quantized(x, start, wanted, LATENT: tl.constexpr, SCALES_OFFSET: tl.constexpr, GROUPS_PADDED: tl.constexpr):
    """Quantise one row's latent, float32 [GROUPS_PADDED, GROUP] with zeros past LATENT, and store it with its scales at `start`."""
    group = tl.arange(0, GROUPS_PADDED)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    finite = tl.min((tl.abs(x) <= FLOAT_MAX).to(tl.int32), axis=1) > 0
    x = tl.where(finite[:, None], x, 0.0)
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0), SCALE_MAX).to(tl.float16)
    rounded = scale.to(tl.float32)
    divisor = tl.where(rounded > 0, rounded, INFINITY)
    value = tl.div_rn(x, tl.broadcast_to(divisor[:, None], (GROUPS_PADDED, GROUP)))
    value = tl.minimum(tl.maximum(value, -127.0), 127.0)
    value = (value + HALVES_TO_EVEN) - HALVES_TO_EVEN
    tl.store(tl.multiple_of(start.to(INT8), 16) + column, value.to(tl.int8), mask=wanted & (column < LATENT))
    bits = tl.where(finite, scale.to(tl.int16, bitcast=True), NAN16).to(tl.int16)
    scales = (start + SCALES_OFFSET).to(INT16)
    tl.store(scales + group, bits, mask=wanted & (group * GROUP < LATENT))
    store_zeros(start + LATENT, wanted, SCALES_OFFSET - LATENT)


@triton.jit
def e4m3_scale(largest, finite):
    """Bits of an e4m3 key's scale, int32, and what its values are divided by: its largest magnitude, and whether all are finite."""
    scale = tl.div_rn(largest, 448.0)
    scale = tl.where(scale < TINY, 0.0, scale)
    divisor = tl.where(scale > 0, scale, INFINITY)
    return tl.where(finite, scale.to(tl.int32, bitcast=True), NAN32), tl.where(finite, divisor, INFINITY)


@triton.jit
def e4m3_codes(x, divisor):
    """Codes, uint8, of float32 values that are finite."""
    value = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    bits = value.to(tl.int32, bitcast=True)
    size = tl.abs(value)
    normal = (((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 8 bits of exponent of bias 127 become 4 of bias 7
    small = ((size * 512.0 + HALVES_TO_EVEN) - HALVES_TO_EVEN).to(tl.int32)  # below 2^-6 codes are steps of 2^-9
    return (tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """float32 values of codes, exact; no subnormal number is formed."""
    code = codes.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return value * tl.where(code > 0x7F, -1.0, 1.0)


@triton.jit
def e4m3_as_bfloat16(codes, NATIVE: tl.constexpr):
    """bfloat16 values of codes, exact. NATIVE: by the device's own conversion, which a card without one would imitate at great length."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
    else:
        return e4m3_values(codes).to(tl.bfloat16)


@triton.jit
def store_scaled(codes, column, scale, address, wanted, column_wanted, VALUES_BYTES: tl.constexpr):
    """Store some columns' codes of a key, and its scale's bits, by its address (`KeyLayout`)."""
    number = address % RUN
    run = address - number
    tl.store((run + number * VALUES_BYTES).to(UINT8) + column, codes, mask=wanted & column_wanted)
    tl.store((run + RUN * VALUES_BYTES).to(INT32) + number, scale, mask=wanted)


@triton.jit
def _copy_wide(values, stride, row, start, wanted, COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """Store one row of values at address `start`."""
    column = tl.arange(0, PADDED)
    x = tl.load(values + row.to(tl.int64) * stride + column, mask=column < COUNT, other=0).to(tl.float32)
    store_wide(x, column, start, wanted & (column < COUNT), WIDE)


@triton.jit
def _destination(destinations, out, row, offset_bytes, ITEM_BYTES: tl.constexpr, APPENDED: tl.constexpr):
    """Address that an item goes to: its destination and the offset, or its place in `out`; 0 for padding."""
    if APPENDED:
        address = tl.load(destinations + row)
        return tl.where(address != 0, address + offset_bytes, 0)
    else:
        return out.to(tl.int64) + row.to(tl.int64) * ITEM_BYTES


@triton.jit
def _pack_rows(
    latent, rope, destinations, out, latent_stride, rope_stride, offset_bytes, APPENDED: tl.constexpr, QUANTIZED: tl.constexpr,
    WIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES_OFFSET: tl.constexpr, ROPE_OFFSET: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUPS_PADDED: tl.constexpr, LATENT_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = _destination(destinations, out, row, offset_bytes, ROW_BYTES, APPENDED)
    wanted = start != 0
    if QUANTIZED:
        group = tl.arange(0, GROUPS_PADDED)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(latent + row.to(tl.int64) * latent_stride + column, mask=column < LATENT, other=0).to(tl.float32)
        store_quantized(x, start, wanted, LATENT, SCALES_OFFSET, GROUPS_PADDED)
    else:
        _copy_wide(latent, latent_stride, row, start, wanted, LATENT, LATENT_PADDED, WIDE)
    _copy_wide(rope, rope_stride, row, start + ROPE_OFFSET, wanted, ROPE, ROPE_PADDED, WIDE)
    store_zeros(start + ROPE_OFFSET + ROPE * WIDE, wanted, ROW_BYTES - ROPE_OFFSET - ROPE * WIDE)


@triton.jit
def _pack_keys(
    keys, destinations, out, keys_stride, offset_bytes, APPENDED: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
    KEY_BYTES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = _destination(destinations, out, row, offset_bytes, KEY_BYTES, APPENDED)
    if WIDE == 1:
        column = tl.arange(0, PADDED)
        x = tl.load(keys + row.to(tl.int64) * keys_stride + column, mask=column < WIDTH, other=0).to(tl.float32)
        finite = tl.min((tl.abs(x) <= FLOAT_MAX).to(tl.int32)) > 0
        x = tl.where(finite, x, 0.0)
        scale, divisor = e4m3_scale(tl.max(tl.abs(x)), finite)
        codes = e4m3_codes(x, divisor)
        values: tl.constexpr = KEY_BYTES - 4
        if APPENDED:
            store_scaled(codes, column, scale, start, start != 0, column < values, values)
        else:
            tl.store(start.to(UINT8) + column, codes, mask=column < values)
            tl.store((start + values).to(INT32), scale)
    else:
        _copy_wide(keys, keys_stride, row, start, start != 0, WIDTH, PADDED, WIDE)
        store_zeros(start + WIDTH * WIDE, start != 0, KEY_BYTES - WIDTH * WIDE)


@triton.jit(do_not_specialize=["items"])
def _unpack_scaled(packed, out, items, COUNT: tl.constexpr, ITEM_BYTES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    item = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    wanted = (item < items) & (column < COUNT)
    codes = tl.load(packed + item * ITEM_BYTES + column, mask=wanted, other=0)
    scales = (packed.to(tl.int64) + item * ITEM_BYTES + ITEM_BYTES - 4).to(INT32)
    scale = tl.load(scales, mask=item < items, other=0).to(tl.float32, bitcast=True)
    tl.store(out + item * COUNT + column, e4m3_values(codes) * scale, mask=wanted)


@triton.jit
def _load_wide(start, wanted, WIDE: tl.constexpr):
    """float32 values of addresses that hold bfloat16 (WIDE 2) or float32 (WIDE 4)."""
    if WIDE == 2:
        bits = tl.load(start.to(INT16), mask=wanted, other=0)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(start.to(INT32), mask=wanted, other=0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["items"])
def _unpack(
    packed, out, items, OFFSET: tl.constexpr, SCALES_OFFSET: tl.constexpr, QUANTIZED: tl.constexpr, WIDE: tl.constexpr,
    COUNT: tl.constexpr, ITEM_BYTES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    item = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    wanted = (item < items) & (column < COUNT)
    start = packed.to(tl.int64) + item * ITEM_BYTES
    if QUANTIZED:
        value = tl.load(packed.to(INT8, bitcast=True) + item * ITEM_BYTES + column, mask=wanted, other=0).to(tl.float32)
        scale = tl.load((start + SCALES_OFFSET + 2 * (column // GROUP)).to(FLOAT16), mask=wanted, other=0)
        x = value * scale.to(tl.float32)
    else:
        x = _load_wide(start + OFFSET + column * WIDE, wanted, WIDE)
    tl.store(out + item * COUNT + column, x, mask=wanted)


UNPACK_TILE = 2048  # values a program unpacks


def _padded(count: int) -> int:
    return int(triton.next_power_of_2(count))


def row_shape(layout: RowLayout) -> dict[str, int | bool]:
    return {
        "QUANTIZED": layout.encoding == "q8g64", "WIDE": 4 if layout.encoding == "f32" else 2, "LATENT": layout.latent,
        "ROPE": layout.rope, "SCALES_OFFSET": layout.scales_offset, "ROPE_OFFSET": layout.rope_offset, "ROW_BYTES": layout.row_bytes,
        "GROUPS_PADDED": _padded(max(layout.scale_groups, 1)), "LATENT_PADDED": _padded(layout.latent), "ROPE_PADDED": _padded(layout.rope),
    }  # fmt: skip


def key_shape(layout: KeyLayout) -> dict[str, int]:
    """WIDE: bytes of a value, 1 with a scale beside; PADDED: columns, which for keys with a scale include their padding."""
    wide = {"f32": 4, "bf16": 2, "e4m3": 1}[layout.encoding]
    columns = layout.values_bytes if layout.scale_bytes else layout.width
    return {"WIDE": wide, "WIDTH": layout.width, "KEY_BYTES": layout.key_bytes, "PADDED": _padded(columns)}


def _dense(values: Tensor) -> Tensor:
    return values if values.stride(-1) == 1 else values.contiguous()


def pack_rows(latent: Tensor, rope: Tensor, layout: RowLayout) -> Tensor:
    """See kernels/quantize."""
    packed = torch.empty((latent.shape[0], layout.row_bytes), dtype=torch.uint8, device=latent.device)
    _launch_rows(latent, rope, None, packed, 0, layout)
    return packed


def append_rows(latent: Tensor, rope: Tensor, destinations: Tensor, offset_bytes: int, layout: RowLayout) -> None:
    """See kernels/quantize. One launch; capturable."""
    _launch_rows(latent, rope, destinations, destinations, offset_bytes, layout)


def _launch_rows(latent: Tensor, rope: Tensor, destinations: Tensor | None, out: Tensor, offset_bytes: int, layout: RowLayout) -> None:
    latent, rope = _dense(latent), _dense(rope)
    if latent.shape[0] == 0:
        return
    appended = destinations is not None
    _pack_rows[(latent.shape[0],)](
        latent, rope, destinations if appended else out, out, latent.stride(0), rope.stride(0), offset_bytes, appended,
        **row_shape(layout),
    )  # fmt: skip


def pack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    """See kernels/quantize."""
    packed = torch.empty((keys.shape[0], layout.key_bytes), dtype=torch.uint8, device=keys.device)
    if keys.shape[0]:
        keys = _dense(keys)
        _pack_keys[(keys.shape[0],)](keys, packed, packed, keys.stride(0), 0, False, **key_shape(layout))
    return packed


def append_keys(keys: Tensor, destinations: Tensor, offset_bytes: int, layout: KeyLayout) -> None:
    """See kernels/quantize. One launch; capturable."""
    if keys.shape[0]:
        keys = _dense(keys)
        _pack_keys[(keys.shape[0],)](keys, destinations, destinations, keys.stride(0), offset_bytes, True, **key_shape(layout))


def _launch_unpack(packed: Tensor, count: int, wide: int, offset: int = 0, scales_offset: int = 0, quantized: bool = False) -> Tensor:
    """float32 [..., count] of one field of packed items [..., item_bytes]."""
    packed = packed.contiguous()
    out = torch.empty((*packed.shape[:-1], count), dtype=torch.float32, device=packed.device)
    items, padded = out.numel() // count, _padded(count)
    if items:
        tile = max(1, UNPACK_TILE // padded)
        grid = (triton.cdiv(items, tile),)
        _unpack[grid](packed, out, items, offset, scales_offset, quantized, wide, count, packed.shape[-1], padded, tile)
    return out


def unpack_rows(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """See kernels/quantize. Two launches."""
    wide = 4 if layout.encoding == "f32" else 2
    latent = _launch_unpack(rows, layout.latent, wide, 0, layout.scales_offset, layout.encoding == "q8g64")
    return latent, _launch_unpack(rows, layout.rope, wide, layout.rope_offset)


def unpack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    """See kernels/quantize."""
    if not layout.scale_bytes:
        return _launch_unpack(keys, layout.width, 4 if layout.encoding == "f32" else 2)
    packed, padded = keys.contiguous(), _padded(layout.width)
    out = torch.empty((*packed.shape[:-1], layout.width), dtype=torch.float32, device=packed.device)
    items, tile = out.numel() // layout.width, max(1, UNPACK_TILE // padded)
    if items:
        _unpack_scaled[(triton.cdiv(items, tile),)](packed, out, items, layout.width, layout.key_bytes, padded, tile)
    return out


_GLM = RowLayout("q8g64", 512, 64)
_APPEND = {"destinations": "*i64", "offset_bytes": "i32", "APPENDED": True}
_ROWS = {"latent": "*bf16", "rope": "*fp32", "latent_stride": "i32", "rope_stride": "i32", "out": "*u8"}
_UNPACK = {"packed": "*u8", "out": "*fp32", "items": "i32", "SCALES_OFFSET": _GLM.scales_offset, "ITEM_BYTES": _GLM.row_bytes, "WIDE": 2}
_KEYS = {"keys": "*fp32", "keys_stride": "i32", "out": "*u8"}
COMPILE = [
    (_pack_rows, {**_ROWS, **_APPEND, **row_shape(_GLM)}),
    (_pack_rows, {**_ROWS, **_APPEND, **row_shape(RowLayout("bf16", 512, 64)), "latent": "*fp32"}),
    (_pack_rows, {**_ROWS, **_APPEND, **row_shape(RowLayout("f32", 512, 64)), "APPENDED": False}),
    (_pack_keys, {**_KEYS, **_APPEND, **key_shape(KeyLayout("bf16", 128))}),
    (_pack_keys, {**_KEYS, **_APPEND, **key_shape(KeyLayout("f32", 128)), "APPENDED": False}),
    (_pack_keys, {**_KEYS, **_APPEND, **key_shape(KeyLayout("e4m3", 128))}),
    (_unpack_scaled, {"packed": "*u8", "out": "*fp32", "items": "i32", "COUNT": 128, "ITEM_BYTES": 132, "PADDED": 128, "TILE": 16}),
    (_unpack, {**_UNPACK, "QUANTIZED": True, "OFFSET": 0, "COUNT": 512, "PADDED": 512, "TILE": 4}),
    (_unpack, {**_UNPACK, "QUANTIZED": False, "OFFSET": _GLM.rope_offset, "COUNT": 64, "PADDED": 64, "TILE": 32}),
]
