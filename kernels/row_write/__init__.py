"""What a layer keeps of new positions: from a projection's output to packed bytes where they belong, a launch for rows and one for keys.

`reference.py` is the definition, the operations one after another; `kernel.py` does them in registers: small launches in a row cost more
than what they move, and a step has some ten rows and keys to write.
"""

from torch import Tensor

from kernels.layout import KeyLayout, RowLayout
from kernels.place import on_cpu
from kernels.row_write import reference

__all__ = ["write_keys", "write_rows"]


def _check(projected: Tensor, rope_table: tuple[Tensor, Tensor], destinations: Tensor, positions: Tensor | None, weight: Tensor) -> None:
    rows = projected.shape[:1]
    assert destinations.shape == rows, f"{tuple(destinations.shape)} destinations for {rows[0]} rows"
    assert positions is None or positions.shape == rows, f"positions of {tuple(positions.shape)} for {rows[0]} rows"
    assert rope_table[0].shape[:1] == rows, f"a RoPE table of {rope_table[0].shape[0]} rows for {rows[0]}"
    assert projected.dtype == weight.dtype == rope_table[0].dtype, f"{projected.dtype}, {weight.dtype} and {rope_table[0].dtype} mixed"


def write_rows(
    projected: Tensor, weight: Tensor, eps: float, rope_table: tuple[Tensor, Tensor], destinations: Tensor, offset_bytes: int,
    layout: RowLayout, positions: Tensor | None = None,
) -> None:  # fmt: skip
    """RMS-norm the latent, rotate the RoPE key, pack, and store each row at `destinations[t] + offset_bytes`.

    projected     [T, R + Dr]   float  device  the row product's output
    weight        [R]           projected's dtype  of the latent's norm
    rope_table    2 x [T, Dr / 2]  projected's dtype  cosines, sines
    destinations  [T]           int64  device  address of the row in layer 0; 0: padding, nothing is stored; others distinct
    positions     [T] or None   int64  device  if given, a row at position 0 is stored as zeros
    offset_bytes                distance from layer 0 to this layer
    """
    _check(projected, rope_table, destinations, positions, weight)
    assert projected.shape[1] == layout.latent + layout.rope, f"rows of {projected.shape[1]} values do not fit {layout}"
    assert 2 * rope_table[0].shape[1] == layout.rope, f"a RoPE table of {rope_table[0].shape[1]} pairs for {layout}"
    if on_cpu("write_rows", projected):
        reference.write_rows(projected, weight, eps, rope_table, destinations, offset_bytes, layout, positions)
    else:
        from kernels.row_write import kernel

        kernel.write_rows(projected, weight, eps, rope_table, destinations, offset_bytes, layout, positions)


def write_keys(
    projected: Tensor, weight: Tensor, bias: Tensor, eps: float, rope_table: tuple[Tensor, Tensor], destinations: Tensor,
    offset_bytes: int, pages: Tensor, layout: KeyLayout, positions: Tensor | None = None,
) -> None:  # fmt: skip
    """LayerNorm index keys, rotate their first values, pack, and store each in its block and in its page.

    projected     [T, Di]       float  device  the key product's output
    weight, bias  [Di]          projected's dtype  of the keys' norm
    rope_table    2 x [T, Dr / 2]  projected's dtype  cosines, sines; Dr at most Di
    destinations  [T]           int64  device  address of the key in key layer 0 of its block; 0: padding, nothing is stored there
    pages         [T]           int64  device  address of the key in its page; 0: likewise. Addresses other than 0 are distinct
    positions     [T] or None   int64  device  if given, a key at position 0 is stored as zeros
    offset_bytes                distance from key layer 0 to this one, in the block alone
    """
    _check(projected, rope_table, destinations, positions, weight)
    assert projected.shape[1] == layout.width, f"keys of {projected.shape[1]} values do not fit {layout}"
    assert 2 * rope_table[0].shape[1] <= layout.width, f"a RoPE table of {rope_table[0].shape[1]} pairs for {layout}"
    assert pages.shape == destinations.shape, f"{tuple(pages.shape)} pages for {tuple(destinations.shape)} destinations"
    if on_cpu("write_keys", projected):
        reference.write_keys(projected, weight, bias, eps, rope_table, destinations, offset_bytes, pages, layout, positions)
    else:
        from kernels.row_write import kernel

        kernel.write_keys(projected, weight, bias, eps, rope_table, destinations, offset_bytes, pages, layout, positions)
