"""Two devices that are both host memory, told apart: which one every tensor lies on, and what a card would do with each operation.

A tensor is at home where the call that made it said (`cpu:0`, the owner; `cpu:1`, the peer), else where the tensors are that it was made
of, else on the host. Work of a stream runs on the device of that stream, what runs outside every stream on the owner. Notes in `wrong`
what cards would refuse, or run on a stream that orders nothing:

1. an operation of the library that meets tensors of both devices (outside the streams' work it may copy from one to the other), of a
   device and the host, or, inside a stream's work, one of the other device alone;
2. a launch (a function of some `kernels/*/reference.py`) that is given a tensor of another device than its stream's;
3. addresses of the other device's pool among those that a launch dereferences.

`kernels/replicate` alone may touch both. Does not imitate: streams' order (the virtual backend draws that), launches that the host waits
for, host memory that is not page-locked.
"""

import asyncio
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memory.pool import Pool
from streams import VirtualBackend
from streams.virtual import VirtualStream

__all__ = ["OWNER", "PEER", "Homes", "HomesBackend"]

OWNER, PEER, HOST = torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu")
_KERNELS = Path(__file__).parents[2] / "kernels"
_REPLICATE = str(_KERNELS / "replicate" / "__init__.py")
_BY_THE_LIBRARY = {"candidates"}  # whose reference runs on a device as it is
_ASK_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_MOVES = ("aten.copy_", "aten._to_copy")


