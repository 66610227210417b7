"""Slabs: what is kept is there, what nobody holds goes."""

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from memory.backing import SLAB_BYTES, Slabs, Tensors

CPU = torch.device("cpu")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_large_buffers_in_ram_cost_nothing_before_they_are_touched() -> None:
    """Also after one of the size was written and given back: the next is zeros, and no memory is taken for it until it is written."""
    tensors, size = Tensors(CPU), 64 << 20
    for _ in range(3):
        before = _resident_bytes()
        buffer = tensors.take(size, kept=False)
        assert _resident_bytes() - before < 8 << 20
        assert tensors.physical_bytes() == size
        assert not buffer[:: mmap.PAGESIZE].any()
        buffer.fill_(7)
        assert _resident_bytes() - before > 48 << 20
        tensors.give(buffer)
        del buffer
    assert tensors.physical_bytes() == 0


def test_kept_buffers_are_whole_slabs() -> None:
    """Eleven kept buffers in slabs of at most four are three slabs of exactly their bytes, and none is allocated to take them."""
    slabs = Slabs(CPU, slab_bytes=4 * 192 + 100)
    slabs.keep(192, 11)
    assert slabs.physical_bytes() == 11 * 192
    taken = [slabs.take(192, kept=True) for _ in range(11)]
    assert slabs.physical_bytes() == 11 * 192
    assert len({buffer.untyped_storage().data_ptr() for buffer in taken}) == 3
    slabs.check_integrity()


def test_a_slab_goes_when_its_last_buffer_came_back() -> None:
    """Buffers of two slabs given back in turns: memory falls a slab at a time, to nothing."""
    slabs = Slabs(CPU, slab_bytes=2 * 64)
    slabs.keep(64, 4)
    taken = [slabs.take(64, kept=True) for _ in range(4)]
    left = []
    for number in (0, 2, 1, 3):
        slabs.give(taken[number])
        left.append(slabs.physical_bytes())
    assert left == [256, 256, 128, 0]


def test_free_buffers_back_the_next_reservation() -> None:
    """Buffers that came back while others of their slab are held are kept again without new memory."""
    slabs = Slabs(CPU)
    slabs.keep(64, 4)
    taken = [slabs.take(64, kept=True) for _ in range(4)]
    for buffer in taken[:3]:
        slabs.give(buffer)
    slabs.keep(64, 3)
    assert slabs.physical_bytes() == 4 * 64
    slabs.keep(64, 1)
    assert slabs.physical_bytes() == 5 * 64
    slabs.check_integrity()


def test_a_buffer_larger_than_a_slab_is_one() -> None:
    """Size limits slabs, not buffers."""
    slabs = Slabs(CPU, slab_bytes=64)
    assert slabs.take(640, kept=False).shape == (640,)
    assert slabs.physical_bytes() == 640


def test_a_session_of_a_million_rows_is_few_allocations() -> None:
    """1,024 spans of 22 layers of bf16 keys: 5.5 GiB in 24 slabs, nothing of it touched."""
    span = 22 * 1024 * 256
    slabs = Slabs(CPU)
    slabs.keep(span, 1024)
    first = slabs.take(span, kept=True)
    assert slabs.physical_bytes() == 1024 * span
    assert first.untyped_storage().nbytes() == SLAB_BYTES // span * span
    slabs.give(first)
    slabs.forgo(span, 1023)
    assert slabs.physical_bytes() == 0


@pytest.mark.parametrize("count", [2, -1])
def test_more_than_was_kept_is_a_bug(count: int) -> None:
    """Forgoing more buffers than were kept, or less than none, and taking one that was not kept are our bugs."""
    slabs = Slabs(CPU)
    slabs.keep(64, 1)
    with pytest.raises(AssertionError, match="1 kept buffers"):
        slabs.forgo(64, count)
    slabs.forgo(64, 1)
    with pytest.raises(AssertionError, match="is kept"):
        slabs.take(64, kept=True)


class SlabLife(RuleBasedStateMachine):
    """Reservations, takes and returns of three sizes in any order against plain counts; every held buffer keeps its own bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(CPU, slab_bytes=400)
        self.kept = {64: 0, 192: 0, 640: 0}
        self.held: list[tuple[Tensor, int]] = []
        self.number = 0

    @rule(size=st.sampled_from([64, 192, 640]), count=st.integers(0, 9))
    def keep(self, size: int, count: int) -> None:
        self.slabs.keep(size, count)
        self.kept[size] += count

    @rule(size=st.sampled_from([64, 192, 640]), part=st.floats(0, 1))
    def forgo(self, size: int, part: float) -> None:
        count = int(part * self.kept[size])
        self.slabs.forgo(size, count)
        self.kept[size] -= count

    @rule(size=st.sampled_from([64, 192, 640]), kept=st.booleans())
    def take(self, size: int, kept: bool) -> None:
        if kept and not self.kept[size]:
            return
        before = self.slabs.physical_bytes()
        buffer = self.slabs.take(size, kept=kept)
        if kept:
            assert self.slabs.physical_bytes() == before
            self.kept[size] -= 1
        assert not buffer.any()
        self.number = self.number % 250 + 1
        self.held.append((buffer.fill_(self.number), self.number))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 50))
    def give(self, pick: int) -> None:
        buffer, _ = self.held.pop(pick % len(self.held))
        self.slabs.give(buffer)

    @invariant()
    def bytes_are_their_holders(self) -> None:
        self.slabs.check_integrity()
        assert all(bool((buffer == number).all()) for buffer, number in self.held)
        least = sum(buffer.numel() for buffer, _ in self.held) + sum(size * count for size, count in self.kept.items())
        assert self.slabs.physical_bytes() >= least
        if not self.held and not any(self.kept.values()):
            assert self.slabs.physical_bytes() == 0


def test_any_order_of_reservations_and_takes_keeps_the_slabs_whole() -> None:
    """After any sequence of operations pieces, counts and bytes equal the plain model's, and nothing is held for nobody."""
    run_state_machine_as_test(SlabLife, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
