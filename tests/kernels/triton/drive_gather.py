"""Interpreted gathers: the reference's own tests, whole random steps, and rows of the model's true size."""

import time

import interpreted
import torch

from kernels.gather import gather_blocks, gather_rows, kernel
from tests.kernels.round_world import LAYOUT, POISON, ROW_BYTES, PlainSession, Step


def random_steps(steps: int) -> None:
    """Whole steps of two sessions and padding, planned and gathered by kernels: every pick's bytes are its row's, maps stay whole."""
    generator = torch.Generator().manual_seed(1)
    sessions: list[PlainSession | None] = [PlainSession(300, 9, 1), PlainSession(300, 6, 2), None]
    for one, rows, mirrored in ((sessions[0], 200, 128), (sessions[1], 70, 64)):
        assert one is not None
        one.grow(rows, mirrored)
    for index in range(steps):
        place_of = [0, 1, 2, 1] if index % 2 else [1, -1, 0, 0]
        ends = torch.tensor([1 if place in (2, -1) else sessions[place].logical for place in place_of])  # type: ignore[union-attr]
        selection = (torch.rand(4, 6, generator=generator) * ends[:, None]).int() // 8 * 8
        selection[torch.rand(4, 6, generator=generator) < 0.2] = -1
        Step(sessions, place_of, selection).run(scratch_rows=(None, 0, 2, 24)[index % 4])


def true_rows() -> None:
    """Rows of 656 bytes at any 16-byte boundary, absent rows among them, over tiles that the last one does not fill."""
    generator = torch.Generator().manual_seed(2)
    memory = torch.randint(0, 256, (40 * 656,), dtype=torch.uint8, generator=generator)
    starts = torch.randint(0, 39 * 41, (21,), generator=generator) * 16
    addresses = memory.data_ptr() + starts
    addresses[[0, 7, 20]] = 0
    out = torch.full((22, 656), POISON, dtype=torch.uint8)
    gather_rows(addresses, 656, out[:21])
    for row, start in enumerate(starts.tolist()):
        wanted = torch.zeros(656, dtype=torch.uint8) if row in (0, 7, 20) else memory[start : start + 656]
        interpreted.same(f"row {row}", out[row], wanted)
    assert bool((out[21] == POISON).all())


def blocks_by_a_device_count() -> None:
    """With the count in a tensor, exactly so many rows are written for any count at all, and an absent block gives zero rows."""
    one = PlainSession(320, 4, 3)
    one.grow(320, 320)
    layer = 2
    for rows in (0, 1, 63, 64, 65, 310, 400):
        out = torch.full((310, ROW_BYTES), POISON, dtype=torch.uint8)
        gather_blocks(one.block_table, LAYOUT.row_offset(layer), torch.tensor([rows]), ROW_BYTES, out)
        interpreted.same(f"{rows} rows", out[:rows], one.truth[layer, : min(rows, 310)])
        assert bool((out[rows:] == POISON).all())
    one.block_table[1] = 0
    gather_blocks(one.block_table, LAYOUT.row_offset(layer), 130, ROW_BYTES, out)
    assert not bool(out[64:128].any())
    interpreted.same("after an absent block", out[128:130], one.truth[layer, 128:130])


def main() -> None:
    begun = time.monotonic()
    as_built = kernel.WORDS_TILE, kernel.BLOCKS_AT_ONCE, kernel.FETCH_PROGRAMS_MAX
    random_steps(4)
    kernel.WORDS_TILE, kernel.FETCH_PROGRAMS_MAX = 16, 1  # four rows a program: partial tiles, a fetch that goes round
    with interpreted.programs_backwards():
        random_steps(4)
    kernel.WORDS_TILE, kernel.BLOCKS_AT_ONCE = 128, 2
    blocks_by_a_device_count()
    kernel.WORDS_TILE, kernel.BLOCKS_AT_ONCE, kernel.FETCH_PROGRAMS_MAX = as_built
    true_rows()
    interpreted.run_reference_tests("test_gather.py", without=("thousand", "refuses", "around_top_k", "gather_blocks_brings"))
    print(f"gathers: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
