"""Interpreted copies between devices: the reference's own tests, and rows of the model's size in many programs at once."""

import time

import interpreted
import torch

from kernels.replicate import kernel, reference


def many_rows_are_the_references() -> None:
    """Rows of 656 bytes, more than a program moves, some without source or target: equal bytes, in any order of programs."""
    generator = torch.Generator().manual_seed(4)
    here = torch.randint(0, 256, (50, 656), dtype=torch.uint8, generator=generator)
    rows = torch.randperm(50, generator=generator)[:37]
    sources = torch.tensor([here[row].data_ptr() for row in torch.randint(0, 50, (37,), generator=generator).tolist()])
    sources[5] = 0
    got = [torch.zeros((50, 656), dtype=torch.uint8) for _ in range(2)]
    for form, there in zip((reference, kernel), got, strict=True):
        targets = torch.tensor([there[row].data_ptr() for row in rows.tolist()])
        targets[9] = 0
        form.copy_rows(sources, targets, 656, 0, 0)
    interpreted.same("rows", got[1], got[0])


def main() -> None:
    begun = time.monotonic()
    many_rows_are_the_references()
    with interpreted.programs_backwards():
        many_rows_are_the_references()
    interpreted.run_reference_tests("test_replicate.py", without=())
    print(f"replicating: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
