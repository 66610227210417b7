"""Host buffers: exact, zero-filled, lazily touched, registered once."""

import mmap
from pathlib import Path

import pytest
import torch

from kernels.address import tensor_at
from memory.errors import ArenaFull
from memory.host import HostBuffer, NoRegistration


class Recorder:
    """A registration that remembers, answers with shifted addresses, and can refuse."""

    def __init__(self, refuse: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self.refuse = refuse

    def register(self, host_address: int, size_bytes: int) -> int:
        if self.refuse:
            raise RuntimeError("the driver refuses")
        self.registered[host_address] = size_bytes
        return host_address + (1 << 40)

    def unregister(self, host_address: int) -> None:
        del self.registered[host_address]


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097])
def test_a_buffer_has_exactly_its_size(size_bytes: int) -> None:
    """The tensor is as long as asked, zero, page-aligned, and allocated is the size rounded up to whole pages."""
    buffer = HostBuffer(size_bytes, NoRegistration())
    assert buffer.bytes.shape == (size_bytes,)
    assert not buffer.bytes.any()
    assert buffer.address == buffer.bytes.data_ptr()
    assert buffer.address % mmap.PAGESIZE == 0
    assert buffer.allocated_bytes == (size_bytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    buffer.close()


def test_pages_cost_nothing_until_they_are_written() -> None:
    """Four GiB of buffer, written at the last byte, add under 64 MiB to this process's resident memory."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    buffer = HostBuffer(4 << 30, NoRegistration())
    buffer.bytes[-1] = 7
    assert resident_bytes() - before < 64 << 20
    buffer.close()


def test_a_view_outlives_the_close() -> None:
    """A tensor over the buffer keeps the mapping alive after `close`."""
    buffer = HostBuffer(8192, NoRegistration())
    view = buffer.bytes[4096:]
    view.fill_(9)
    buffer.close()
    assert int(tensor_at(view.data_ptr(), (4096,), torch.uint8).sum()) == 9 * 4096


def test_registration_gives_the_device_address_and_is_undone_once() -> None:
    """The device's address is the registration's answer; close unregisters the very same mapping."""
    recorder = Recorder()
    buffer = HostBuffer(100, recorder)
    assert recorder.registered == {buffer.bytes.data_ptr(): 100}
    assert buffer.address == buffer.bytes.data_ptr() + (1 << 40)
    buffer.close()
    assert recorder.registered == {}


def test_what_the_machine_refuses_is_arena_full() -> None:
    """A mapping larger than the address space raises ArenaFull with its size."""
    with pytest.raises(ArenaFull) as caught:
        HostBuffer(1 << 55, NoRegistration())
    assert caught.value.missing_bytes == 1 << 55
    assert caught.value.host_missing_bytes == 1 << 55
