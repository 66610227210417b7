"""The device backend: the common suite, on a card."""

import pytest
import torch

from streams import Backend, Observer
from streams.device import DeviceBackend
from streams.errors import DeviceLost
from tests.streams.conformance import Conformance, GateHold

pytestmark = pytest.mark.gpu


class _DeviceArm:
    def backend(self, observer: Observer | None = None) -> Backend:
        return DeviceBackend("cuda", observer)

    def hold(self, backend: Backend) -> GateHold:
        return GateHold()


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
    assert not backend.lost.done()
    await backend.close()


async def test_a_card_that_ends_nothing_is_lost_and_one_that_is_slow_is_not() -> None:
    """A kernel of about a second is beyond 0.2 s of silence, and within 20."""
    for silence_s_max, is_lost in ((20.0, False), (0.2, True)):
        backend = DeviceBackend("cuda", silence_s_max=silence_s_max)
        slow = backend.stream("one").submit(lambda: torch.cuda._sleep(2_000_000_000), label="slow")
        await slow.wait_done()
        assert backend.lost.done() is is_lost
        assert isinstance(slow.error(), DeviceLost) is is_lost
        torch.cuda.synchronize()
        await backend.close()
