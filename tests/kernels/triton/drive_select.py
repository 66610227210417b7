"""Interpreted selection: the reference's own tests with small chunks, then chunks' edges and rows that end before them."""

import interpreted
import torch

from kernels.select import kernel, reference


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
    for k in interpreted.some((63, 1, 65), 3):
        compare(scores, first, last, k)


def order_of_programs_is_free() -> None:
    """Launches whose programs run last to first choose the same."""
    scores = torch.randint(0, 9, (2, 1000)).float()
    with interpreted.programs_backwards():
        compare(scores, [0, 3], [1000, 999], 100)


def tallies_in_several_goes() -> None:
    """Rows of more chunks than are added at a time, from any chunk on, also one that begins below 0, choose the same."""
    whole, kernel._CHUNKS_BLOCK = kernel._CHUNKS_BLOCK, 4
    chunk = kernel.CHUNK
    scores = torch.randint(0, 9, (4, 16 * chunk)).float()
    for k in (10, 300):
        compare(scores, [0, 5 * chunk + 1, 11 * chunk, -3 * chunk], [16 * chunk, 1000, 12 * chunk, 700], k)
    kernel._CHUNKS_BLOCK = whole


def main() -> None:
    kernel.CHUNK, whole = 64, kernel.CHUNK
    ranges_across_chunks()
    order_of_programs_is_free()
    if interpreted.WHOLE:
        tallies_in_several_goes()
    kernel.CHUNK = whole
    scores = torch.randn(2, 2 * whole + 1)
    compare(scores, [0, 1], [2 * whole + 1, whole + 1], 2048)
    interpreted.run_reference_tests("test_select.py", without=("long_rows", "many_bands", "company", "64"))


if __name__ == "__main__":
    main()
