"""The device backend: the common suite, on a card."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from streams import Backend, Event, Observer, Stream
from streams.device import DeviceBackend
from streams.errors import DeviceLost
from tests.streams.conformance import Conformance

pytestmark = pytest.mark.gpu


class _GateHold:
    """Work comes after an event of no backend, which happens at `open`."""

    def __init__(self) -> None:
        self._gate: Event[None] = Event("gate")

    def submit(self, stream: Stream, work: Callable[[], Any], *, label: str, **rest: Any) -> Event[Any]:
        rest["after"] = [*rest.get("after", ()), self._gate]
        return stream.submit(work, label=label, **rest)

    def open(self) -> None:
        if not self._gate.done():
            self._gate.settle(None, None)


class _DeviceArm:
    def backend(self, observer: Observer | None = None) -> Backend:
        return DeviceBackend("cuda", observer)

    def hold(self, backend: Backend) -> _GateHold:
        return _GateHold()


class TestDevice(Conformance):
    """The suite on a card."""

    @pytest.fixture
    def arm(self) -> _DeviceArm:
        return _DeviceArm()


async def test_order_between_streams_is_the_devices() -> None:
    """A copy ordered behind a long kernel of another stream reads what that kernel wrote, and the loop never waits for either."""
    backend = DeviceBackend("cuda")
    first, second = backend.stream("first"), backend.stream("second")
    a = torch.randn(4096, 4096, device="cuda")
    out = torch.zeros(4096, 4096, device="cuda")
    copied = torch.zeros_like(out)

    def long() -> None:
        for _ in range(20):
            torch.mm(a, a, out=out)

    torch.cuda.synchronize()
    made = first.submit(long, label="long")
    taken = second.submit(lambda: copied.copy_(out), label="copy", after=[made])
    assert not made.done()
    await taken
    assert made.done()
    torch.cuda.synchronize()
    assert torch.equal(copied, a @ a)
    await backend.close()


async def test_work_that_raises_at_launch_fails_alone() -> None:
    """Its dependents never run; later work of the stream does; the device is not lost."""
    backend = DeviceBackend("cuda")
    stream = backend.stream("one")

    def fail() -> None:
        raise DeviceLost("not really")

    failed = stream.submit(fail, label="fail")
    later = stream.submit(lambda: 7, label="later")
    assert await later == 7
    assert isinstance(failed.error(), DeviceLost)
    assert backend.lost is None
    await backend.close()
