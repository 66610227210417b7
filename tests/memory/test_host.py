"""Host buffers: exact, zero-filled, lazily touched, registered once."""

import mmap
from pathlib import Path

import pytest
import torch

from kernels.address import tensor_at
from memory.errors import ArenaFull
from memory.host import HostBuffer, NoRegistration, available_bytes


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

    def announce(self) -> None:
        """Nobody asks."""


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


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine with 10,000 kB available, a process in `groups`, and control group files."""
    for name, text in {"proc/meminfo": "MemTotal: 99999 kB\nMemAvailable:   10000 kB\n", "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


ONE, TWO = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        pytest.param("", {}, 10_240_000, id="no groups"),
        pytest.param("0::/\n", {TWO + "memory.max": "max", TWO + "memory.current": "1", TWO + "memory.stat": ""}, 10_240_000, id="none"),
        pytest.param(
            "0::/\n",
            {TWO + "memory.max": "9000\n", TWO + "memory.current": "5000\n", TWO + "memory.stat": "anon 7\ninactive_file 300\n"},
            4300,
            id="own limit, unused file pages free",
        ),
        pytest.param(
            "1:cpu:/\n0::/a/b\n",
            {
                TWO + "a/memory.max": "800\n", TWO + "a/memory.current": "100\n", TWO + "a/memory.stat": "anon 1\n",
                TWO + "a/b/memory.max": "max\n", TWO + "a/b/memory.current": "50\n", TWO + "a/b/memory.stat": "anon 1\n",
            },
            700,
            id="limit of the group above",
        ),
        pytest.param(
            "4:hugetlb,memory:/box\n0::/\n",
            {
                ONE + "memory.limit_in_bytes": "5000\n", ONE + "memory.usage_in_bytes": "1000\n",
                ONE + "memory.stat": "inactive_file 9\ntotal_inactive_file 20\n",
            },
            4020,
            id="first version, path not to be seen",
        ),
        pytest.param(
            "0::/\n", {TWO + "memory.max": "100\n", TWO + "memory.current": "300\n", TWO + "memory.stat": ""}, 0, id="over its limit",
        ),
        pytest.param("0::/\n", {TWO + "memory.max": "junk", TWO + "memory.current": "", TWO + "memory.stat": "x"}, 10_240_000, id="junk"),
    ],
)  # fmt: skip
def test_what_is_available_ends_at_the_control_group(tmp_path: Path, groups: str, files: dict[str, str], available: int) -> None:
    """The kernel's estimate, or what the tightest control group above the process leaves; what cannot be read limits nothing."""
    assert available_bytes(machine(tmp_path, groups, files)) == available


def test_without_an_estimate_nothing_is_guessed(tmp_path: Path) -> None:
    """A kernel that does not say MemAvailable is an error."""
    root = machine(tmp_path, "", {"proc/meminfo": "MemTotal: 1 kB\n"})
    with pytest.raises(OSError, match="MemAvailable"):
        available_bytes(root)
