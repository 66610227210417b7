"""Registration for a device, against a runtime that only remembers: what is asked of it, what a refusal leaves and says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from kernels.address import rows_at
from memory import Arena, Ledger, RegistrationRefused, registration_for
from memory import registration as registration_module
from memory.host import HostBuffer, NoRegistration
from memory.numa import node_of, prefer_node
from memory.registration import DeviceRegistration
from tests.memory.memory_world import LAYOUT

BLOCK = LAYOUT.block_bytes
CARD = torch.device("cuda", 0)


class FakeRuntime:
    """Remembers what is registered; refuses the `refused`-th call, counted from 1."""

    def __init__(self, refused: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.flags: list[int] = []
        self.refused = refused
        self.unregister_code = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.flags.append(flags)
        if len(self.flags) == self.refused:
            return 2
        assert address not in self.registered
        self.registered[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self.unregister_code


def read_here(device: torch.device, addresses: list[int]) -> Tensor:
    """What a device reads that shares the host's addresses."""
    assert device == CARD
    return rows_at(torch.tensor(addresses), 16)


def registration(
    runtime: FakeRuntime, reader: Callable[[torch.device, list[int]], Tensor] = read_here, node: int = -1
) -> DeviceRegistration:
    return DeviceRegistration(CARD, runtime=runtime, reader=reader, node=node)


