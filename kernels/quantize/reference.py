"""The definition of packed rows and keys, in torch on the CPU.

Knows layouts and addresses; nothing of who holds the memory.

Invariants (q8g64):
1. scale = float16(min(amax / 127, 65504)) of each group of 64 latent values (the last may be shorter); a value is
   round-half-even(x / float32(scale)) clamped to +-127. Values are divided by the *rounded* scale.
2. A group whose scale rounds to 0 (amax below 127 * 2^-25) is all zeros. No division by zero is ever formed.
3. A group with a NaN or an infinity gets a NaN scale and zero values, so all of it unpacks to NaN: it cannot vanish.
4. Every byte of a packed row is written; bytes between fields and after the RoPE key are zero.
5. bf16 and f32 fields are plain conversions: NaN stays NaN (in bf16 always 0x7FC0), what exceeds bfloat16 becomes infinite.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.address import store_at
from kernels.layout import SCALE_GROUP, KeyLayout, RowLayout

__all__ = ["append_keys", "append_rows", "pack_keys", "pack_rows", "unpack_keys", "unpack_rows"]

_SCALE_MAX = torch.finfo(torch.float16).max  # 65504
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


def pack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    packed = torch.zeros((keys.shape[0], layout.key_bytes), dtype=torch.uint8)
    stored = _as_bytes(_as_wide(keys, _WIDE[layout.encoding]))
    packed[:, : stored.shape[-1]] = stored
    return packed


def unpack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    wide = _WIDE[layout.encoding]
    return _from_bytes(keys[..., : layout.width * wide.itemsize], wide).float()


def _store(packed: Tensor, destinations: Tensor, offset_bytes: int) -> None:
    kept = destinations != 0
    store_at(destinations[kept] + offset_bytes, packed[kept])


def append_rows(latent: Tensor, rope: Tensor, destinations: Tensor, offset_bytes: int, layout: RowLayout) -> None:
    _store(pack_rows(latent, rope, layout), destinations, offset_bytes)


def append_keys(keys: Tensor, destinations: Tensor, offset_bytes: int, layout: KeyLayout) -> None:
    _store(pack_keys(keys, layout), destinations, offset_bytes)
