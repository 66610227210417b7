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


def main() -> None:
    slices_are_rotated_to_the_bit()
    interpreted.run_reference_tests("test_rope.py", without=("company",))


if __name__ == "__main__":
    main()
