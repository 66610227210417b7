"""The definition of packed rows and keys, in torch on the CPU.

Knows layouts and addresses; nothing of who holds the memory.

Invariants (q8g64):
1. scale = float16(min(amax / 127, 65504)) of each group of 64 latent values (the last may be shorter); a value is
   round-half-even(x / float32(scale)) clamped to +-127. Values are divided by the *rounded* scale.
2. A group whose scale rounds to 0 (amax below 127 * 2^-25) is all zeros. No division by zero is ever formed.
3. A group with a NaN or an infinity gets a NaN scale and zero values, so all of it unpacks to NaN: it cannot vanish.
4. Every byte of a packed row is written; bytes between fields and after the RoPE key are zero.
5. bf16 and f32 fields are plain conversions: NaN stays NaN (in bf16 always 0x7FC0), what exceeds bfloat16 becomes infinite.

Invariants (e4m3 keys):
1. scale = amax / 448 of the key's values in float32, 0 where that is below float32's smallest normal number; a value is the nearest e4m3fn,
   ties to even, of x / scale clamped to +-448. A scale of 0 makes all values zeros.
2. A key with a NaN or an infinity gets the scale NaN (0x7FC00000) and zeros.
3. A value times its scale is what the key is; the code 0x7F (NaN) is never written.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.address import store_at, store_values_at
from kernels.layout import BLOCK_ROWS, SCALE_GROUP, KeyLayout, RowLayout

__all__ = ["append_keys", "append_rows", "pack_keys", "pack_rows", "stored_keys", "unpack_keys", "unpack_rows"]

_SCALE_MAX = torch.finfo(torch.float16).max  # 65504
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_TINY = torch.finfo(torch.float32).tiny
_WIDE = {"q8g64": torch.bfloat16, "bf16": torch.bfloat16, "f32": torch.float32}  # dtype of what is not quantised


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.contiguous().view(dtype)


def _as_wide(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert; a NaN that narrows gets one bit pattern (torch's vector body and scalar tail give two, so a row would not pack alike)."""
    narrowed = values.float().to(dtype)
    return narrowed.masked_fill(narrowed.isnan(), float("nan")) if dtype == torch.bfloat16 else narrowed


