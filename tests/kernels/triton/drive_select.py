"""Interpreted selection: the reference's own tests with small chunks, then chunks' edges and rows that end before them."""

import interpreted
import torch

from kernels.select import kernel, reference, room


def compare(scores: torch.Tensor, first: list[int], last: list[int], k: int) -> None:
    """Kernel and reference choose the same, over a poisoned output."""
    told = []
    for form in (kernel, reference):
        out = torch.full((scores.shape[0], k), 9_999, dtype=torch.int32)
        form.select(scores, torch.tensor(first), torch.tensor(last), k, out)
        told.append(out)
    interpreted.same(f"{first} to {last}, {k}", told[0], told[1])


def ranges_across_chunks() -> None:
    """Ranges that begin, end and tie at the edges of chunks, with poison outside them, give the reference's selection."""
    torch.manual_seed(4)
    edge = kernel.CHUNK
    scores = torch.randint(-3, 3, (6, 3 * edge + 7)).float()
    first = [0, edge - 1, edge, 2 * edge + 1, 5, 3 * edge + 6]
    last = [edge, edge + 1, 3 * edge + 7, 2 * edge + 1, edge + 5, 3 * edge + 7]
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        scores[row, :begin], scores[row, end:] = float("nan"), float("inf")
    scores[2, edge : 3 * edge : 3] = float("nan")
    for k in (1, 63, 65):
        compare(scores, first, last, k)


def cuts_in_every_digit() -> None:
    """Scores far too small, too large, negative, of any bits, or all alike: the cut lies in digits that hold many integers."""
    torch.manual_seed(6)
    drawn = torch.randn(2, 600)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (2, 600)).int().view(torch.float32)
    near_zero = torch.where(drawn > 0, drawn * 1e-9, -0.0)
    for scores in (drawn, drawn + 10, drawn * 1e30, -drawn.abs() - 1e-3, any_bits, near_zero, (drawn * 4).round()):
        compare(scores, [0, 5], [600, 550], 130)


def more_candidates_than_the_list_holds() -> None:
    """Many scores with the cut's first digit, in a list too short for them, or longer than one look: nothing is lost."""
    drawn = torch.randn(2, 600)
    tile, most = kernel.CANDIDATES_TILE, room.CANDIDATES_MAX
    kernel.CANDIDATES_TILE = 128
    for room.CANDIDATES_MAX in (most, 40):
        for scores in (drawn + 1e4, drawn * 1e-9):
            compare(scores, [0, 5], [600, 550], 130)
    kernel.CANDIDATES_TILE, room.CANDIDATES_MAX = tile, most


def order_of_programs_is_free() -> None:
    """Launches whose programs run last to first choose the same."""
    scores = torch.randint(0, 9, (2, 1000)).float()
    with interpreted.programs_backwards():
        compare(scores, [0, 3], [1000, 999], 100)
        compare(torch.randn(2, 1000), [0, 3], [1000, 999], 100)


def main() -> None:
    kernel.CHUNK, whole = 64, kernel.CHUNK
    ranges_across_chunks()
    order_of_programs_is_free()
    kernel.CHUNK = 256
    cuts_in_every_digit()
    more_candidates_than_the_list_holds()
    kernel.CHUNK = whole
    scores = torch.randn(2, 2 * whole + 1)
    compare(scores, [0, 1], [2 * whole + 1, whole + 1], 2048)
    kernel.CANDIDATES_TILE = 8192  # the interpreter takes as long for a look at few
    interpreted.run_reference_tests("test_select.py", without=("long_rows", "many_bands", "company", "64"))


if __name__ == "__main__":
    main()