class Homes:
    """Where tensors are, whose work runs, and what was wrong."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.launches: dict[torch.device, int] = {OWNER: 0, PEER: 0}
        self.across = 0  # launches of kernels/replicate
        self.device = OWNER
        self._label = ""  # of the stream's work that runs
        self._opaque = False  # inside a launch
        self._home_of: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._buffers: dict[int, tuple[int, torch.device]] = {}  # of pools: bytes and device, by address

    def of(self, tensor: Tensor) -> torch.device:
        found = self._home_of.get(tensor.untyped_storage()._cdata)
        return HOST if found is None or found[0].expired() else found[1]

    def settle(self, tensor: Tensor, home: torch.device) -> None:
        """Say where a tensor's bytes are."""
        storage = tensor.untyped_storage()
        self._home_of[storage._cdata] = (StorageWeakRef(storage), home)

    def settle_all(self, holder: object, home: torch.device) -> None:
        """Say where every tensor is that something holds."""
        for tensor in tensors_in(holder):
            self.settle(tensor, home)

    def note(self, what: str) -> None:
        self.wrong.add(f"{self._label or 'outside the streams'}: {what}")

    @contextmanager
    def work(self, stream: str, label: str) -> Iterator[None]:
        """Some stream's work runs."""
        before = self.device, self._label
        self.device, self._label = PEER if ".peer." in stream else OWNER, f"{stream} {label}"
        try:
            yield
        finally:
            self.device, self._label = before

    def check(self, operation: Any, tensors: Sequence[Tensor]) -> torch.device | None:
        """An operation of the library. Returns the device of what it was given, if any."""
        places = [self.of(tensor) for tensor in tensors]
        home = next((place for place in places if place != HOST), None)
        if home is None or self._opaque or operation.is_view:
            return home
        name = str(operation)
        moves = name.startswith(_MOVES)
        if any(place not in (home, HOST) for place in places):
            if not moves or (self._label and not _from_replicate()):
                self.note(f"{name} meets tensors of both devices")
        elif self._label and home != self.device:
            self.note(f"{name} on the other device's tensor")
        elif not moves and any(place == HOST and tensor.dim() > 0 for place, tensor in zip(places, tensors, strict=True)):
            self.note(f"{name} meets a device's tensor and the host's")
        return home

    @contextmanager
    def launch(self, name: str, given: object) -> Iterator[None]:
        """A kernel is launched."""
        if self._opaque:
            yield
            return
        tensors = [tensor for tensor in tensors_in(given) if tensor.numel()]
        places = {self.of(tensor) for tensor in tensors if tensor.dim() > 0 or self.of(tensor) != HOST}
        if places - {HOST}:  # all of the host: no launch
            self.launches[self.device] += 1
            self.across += name.startswith("replicate")
            for place in places - {self.device}:
                self.note(f"{name} is given a tensor of {place}, on {self.device}")
        self._opaque = True
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                yield
        finally:
            self._opaque = False

    def dereference(self, addresses: Tensor) -> None:
        """Some launch reads or writes there."""
        if not self._buffers or not addresses.numel() or _from_replicate():
            return
        begins = numpy.array(sorted(self._buffers))
        at = addresses.flatten().numpy()
        for place in set(numpy.searchsorted(begins, at, side="right").tolist()) - {0}:
            size, home = self._buffers[begins[place - 1]]
            within = (at >= begins[place - 1]) & (at < begins[place - 1] + size)
            if within.any() and home != self.device and self._label:
                self.note(f"an address of {home} is dereferenced on {self.device}")

    @contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Everything this thread does until the end of the block; threads of others are taken over."""

        async def inline(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
            return function(*given, **named)

        monkeypatch.setattr(asyncio, "to_thread", inline)
        monkeypatch.setattr("memory.backing._MAPPED_BYTES", 1 << 60)  # a mapping says nowhere where it is
        monkeypatch.setattr("engine.engine.device_of", lambda config: OWNER)
        self._watch_pools(monkeypatch)
        self._watch_launches(monkeypatch)
        self._watch_weights(monkeypatch)
        with _Functions(self), _Operations(self):
            yield

    def _watch_pools(self, monkeypatch: pytest.MonkeyPatch) -> None:
        take, give = Pool.take, Pool.give

        def taken(pool: Pool, size_bytes: int, owner: str, *, reserved: bool = False) -> Tensor:
            buffer = take(pool, size_bytes, owner, reserved=reserved)
            self._buffers[buffer.data_ptr()] = size_bytes, pool.device
            return buffer

        def given(pool: Pool, buffer: Tensor) -> None:
            del self._buffers[buffer.data_ptr()]
            give(pool, buffer)

        monkeypatch.setattr(Pool, "take", taken)
        monkeypatch.setattr(Pool, "give", given)

    def _watch_launches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for path in _KERNELS.glob("*/reference.py"):
            if path.parent.name in _BY_THE_LIBRARY:
                continue
            module = importlib.import_module(f"kernels.{path.parent.name}.reference")
            for name in module.__all__:
                if callable(function := getattr(module, name)) and not isinstance(function, type):
                    monkeypatch.setattr(module, name, self._launching(function, f"{path.parent.name}.{name}"))
        for name, module in list(sys.modules.items()):
            for used in ("rows_at", "store_at", "values_at", "store_values_at"):
                if name.startswith("kernels.") and (function := getattr(module, used, None)) is not None:
                    monkeypatch.setattr(module, used, self._dereferencing(function))

    def _launching(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def launched(*given: Any, **named: Any) -> Any:
            with self.launch(name, (given, named)):
                made = function(*given, **named)
            if not self._opaque and any(self.of(tensor) != HOST for tensor in tensors_in((given, named))):
                for tensor in tensors_in(made):
                    if self.of(tensor) == HOST:
                        self.settle(tensor, self.device)
            return made

        return launched

    def _dereferencing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def dereferenced(addresses: Tensor, *given: Any) -> Any:
            self.dereference(addresses)
            return function(addresses, *given)

        return dereferenced

    def _watch_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import engine.engine

        parts_of = engine.engine.parts_of

        def settled(*given: Any) -> Any:
            owner, peer = parts_of(*given)
            self.settle_all(owner, OWNER)
            for tensor in tensors_in(peer):
                assert self.of(tensor) == PEER, "a weight of the peer is not there"
            return owner, peer

        monkeypatch.setattr(engine.engine, "parts_of", settled)


class _Functions(TorchFunctionMode):
    """Tensors say their home when they are asked for their device; what is made on a device is at home there."""

    def __init__(self, homes: Homes) -> None:
        super().__init__()
        self._homes = homes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _ASK_DEVICE:
            return self._homes.of(args[0])
        asked = kwargs.get("device")
        if func is Tensor.cpu:
            made = args[0].clone()
            self._homes.settle(made, HOST)
            return made
        if func is Tensor.to:
            asked = next((each for each in args[1:] if isinstance(each, torch.device)), asked)
            if asked in (OWNER, PEER) and self._homes.of(args[0]) != asked:
                args = (args[0].clone(), *args[1:])
        made = func(*args, **kwargs)
        if asked is not None and torch.device(asked) in (OWNER, PEER) and isinstance(made, Tensor):
            self._homes.settle(made, torch.device(asked))
        return made


class _Operations(TorchDispatchMode):
    """Every operation of the library is checked; what it makes is at home where its tensors are."""

    def __init__(self, homes: Homes) -> None:
        super().__init__()
        self._homes = homes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        homes, tensors = self._homes, tensors_in((args, kwargs))
        home = homes.check(func, tensors)
        made = func(*args, **kwargs)
        if home is not None and not func.is_view:
            given = {tensor.untyped_storage()._cdata for tensor in tensors}
            for tensor in tensors_in(made):
                if tensor.untyped_storage()._cdata not in given:
                    homes.settle(tensor, home)
        return made


class HomesBackend(VirtualBackend):
    """Streams in virtual time whose work runs where its stream is."""

    def __init__(self, homes: Homes, order: int = 0) -> None:
        super().__init__(order)
        self._homes = homes

    def open_stream(self, name: str, queue_max: int) -> VirtualStream:
        """See VirtualBackend."""
        stream = super().open_stream(name, queue_max)
        make = stream.make

        def made(work: Callable[[], Any], label: str, session: str, number: int) -> Any:
            def placed() -> Any:
                with self._homes.work(name, label):
                    return work()

            return make(placed, label, session, number)

        stream.make = made  # type: ignore[method-assign]
        return stream


def tensors_in(holder: object) -> list[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(holder, Tensor):
        return [holder]
    if isinstance(holder, (tuple, list)):
        return [tensor for each in holder for tensor in tensors_in(each)]
    if isinstance(holder, Mapping):
        return tensors_in(list(holder.values())) if holder else []
    if dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        return [tensor for each in dataclasses.fields(holder) for tensor in tensors_in(getattr(holder, each.name, None))]
    return []


def _from_replicate() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _REPLICATE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
