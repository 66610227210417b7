"""What a layer keeps of new positions: from a projection's output to packed bytes where they belong, in one launch.

`reference.py` is the definition, the operations one after another; `kernel.py` does them in registers: small launches in a row cost more
than what they move, and a step has some ten rows and keys to write.
"""

from torch import Tensor

from kernels.place import on_cpu
from kernels.row_write import reference
from kernels.row_write.source import NewKeys, NewRows

__all__ = ["NewKeys", "NewRows", "write_keys", "write_layer", "write_rows"]


def write_rows(new: NewRows, rope_table: tuple[Tensor, Tensor], positions: Tensor | None = None) -> None:
    """RMS-norm the latent, rotate the RoPE key, pack, and store each row where `new` says.

    rope_table  2 x [T, Dr / 2]  the projection's dtype  cosines, sines
    positions   [T] or None      int64                   if given, a row at position 0 is stored as zeros
    """
    new.check(rope_table, positions)
    assert new.copies is None, "only a whole layer's rows have copies"
    if on_cpu("write_rows", new.projected):
        reference.write_rows(new, rope_table, positions)
    else:
        from kernels.row_write import kernel

        kernel.write_rows(new, rope_table, positions)


def write_keys(new: NewKeys, rope_table: tuple[Tensor, Tensor], positions: Tensor | None = None) -> None:
    """LayerNorm index keys, rotate their first values, pack, and store each in its block and in its page.

    rope_table  2 x [T, Dr / 2]  the projection's dtype  cosines, sines; Dr at most Di
    positions   [T] or None      int64                   if given, a key at position 0 is stored as zeros
    """
    new.check(rope_table, positions)
    if on_cpu("write_keys", new.projected):
        reference.write_keys(new, rope_table, positions)
    else:
        from kernels.row_write import kernel

        kernel.write_keys(new, rope_table, positions)


def write_layer(
    latent: Tensor, weight: Tensor, eps: float, rows: NewRows, keys: NewKeys | None, head_weights: Tensor | None,
    rope_table: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """All that follows the products of a layer's input: rows (copies too) and keys written, the query latent normed, head weights widened.

    latent        [T, Rq]         float  values of a row side by side
    weight        [Rq]            latent's dtype  of its RMSNorm
    keys          None for a layer without an indexer, as are head_weights
    head_weights  [T, I] or None  latent's dtype
    returns       [T, Rq] normed latents, contiguous; [T, I] float32 or None
    """
    rows.check(rope_table, None)
    assert latent.shape == (rows.projected.shape[0], weight.shape[0]), f"latents of {tuple(latent.shape)}"
    assert (keys is None) == (head_weights is None), "keys and head weights come together"
    if keys is not None:
        keys.check(rope_table, None)
    if on_cpu("write_layer", latent):
        return reference.write_layer(latent, weight, eps, rows, keys, head_weights, rope_table)
    from kernels.row_write import kernel

    return kernel.write_layer(latent, weight, eps, rows, keys, head_weights, rope_table)