def _quantize(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Latent f32 [T, R] to int8 [T, R] and scales float16 [T, groups]."""
    rows, width = latent.shape
    groups = -(-width // SCALE_GROUP)
    grouped = pad(latent, (0, groups * SCALE_GROUP - width)).view(rows, groups, SCALE_GROUP)
    finite = grouped.isfinite().all(dim=-1)
    grouped = torch.where(finite[..., None], grouped, 0.0)
    scales = (grouped.abs().amax(dim=-1) / 127.0).clamp(max=_SCALE_MAX).to(torch.float16)
    divisor = torch.where(scales > 0, scales.float(), float("inf"))  # x / inf = 0: an all-zero group without a branch
    values = (grouped / divisor[..., None]).round().clamp(-127, 127).to(torch.int8)
    return values.view(rows, groups * SCALE_GROUP)[:, :width], scales.masked_fill(~finite, float("nan"))


def pack_rows(latent: Tensor, rope: Tensor, layout: RowLayout) -> Tensor:
    rows = latent.shape[0]
    packed = torch.zeros((rows, layout.row_bytes), dtype=torch.uint8)
    wide = _WIDE[layout.encoding]
    if layout.encoding == "q8g64":
        values, scales = _quantize(latent.float())
        packed[:, : layout.latent_bytes] = _as_bytes(values)
        packed[:, layout.scales_offset : layout.rope_offset] = _as_bytes(scales)
    else:
        packed[:, : layout.latent_bytes] = _as_bytes(_as_wide(latent, wide))
    rope_bytes = _as_bytes(_as_wide(rope, wide))
    packed[:, layout.rope_offset : layout.rope_offset + rope_bytes.shape[-1]] = rope_bytes
    return packed


def unpack_rows(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    wide = _WIDE[layout.encoding]
    stored = rows[..., : layout.latent_bytes]
    if layout.encoding == "q8g64":
        scales = _from_bytes(rows[..., layout.scales_offset : layout.rope_offset], torch.float16).float()
        groups, lead = layout.scale_groups, rows.shape[:-1]
        values = pad(_from_bytes(stored, torch.int8).float(), (0, groups * SCALE_GROUP - layout.latent))
        latent = (values.view(*lead, groups, SCALE_GROUP) * scales[..., None]).view(values.shape)[..., : layout.latent].contiguous()
    else:
        latent = _from_bytes(stored, wide).float()
    rope_bytes = layout.rope * wide.itemsize
    return latent, _from_bytes(rows[..., layout.rope_offset : layout.rope_offset + rope_bytes], wide).float()


def _scaled(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys f32 [T, width] to e4m3fn [T, width] and scales f32 [T, 1]."""
    finite = keys.isfinite().all(-1, keepdim=True)
    keys = torch.where(finite, keys, 0.0)
    scales = keys.abs().amax(-1, keepdim=True) / _E4M3_MAX
    scales = torch.where(scales < _TINY, 0.0, scales)
    divisor = torch.where(scales > 0, scales, float("inf"))
    values = (keys / divisor).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return values, scales.masked_fill(~finite, float("nan"))


def pack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    packed = torch.zeros((keys.shape[0], layout.key_bytes), dtype=torch.uint8)
    if layout.encoding == "e4m3":
        values, scales = _scaled(keys.float())
        packed[:, : layout.width] = _as_bytes(values)
        packed[:, layout.values_bytes :] = _as_bytes(scales)
        return packed
    stored = _as_bytes(_as_wide(keys, _WIDE[layout.encoding]))
    packed[:, : stored.shape[-1]] = stored
    return packed


def unpack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    if layout.encoding == "e4m3":
        scales = _from_bytes(keys[..., layout.values_bytes :], torch.float32)
        return _from_bytes(keys[..., : layout.width], torch.float8_e4m3fn).float() * scales
    wide = _WIDE[layout.encoding]
    return _from_bytes(keys[..., : layout.width * wide.itemsize], wide).float()


def _store(packed: Tensor, destinations: Tensor, offset_bytes: int) -> None:
    kept = destinations != 0
    store_at(destinations[kept] + offset_bytes, packed[kept])


def append_rows(latent: Tensor, rope: Tensor, destinations: Tensor, offset_bytes: int, layout: RowLayout) -> None:
    _store(pack_rows(latent, rope, layout), destinations, offset_bytes)


def append_keys(keys: Tensor, destinations: Tensor, offset_bytes: int, layout: KeyLayout) -> None:
    packed = pack_keys(keys, layout)
    if not layout.scale_bytes:
        _store(packed, destinations, offset_bytes)
        return
    assert offset_bytes % BLOCK_ROWS == 0, f"{offset_bytes} bytes are no distance between runs of keys"
    kept = destinations != 0
    number = destinations[kept] % BLOCK_ROWS
    run = destinations[kept] - number + offset_bytes
    store_at(run + number * layout.values_bytes, packed[kept, : layout.values_bytes])
    scales = packed[kept, layout.values_bytes :].contiguous().view(torch.int32)[:, 0]
    store_values_at(run + BLOCK_ROWS * layout.values_bytes + number * layout.scale_bytes, scales)


def stored_keys(runs: Tensor, layout: KeyLayout) -> Tensor:
    by_run = runs.view(-1, layout.run_bytes)
    values = by_run[:, : BLOCK_ROWS * layout.values_bytes].unflatten(1, (BLOCK_ROWS, layout.values_bytes))
    scales = by_run[:, BLOCK_ROWS * layout.values_bytes :].unflatten(1, (BLOCK_ROWS, layout.scale_bytes))
    return torch.cat((values, scales), 2).flatten(0, 1) if layout.scale_bytes else values.flatten(0, 1)