def test_an_arena_is_registered_chunk_by_chunk_and_given_back() -> None:
    """Every chunk is registered once, portable and mapped, at its exact size; its bytes stay zero; closing unregisters all."""
    runtime = FakeRuntime()
    made = registration(runtime)
    told: list[tuple[int, int]] = []
    with capture_logs() as logs:
        arena = Arena(
            LAYOUT, 5 * BLOCK, Ledger(), chunk_bytes=2 * BLOCK, registration=made, progress=lambda blocks, of: told.append((blocks, of))
        )
    assert [(log["event"], log["bytes"], log["ranges"], log["node"]) for log in logs] == [("mirror.registered", 5 * BLOCK, 3, -1)]
    assert logs[0]["seconds"] >= 0
    assert sorted(runtime.registered.values()) == [BLOCK, 2 * BLOCK, 2 * BLOCK]
    assert runtime.flags == [3, 3, 3]
    assert made.registered_bytes == 5 * BLOCK
    assert told == [(2, 5), (4, 5), (5, 5)]
    blocks = [arena.take() for _ in range(5)]
    for block in blocks:
        assert not arena.place(block).bytes.any()
        assert arena.place(block).address == arena.place(block).bytes.data_ptr()
        arena.release(block)
    arena.close()
    assert runtime.registered == {}
    assert made.registered_bytes == 0


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refusal_leaves_nothing_and_says_the_numbers(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the n-th chunk is refused none stays registered or charged, and the one line has every number and what to change."""
    monkeypatch.setattr("resource.getrlimit", lambda limit: (65_536, -1))
    monkeypatch.setattr(registration_module, "available_bytes", lambda: 123_456_789)
    runtime, ledger = FakeRuntime(refused), Ledger()
    made = registration(runtime)
    with pytest.raises(RegistrationRefused) as caught:
        Arena(LAYOUT, 5 * BLOCK, ledger, chunk_bytes=2 * BLOCK, registration=made)
    assert runtime.registered == {}
    assert made.registered_bytes == 0
    assert ledger.statistics() == Ledger().statistics()
    message = str(caught.value)
    assert "\n" not in message
    asked = BLOCK if refused == 3 else 2 * BLOCK
    assert f"register {asked} bytes of host memory after {2 * BLOCK * (refused - 1)} (error 2)" in message
    assert "65536 of at most unlimited bytes, 123456789 bytes are available" in message
    assert "LimitMEMLOCK" in message
    assert "--host-memory" in message


def test_a_refused_buffer_gives_its_pages_back_at_once() -> None:
    """The mapping is gone while the error is still held: nobody needs to forget the error first."""
    seen: list[int] = []

    class Touching(FakeRuntime):
        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            seen.append(address)
            return 1

    with pytest.raises(RegistrationRefused) as caught:
        HostBuffer(1 << 20, registration(Touching()))
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    held = [first for first, end in ranges if int(first, 16) <= seen[0] and seen[0] + (1 << 20) <= int(end, 16)]
    assert not held, f"the mapping is still there while {caught.value!r} is held"


@pytest.mark.parametrize("wrong", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("size_bytes", [16, 40, BLOCK])
def test_memory_the_device_cannot_read_back_is_refused(size_bytes: int, wrong: int) -> None:
    """A device that reads other bytes at either end gets nothing: the range is unregistered, its bytes are as before."""

    def read_wrongly(device: torch.device, addresses: list[int]) -> Tensor:
        rows = read_here(device, addresses)
        rows[wrong, 5] ^= 1
        return rows

    runtime = FakeRuntime()
    made = registration(runtime, read_wrongly)
    memory = torch.full((size_bytes,), 7, dtype=torch.uint8)
    with pytest.raises(RegistrationRefused, match=f"does not read what the host wrote to {size_bytes} bytes"):
        made.register(memory.data_ptr(), size_bytes)
    assert runtime.registered == {}
    assert made.registered_bytes == 0
    assert (memory == 7).all()


def test_every_device_that_reads_the_memory_is_asked() -> None:
    """Memory that one card registers and two read counts as registered when both read it; else the other is named."""
    other, blind, asked = torch.device("cuda", 1), set[torch.device](), list[torch.device]()

    def read(device: torch.device, addresses: list[int]) -> Tensor:
        asked.append(device)
        rows = rows_at(torch.tensor(addresses), 16)
        return rows ^ 1 if device in blind else rows

    runtime = FakeRuntime()
    made = DeviceRegistration(CARD, other, runtime=runtime, reader=read, node=-1)
    memory = torch.full((64,), 7, dtype=torch.uint8)
    made.register(memory.data_ptr(), 64)
    assert asked == [CARD, other]
    made.unregister(memory.data_ptr())
    blind.add(other)
    with pytest.raises(RegistrationRefused, match="cuda:1 does not read what the host wrote"):
        made.register(memory.data_ptr(), 64)
    assert runtime.registered == {}
    assert (memory == 7).all()


def test_a_reader_that_fails_leaves_nothing_registered() -> None:
    """If the check itself raises, the range is unregistered and its bytes are as before."""

    def fail(device: torch.device, addresses: list[int]) -> Tensor:
        raise OSError("the device is gone")

    runtime = FakeRuntime()
    memory = torch.full((64,), 7, dtype=torch.uint8)
    with pytest.raises(OSError, match="gone"):
        registration(runtime, fail).register(memory.data_ptr(), 64)
    assert runtime.registered == {}
    assert (memory == 7).all()


def test_stale_bytes_do_not_pass_for_a_new_range() -> None:
    """The pattern differs between ranges: a device that goes on reading an earlier one is found out."""
    first, second = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    kept: list[Tensor] = []

    def read_stale(device: torch.device, addresses: list[int]) -> Tensor:
        kept.append(read_here(device, addresses))
        return kept[0]

    made = registration(FakeRuntime(), read_stale)
    made.register(first.data_ptr(), 64)
    with pytest.raises(RegistrationRefused):
        made.register(second.data_ptr(), 64)


def test_what_cannot_be_unregistered_is_logged() -> None:
    """A refused unregister is one warning with the bytes, not an error on the way out."""
    runtime = FakeRuntime()
    made = registration(runtime)
    memory = torch.zeros(64, dtype=torch.uint8)
    made.register(memory.data_ptr(), 64)
    runtime.unregister_code = 713
    with capture_logs() as logs:
        made.unregister(memory.data_ptr())
    assert [(log["event"], log["bytes"], log["error_code"]) for log in logs] == [("mirror.not_unregistered", 64, 713)]


def test_a_node_that_cannot_be_preferred_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk would be refused alike: one warning, and every chunk is registered."""
    asked: list[int] = []

    def refuse(address: int, size_bytes: int, node: int) -> str:
        asked.append(node)
        return "Operation not permitted"

    monkeypatch.setattr(registration_module, "prefer_node", refuse)
    runtime = FakeRuntime()
    with capture_logs() as logs:
        Arena(LAYOUT, 3 * BLOCK, Ledger(), chunk_bytes=BLOCK, registration=registration(runtime, node=1)).close()
    assert asked == [1]
    said = [(log["node"], log["reason"]) for log in logs if log["event"] == "mirror.node_not_preferred"]
    assert said == [(1, "Operation not permitted")]
    assert len(runtime.flags) == 3


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", -1), ("", -1), ("many", -1), (None, -1)])
def test_the_node_beside_a_card_is_read_from_the_pci_tree(tmp_path: Path, text: str | None, node: int) -> None:
    """The node's file is found by domain, bus and device in hexadecimal; absent or odd means nobody knows."""
    card = tmp_path / "0001:b7:0c.0"
    card.mkdir()
    if text is not None:
        (card / "numa_node").write_text(text)
    assert node_of(1, 0xB7, 0x0C, root=tmp_path) == node


def test_a_node_the_machine_lacks_is_one_line() -> None:
    """Asking for a node that does not exist says why and touches nothing; the memory stays usable."""
    buffer = HostBuffer(1 << 16, NoRegistration())
    reason = prefer_node(buffer.address, 1 << 16, 1023)
    assert reason
    assert "\n" not in reason
    buffer.bytes.fill_(3)
    assert (buffer.bytes == 3).all()


def test_the_cpu_needs_no_registration() -> None:
    """Without a device host addresses are the addresses."""
    assert isinstance(registration_for(torch.device("cpu")), NoRegistration)
