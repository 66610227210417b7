"""The device backend's order, polling and failures, on a stand-in for `torch.cuda` whose markers happen when asked often enough.

What the stand-in cannot show: real overlap, real errors, real times. The same suite runs on a card with `-m gpu`.
"""

import random

import pytest
import torch

from streams import Backend, Observer
from streams.device import DeviceBackend
from streams.errors import DeviceLost
from tests.streams.conformance import Conformance, GateHold


class _Marker:
    """Happens after a few questions, never before the markers its stream waited for or recorded earlier."""

    dice = random.Random(1)
    broken = False

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.before: list[_Marker] = []
        self.questions = 0

    def record(self, stream: "_Stream") -> None:
        self.before = [*stream.before]
        stream.before = [self]
        self.questions = self.dice.randrange(4)

    def query(self) -> bool:
        if _Marker.broken:
            raise RuntimeError("an illegal memory access was encountered\nmore lines")
        if not all(marker.questions <= 0 for marker in self.before):
            for marker in self.before:
                marker.query()
            return False
        self.questions -= 1
        return self.questions <= 0


class _Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.before: list[_Marker] = []

    def __enter__(self) -> None:
        """Current from here on, which says nothing here."""

    def __exit__(self, *failure: object) -> None:
        """Not any more."""

    def wait_event(self, marker: _Marker) -> None:
        self.before.append(marker)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Marker)
    monkeypatch.setattr(_Marker, "broken", False)
    return


class _Arm:
    def backend(self, observer: Observer | None = None) -> Backend:
        return DeviceBackend("cuda", observer)

    def hold(self, backend: Backend) -> GateHold:
        return GateHold()


class TestDeviceOrder(Conformance):
    """The common suite."""

    @pytest.fixture
    def arm(self) -> _Arm:
        return _Arm()


async def test_a_lost_device_fails_everything_outstanding() -> None:
    """An error that the device reports fails what is in flight on every stream and what is submitted later, with one cause."""
    backend = DeviceBackend("cuda")
    one, two = backend.stream("one"), backend.stream("two")
    first, second = one.submit(lambda: 1, label="first"), two.submit(lambda: 2, label="second")
    _Marker.broken = True
    await first.wait_done()
    await second.wait_done()
    assert isinstance(first.error(), DeviceLost)
    assert isinstance(second.error(), DeviceLost)
    ran: list[int] = []
    third = one.submit(lambda: ran.append(3), label="third")
    await third.wait_done()
    assert isinstance(third.error(), DeviceLost)
    assert "illegal memory access" in str(third.error())
    assert not ran
    await backend.close()


async def test_the_poller_rests_when_nothing_is_outstanding() -> None:
    """Once everything is settled the backend asks nothing more."""
    backend = DeviceBackend("cuda")
    await backend.stream("one").submit(lambda: 1, label="work")
    assert not backend._polling
    await backend.close()
