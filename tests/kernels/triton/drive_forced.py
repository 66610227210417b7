"""Interpreted forced picks: the reference's own tests, then many picks, pieces of a row, and any order of programs."""

import interpreted
import torch

from kernels.forced import force_picks, kernel, reference


def pieces_of_a_row() -> None:
    """Rows of several pieces, whole and ragged, are the reference's pick for pick."""
    positions = torch.tensor([0, 2_047, 2_048, 3_000, 50_023, 2**20, 5])
    for picks, fresh in ((2048, 20), (2047, 2047), (1025, 1)):
        told = [torch.full((7, picks), 9, dtype=torch.int32) for _ in range(2)]
        reference.force_picks(positions, fresh, told[0])
        with interpreted.programs_backwards():
            force_picks(positions, fresh, told[1])
        interpreted.same(f"{fresh} of {picks}", told[1], told[0])


def main() -> None:
    pieces_of_a_row()
    kernel._BLOCK = 16
    interpreted.run_reference_tests("test_force_picks.py", without=())


if __name__ == "__main__":
    main()
