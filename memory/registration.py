"""Host memory made readable by a device: page-locked, mapped, portable, through the runtime that torch carries.

Holds how many bytes are registered, for messages. Knows no blocks: `Arena` hands it whole chunks at start-up.

Invariants:
1. Memory counts as registered only after every device that will read it has read a known pattern through the address we will give to
   kernels. Torch offers no question for the device's address; with one address space for host and devices, which every card we run on
   has, it is the host's.
2. What is refused is not registered, and says why with numbers.
3. The memory's bytes are afterwards as before.
"""

import resource
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import structlog
import torch
from torch import Tensor

from kernels.address import tensor_at
from kernels.gather import gather_rows
from memory.errors import RegistrationRefused
from memory.host import NoRegistration, Registration, available_bytes
from memory.numa import node_of, prefer_node
from streams.clock import RealClock

__all__ = ["DeviceRegistration", "Runtime", "registration_for"]

_log = structlog.get_logger("memory")
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped, hipHostRegister's values too
_ROW_BYTES = 16  # what the check reads at either end: one row of the smallest size that kernels move

Reader: TypeAlias = Callable[[torch.device, list[int]], Tensor]  # addresses -> uint8 [addresses, 16] on the CPU, read by the device


class Runtime(Protocol):
    """What we ask of `torch.cuda.cudart()`, CUDA's or HIP's. Both return an error code, 0 for success."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> Any:
        """Page-lock memory and map it for every device."""
        ...

    def cudaHostUnregister(self, address: int) -> Any:
        """The inverse."""
        ...


class DeviceRegistration:
    """Registers host memory for one device. See `host.Registration`."""

    def __init__(
        self, device: torch.device, *others: torch.device, runtime: Runtime | None = None, reader: Reader | None = None,
        node: int | None = None,
    ) -> None:  # fmt: skip
        """Ask the device which memory is near it; register nothing.

        Args: device: a "cuda" device, NVIDIA's or AMD's. others: that read the same memory. runtime, reader, node: the device's own unless
            given: a fake runtime and reader need no card.
        """
        self.device = device
        self._readers = (device, *others)
        self.registered_bytes = 0
        self.node = _near(device) if node is None else node
        self._runtime: Runtime = torch.cuda.cudart() if runtime is None else runtime
        self._read = _read_by_device if reader is None else reader
        self._size_of: dict[int, int] = {}  # by address
        self._node_refused = False
        self._clock = RealClock()
        self._registering_ns = 0

    def register(self, host_address: int, size_bytes: int) -> int:
        """Page-lock and map; touches every page. Returns the device address of the same bytes.

        Args: host_address: page-aligned, of memory nobody wrote yet. size_bytes: at least 16.
        Raises: RegistrationRefused: the runtime refused, or the device does not read what is there; nothing of the range is registered.
        """
        assert size_bytes >= _ROW_BYTES, f"registration of {size_bytes} bytes"
        assert host_address not in self._size_of, f"{host_address:#x} is registered already"
        began_ns = self._clock.now_ns()
        self._prefer_near(host_address, size_bytes)
        code = int(self._runtime.cudaHostRegister(host_address, size_bytes, _PORTABLE_MAPPED))
        if code != 0:
            self._forget_error()
            raise RegistrationRefused(self._refusal(size_bytes, code))
        try:
            self._verify(host_address, size_bytes)
        except BaseException:
            self._runtime.cudaHostUnregister(host_address)
            raise
        self._size_of[host_address] = size_bytes
        self.registered_bytes += size_bytes
        self._registering_ns += self._clock.now_ns() - began_ns
        return host_address

    def unregister(self, host_address: int) -> None:
        """The inverse. Nothing in flight may touch the memory. A runtime that refuses is logged: the memory goes with the process."""
        size_bytes = self._size_of.pop(host_address)
        self.registered_bytes -= size_bytes
        code = int(self._runtime.cudaHostUnregister(host_address))
        if code != 0:
            self._forget_error()
            _log.warning("mirror.not_unregistered", bytes=size_bytes, error_code=code)

    def announce(self) -> None:
        """See host.Registration."""
        seconds = round(self._registering_ns / 1e9, 3)
        _log.info("mirror.registered", bytes=self.registered_bytes, ranges=len(self._size_of), seconds=seconds, node=self.node)

    def _prefer_near(self, host_address: int, size_bytes: int) -> None:
        if self.node < 0 or self._node_refused:
            return
        reason = prefer_node(host_address, size_bytes, self.node)
        if reason:
            self._node_refused = True  # said once: every chunk would be refused alike
            _log.warning("mirror.node_not_preferred", node=self.node, device=str(self.device), reason=reason)

    def _verify(self, host_address: int, size_bytes: int) -> None:
        """Let every device read a pattern at both ends of the range, and leave the bytes as they were."""
        starts = [0, (size_bytes - _ROW_BYTES) // _ROW_BYTES * _ROW_BYTES]
        ends = [tensor_at(host_address + start, (_ROW_BYTES,), torch.uint8) for start in starts]
        before = [end.clone() for end in ends]
        # Differs between ranges, so that the bytes of an earlier one do not pass for these.
        for end, start in zip(ends, starts, strict=True):
            number = (host_address + start) // _ROW_BYTES
            end.copy_((torch.arange(_ROW_BYTES) * 17 + torch.tensor(list(number.to_bytes(_ROW_BYTES, "little"))) + 101).to(torch.uint8))
        wanted = torch.stack([end.clone() for end in ends])
        try:
            found = [self._read(device, [host_address + start for start in starts]) for device in self._readers]
        finally:
            for end, held in zip(ends, before, strict=True):
                end.copy_(held)
        blind = [device for device, seen in zip(self._readers, found, strict=True) if not torch.equal(seen, wanted)]
        if blind:
            raise RegistrationRefused(
                f"{blind[0]} does not read what the host wrote to {size_bytes} bytes of registered memory at {host_address:#x}: "
                "the mirror needs a card that has one address space with the host; use another card or --device cpu"
            )

    def _refusal(self, size_bytes: int, code: int) -> str:
        soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
        return (
            f"{self.device} refused to register {size_bytes} bytes of host memory after {self.registered_bytes} (error {code}); "
            f"ulimit -l is {soft} of at most {hard} bytes, {available_bytes()} bytes are available: "
            "raise ulimit -l (LimitMEMLOCK=infinity) or lower --host-memory"
        )

    def _forget_error(self) -> None:
        """A refused call stays the runtime's last error, and the next launch would raise it as its own."""
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return
        try:
            torch.ones(1, device=self.device)  # a launch, which asks for the last error and takes it away
        except RuntimeError:
            return


def registration_for(device: torch.device, *others: torch.device) -> Registration:
    """What makes host memory readable by `device`, and by others of its kind: chosen once, when a stage opens."""
    return NoRegistration() if device.type == "cpu" else DeviceRegistration(device, *others)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _near(device: torch.device) -> int:
    """Memory node of the card; -1 when nobody says."""
    properties = torch.cuda.get_device_properties(device)
    places = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    domain, bus, number = places
    if domain is None or bus is None or number is None:
        return -1
    return node_of(domain, bus, number)


def _read_by_device(device: torch.device, addresses: list[int]) -> Tensor:
    out = torch.empty((len(addresses), _ROW_BYTES), dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        gather_rows(torch.tensor(addresses, dtype=torch.int64, device=device), _ROW_BYTES, out)
    return out.cpu()
