"""Interpreted index queries: a product and a rotation in one launch have the bits of two, and what is to be zero is, whatever the shape."""

import company
import interpreted
import torch

from kernels.index_query import kernel
from kernels.linear import kernel as product
from kernels.rope import kernel as rope
from kernels.rope import reference as rope_reference


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def one_launch_has_the_bits_of_two(rows: int, heads: int, width: int, pairs: int, latent: int, cleared: int) -> None:
    """Strided latents, heads that end within a tile, a rotation of some or all of a head, scratch smaller and larger than the launch."""
    x, weight = drawn(rows, latent + 9, seed=rows)[:, 9:], drawn(heads * width, latent, seed=heads)
    table = rope_reference.rope_table(torch.arange(rows) * 7919, rope_reference.rope_frequencies(8e6, 2 * pairs), torch.bfloat16)
    scratch = torch.full((cleared + 3,), 77, dtype=torch.int32)
    got = kernel.index_query(x, weight, width, *table, scratch[:cleared] if cleared else None)
    wanted = rope.rotate_first(product.linear(x, weight).view(rows, heads, width), *table)
    interpreted.same(f"{rows} rows of {heads} x {width}, {pairs} pairs", got.view(torch.int16), wanted.view(torch.int16))
    assert scratch.tolist() == [0] * cleared + [77] * 3, f"{cleared} values to clear"


def main() -> None:
    one_launch_has_the_bits_of_two(3, 4, 32, 8, 200, 5)
    one_launch_has_the_bits_of_two(17, 3, 20, 10, 130, 1000)
    one_launch_has_the_bits_of_two(1, 1, 8, 1, 64, 0)
    x, weight = drawn(5, 96, seed=2), drawn(48, 96, seed=3)
    cos, sin = rope_reference.rope_table(torch.arange(5), rope_reference.rope_frequencies(1e4, 8), torch.bfloat16)
    company.row_invariant(lambda picked: kernel.index_query(x[picked], weight, 24, cos[picked], sin[picked], None), 5, (2, 17))
    assert not kernel.fits(x.float(), weight, 24), "float32 has no rounding between product and rotation"
    assert kernel.fits(x, weight, 24), "bf16 under bf16 is made in one launch"
    assert not kernel.fits(x, weight, 3), "a pair would lie in two heads"


if __name__ == "__main__":
    main()
