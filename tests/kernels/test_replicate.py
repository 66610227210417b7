"""Rows, keys and tensors go to the other device as they are, and nowhere else."""

import pytest
import torch

from kernels.layout import BLOCK_ROWS, KeyLayout
from kernels.quantize import append_keys, stored_keys
from kernels.replicate import copy_across, copy_keys, copy_rows


def test_rows_go_to_their_targets_alone() -> None:
    """Each row with a source and a target is there with its bytes behind the offsets; all else keeps what it had."""
    generator = torch.Generator().manual_seed(1)
    here = torch.randint(1, 256, (9, 48), dtype=torch.uint8, generator=generator)
    there = torch.zeros((9, 48), dtype=torch.uint8)
    sources = torch.tensor([here[row].data_ptr() - 96 for row in (4, 2, 3, 8, 7)])
    targets = torch.tensor([there[row].data_ptr() - 48 for row in (1, 2, 8, 5, 7)])
    sources[3], targets[4] = 0, 0
    copy_rows(sources, targets, 48, source_offset=96, target_offset=48)
    wanted = torch.zeros((9, 48), dtype=torch.uint8)
    wanted[1], wanted[2], wanted[8] = here[4], here[2], here[3]
    assert torch.equal(there, wanted)
    copy_rows(sources[:0], targets[:0], 48)


@pytest.mark.parametrize("encoding", ["bf16", "f32", "e4m3"])
def test_keys_keep_values_and_scale(encoding: str) -> None:
    """A key copied from one run to another place of another run has there the bytes that a writer would have given it."""
    layout = KeyLayout(encoding, 20)  # type: ignore[arg-type]  # one of the three
    buffers = torch.zeros((3, 3 * layout.run_bytes + 64), dtype=torch.uint8)
    starts = [buffer[-buffer.data_ptr() % 64 :][: 2 * layout.run_bytes] for buffer in buffers]
    keys = torch.randn((5, 20), generator=torch.Generator().manual_seed(2))
    rows, moved = torch.tensor([0, 63, 64, 17, 100]), torch.tensor([1, 2, 65, 127, 0])

    def at(buffer: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return buffer.data_ptr() + number // BLOCK_ROWS * layout.run_bytes + number % BLOCK_ROWS * layout.step_bytes

    append_keys(keys, at(starts[0], rows), 0, layout)
    append_keys(keys, at(starts[1], moved), 0, layout)
    sources, targets = at(starts[0], rows), at(starts[2], moved)
    copy_keys(sources - 64, targets - 128, layout, source_offset=64, target_offset=128)
    assert torch.equal(stored_keys(starts[2], layout), stored_keys(starts[1], layout))
    assert torch.equal(starts[2], starts[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
def test_a_tensor_comes_over_whole(dtype: torch.dtype) -> None:
    """Every value of a tensor of any dtype and an odd number of values arrives; what lies behind it stays."""
    source = torch.arange(1, 1038).to(dtype)
    held = torch.zeros(1040, dtype=dtype)
    copy_across(held[:1037], source)
    assert torch.equal(held[:1037], source)
    assert not bool(held[1037:].any())
    with pytest.raises(AssertionError):
        copy_across(held[:5], source)
