"""Interpreted packing: the reference's own tests, and the same bytes for values of every kind."""

import math
import time

import interpreted
import torch

from kernels.layout import KeyLayout, RowLayout
from kernels.quantize import kernel, reference

LAYOUTS = [RowLayout("q8g64", 512, 64), RowLayout("q8g64", 77, 6), RowLayout("bf16", 24, 8), RowLayout("f32", 33, 5)]


def hostile(rows: int, width: int, seed: int) -> torch.Tensor:
    """Values of any magnitude, subnormal to nearly infinite, halves between two steps, zeros of both signs, and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**31), 2**31 - 1, (rows, width), generator=generator).int().view(torch.float32).clone()
    values[: rows // 2] = torch.randn(rows // 2, width, generator=generator) * torch.logspace(-12, 12, rows // 2)[:, None]
    values[0] = torch.arange(width) / 2 - 31.5  # scale 1/2 apart: ties at every other value
    values[1, ::3] = -0.0
    values[2, 1] = math.nan
    values[3, width - 1] = -math.inf
    values[4] = 65519.0 * 127
    return values


def bytes_are_the_references(layout: RowLayout) -> None:
    """Packed bytes are equal whatever the values, their dtype and their strides; unpacked values too, NaN being NaN."""
    latent, rope = hostile(12, layout.latent, seed=layout.latent), hostile(12, layout.rope, seed=layout.rope + 1)
    packed = reference.pack_rows(latent, rope, layout)
    interpreted.same(f"{layout}", kernel.pack_rows(latent, rope, layout), packed)
    turned = kernel.pack_rows(latent.T.contiguous().T, torch.cat([rope, rope], dim=1)[:, : layout.rope], layout)
    interpreted.same(f"{layout}, strided", turned, packed)
    half = latent.bfloat16()
    interpreted.same(f"{layout}, bf16", kernel.pack_rows(half, rope, layout), reference.pack_rows(half, rope, layout))
    for name, got, wanted in zip(
        ("latent", "rope"), kernel.unpack_rows(packed, layout), reference.unpack_rows(packed, layout), strict=True
    ):
        interpreted.same(f"{layout} {name} NaN", got.isnan(), wanted.isnan())
        interpreted.same(f"{layout} {name}", got.nan_to_num(0.0), wanted.nan_to_num(0.0))


def key_bytes_are_the_references() -> None:
    """Keys of every kind pack to equal bytes."""
    for layout in (KeyLayout("bf16", 128), KeyLayout("bf16", 5), KeyLayout("f32", 33)):
        keys = hostile(9, layout.width, seed=layout.width)
        interpreted.same(f"{layout}", kernel.pack_keys(keys, layout), reference.pack_keys(keys, layout))


def main() -> None:
    begun = time.monotonic()
    for layout in LAYOUTS:
        bytes_are_the_references(layout)
    key_bytes_are_the_references()
    interpreted.run_reference_tests(
        "test_quantize.py", without=("depend_on_its_company", "error_is_at_most", "what_was_unpacked", "rounded_scale")
    )
    print(f"packing: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
