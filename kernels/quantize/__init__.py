"""Pack rows and index keys into the bytes that every reader sees, unpack them, and store them where they belong.

A row is quantised once, here; afterwards only its bytes travel. `reference.py` is the definition, arithmetic
included; `kernel.py` gives the same bytes on a device.

Choices:
1. A non-finite input spoils its whole group of 64 (NaN scale) instead of being clamped: a broken layer must not look healthy.
2. A scale that rounds to zero drops values below 3.8e-6 in magnitude; float16's subnormal scales are used as they are.
3. A scale above float16's range saturates: values beyond 65504 * 127 = 8.3e6 are clamped.
4. An e4m3 key has one float32 scale, amax / 448 and not the power of two above it that others take: a key's values then reach the largest
   code, which at the same width costs nothing, and a key lies below 5e-36 before its scale becomes zero.
"""

from torch import Tensor

from kernels.layout import KeyLayout, RowLayout
from kernels.place import on_cpu
from kernels.quantize import reference

__all__ = ["append_keys", "append_rows", "pack_keys", "pack_rows", "stored_keys", "unpack_keys", "unpack_rows"]


def pack_rows(latent: Tensor, rope: Tensor, layout: RowLayout) -> Tensor:
    """Quantise and pack one row each.

    latent   [T, R]          any float  device
    rope     [T, Dr]         any float  device  after rotation
    returns  [T, row_bytes]  uint8      device  written in full; padding is zero
    """
    assert latent.shape == (rope.shape[0], layout.latent), f"latent {tuple(latent.shape)} does not fit {layout}"
    assert rope.shape[1] == layout.rope, f"rope {tuple(rope.shape)} does not fit {layout}"
    if on_cpu("pack_rows", latent):
        return reference.pack_rows(latent, rope, layout)
    from kernels.quantize import kernel

    return kernel.pack_rows(latent, rope, layout)


def unpack_rows(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Values of packed rows.

    rows     [..., row_bytes]  uint8  device
    returns  [..., R] float32 latent and [..., Dr] float32 RoPE key, contiguous
    """
    assert rows.shape[-1] == layout.row_bytes, f"rows of {rows.shape[-1]} bytes, not {layout.row_bytes}"
    if on_cpu("unpack_rows", rows):
        return reference.unpack_rows(rows, layout)
    from kernels.quantize import kernel

    return kernel.unpack_rows(rows, layout)


def pack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    """Pack index keys.

    keys     [T, Di]         any float  device  after rotation
    returns  [T, key_bytes]  uint8      device  a key's values, zero padding, and its scale if it has one; written in full
    """
    assert keys.shape[1] == layout.width, f"keys {tuple(keys.shape)} do not fit {layout}"
    if on_cpu("pack_keys", keys):
        return reference.pack_keys(keys, layout)
    from kernels.quantize import kernel

    return kernel.pack_keys(keys, layout)


def unpack_keys(keys: Tensor, layout: KeyLayout) -> Tensor:
    """Values of packed keys, times their scales.

    keys     [..., key_bytes]  uint8  device  as `pack_keys` and `stored_keys` have them
    returns  [..., Di]         f32    device  contiguous
    """
    assert keys.shape[-1] == layout.key_bytes, f"keys of {keys.shape[-1]} bytes, not {layout.key_bytes}"
    if on_cpu("unpack_keys", keys):
        return reference.unpack_keys(keys, layout)
    from kernels.quantize import kernel

    return kernel.unpack_keys(keys, layout)


def append_rows(latent: Tensor, rope: Tensor, destinations: Tensor, offset_bytes: int, layout: RowLayout) -> None:
    """Pack rows and store each at `destinations[t] + offset_bytes`.

    latent        [T, R]   any float  device
    rope          [T, Dr]  any float  device
    destinations  [T]      int64      device  address of the row in layer 0; 0: padding, nothing is stored; others distinct
    offset_bytes           distance from layer 0 to this layer (`BlockLayout.row_offset(layer)`)
    """
    assert destinations.shape == (latent.shape[0],), f"{tuple(destinations.shape)} destinations for {latent.shape[0]} rows"
    assert latent.shape == (rope.shape[0], layout.latent), f"latent {tuple(latent.shape)} does not fit {layout}"
    if on_cpu("append_rows", latent):
        reference.append_rows(latent, rope, destinations, offset_bytes, layout)
    else:
        from kernels.quantize import kernel

        kernel.append_rows(latent, rope, destinations, offset_bytes, layout)


def append_keys(keys: Tensor, destinations: Tensor, offset_bytes: int, layout: KeyLayout) -> None:
    """Pack index keys and store each at `destinations[t] + offset_bytes`.

    keys          [T, Di]  any float  device
    destinations  [T]      int64      device  a key's address each (`KeyLayout`); 0: padding, nothing is stored; others distinct
    offset_bytes           key_layer * BlockLayout.key_layer_bytes for a block's keys, 0 for a page's
    """
    assert destinations.shape == (keys.shape[0],), f"{tuple(destinations.shape)} destinations for {keys.shape[0]} keys"
    if on_cpu("append_keys", keys):
        reference.append_keys(keys, destinations, offset_bytes, layout)
    else:
        from kernels.quantize import kernel

        kernel.append_keys(keys, destinations, offset_bytes, layout)


def stored_keys(runs: Tensor, layout: KeyLayout) -> Tensor:
    """The keys of whole runs, each key's bytes together.

    runs     [..., n * run_bytes]  uint8  anywhere  contiguous; a page's 16 runs, or one of a block
    returns  [64 * n, key_bytes]   uint8  there     as `pack_keys` has them; a view where keys lie so
    """
    return reference.stored_keys(runs, layout)
