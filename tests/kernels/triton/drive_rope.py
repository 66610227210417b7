"""Interpreted rotation: the reference's own tests, then strided slices bit for bit."""

import interpreted
import torch

from kernels.rope import kernel, reference


def slices_are_rotated_to_the_bit() -> None:
    """A slice of a wider [rows, heads, width] tensor, of 1 to 9 heads, has the reference's float32 bits."""
    torch.manual_seed(1)
    for heads, rope in ((1, 2), (8, 6), (9, 64)):
        x = torch.randn(3, heads, rope + 10)[..., 7 : 7 + rope]
        cos, sin = reference.rope_table(torch.tensor([0, 1, 1_048_575]), reference.rope_frequencies(8e6, rope), torch.float32)
        interpreted.same(f"{heads} heads of {rope}", kernel.rotate(x, cos, sin), reference.rotate(x, cos, sin))


def tables_are_correctly_rounded() -> None:
    """Cosines and sines are the exact ones rounded to float32, whatever the number of pairs."""
    from tests.kernels.test_rope import FAR, rounded_table

    for theta, width in ((8e6, 64), (1e6, 6), (1e4, 2)):
        frequencies = reference.rope_frequencies(theta, width)
        for got, wanted in zip(kernel.rope_table(FAR, frequencies, torch.float32), rounded_table(FAR, frequencies), strict=True):
            interpreted.same(f"{width // 2} pairs", got, wanted)


def main() -> None:
    tables_are_correctly_rounded()
    slices_are_rotated_to_the_bit()
    # The interpreter cuts a bf16 where a device rounds it.
    interpreted.run_reference_tests("test_rope.py", without=("company", "casts_last"))


if __name__ == "__main__":
    main()
