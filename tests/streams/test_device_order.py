"""The device backend's order, polling and failures, on a stand-in for `torch.cuda` whose markers happen when asked often enough.

What the stand-in cannot show: real overlap, real errors, real times. The same suite runs on a card with `-m gpu`.
"""

import asyncio
import random
import time

import pytest
import torch

from streams import Backend, Event, Observer, pace
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


async def test_a_device_that_reports_at_a_launch_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that comes when a marker is recorded is as good as one that comes when it is asked; nobody's callback undoes it."""
    backend, told = DeviceBackend("cuda"), list[str]()
    backend.lost.on_done(lambda event: told.append(str(event.error())))

    def record(marker: _Marker, stream: _Stream) -> None:
        raise RuntimeError("unspecified launch failure\nmore lines")

    first = backend.stream("one").submit(lambda: 1, label="first")
    monkeypatch.setattr(_Marker, "record", record)
    second, third = (backend.stream(name).submit(lambda: 2, label=name) for name in ("two", "three"))
    for event in (first, second, third):
        await event.wait_done()
    assert [str(event.error()) for event in (second, third)] == ["cuda reported an error near two: unspecified launch failure"] * 2
    assert isinstance(first.error(), DeviceLost)
    assert told == [str(second.error())]
    await backend.close()


async def test_a_device_that_ends_nothing_is_lost_after_its_time() -> None:
    """With work outstanding of which nothing ends for so long, everything fails, what waits on another stream too; not before."""
    backend = DeviceBackend("cuda", silence_s_max=0.05)
    began = time.perf_counter()
    one = backend.stream("one").submit(lambda: 1, label="stuck")
    _endless(one)
    two = backend.stream("two").submit(lambda: 2, label="behind", after=[one])
    three = backend.stream("three").submit(lambda: 3, label="beside")
    await two.wait_done()
    assert time.perf_counter() - began >= 0.05
    assert str(backend.lost.error()) == "cuda has ended nothing for 0.05 s, the oldest being stuck on one"
    assert one.error() is backend.lost.error()
    assert isinstance(two.error(), DeviceLost)
    assert three.result() == 3
    await backend.close()


async def test_a_device_that_ends_something_is_not_lost() -> None:
    """However long one operation takes, as long as others end; nor does a loop that was held up count against the device."""
    backend = DeviceBackend("cuda", silence_s_max=0.05)
    slow = backend.stream("one").submit(lambda: 1, label="slow")
    marker, began = _endless(slow), time.perf_counter()
    while time.perf_counter() - began < 0.15:
        await backend.stream("two").submit(lambda: 2, label="quick")
    marker.questions = 0
    assert await slow == 1
    held_up = backend.stream("one").submit(lambda: 1, label="held up")
    marker = _endless(held_up)
    for _ in range(5):
        await asyncio.sleep(0)
    marker.questions, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.1:  # the loop does something else, a compilation for one
        pass
    assert await held_up == 1
    assert not backend.lost.done()
    await backend.close()


async def test_the_poller_rests_when_nothing_is_outstanding() -> None:
    """Once everything is settled the backend asks nothing more."""
    backend = DeviceBackend("cuda")
    await backend.stream("one").submit(lambda: 1, label="work")
    assert not backend._polling
    await backend.close()


def _endless(event: Event[int]) -> "_Marker":
    """Its marker, which from now on does not happen."""
    marker = getattr(event, "marker", None)
    assert isinstance(marker, _Marker)
    marker.questions = 1 << 40
    return marker


async def test_a_loop_with_work_is_asked_on_once_a_round() -> None:
    """While others have something to do in every round, no round asks twice; what is asked in vain is counted, and so is launching."""
    backend = DeviceBackend("cuda")
    marker = _endless(event := backend.stream("one").submit(lambda: 1, label="long"))
    rounds = 50
    for _ in range(rounds):
        await asyncio.sleep(0)
        until = time.perf_counter() + 50e-6
        while time.perf_counter() < until:
            pass
    asked = (1 << 40) - marker.questions
    assert 1 <= asked <= rounds + 1
    assert backend.asking_ns > 0
    assert backend.launch_ns > 0
    marker.questions = 0
    assert await event == 1
    await backend.close()


async def test_a_launch_ends_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller rests for work that takes long; work launched meanwhile, which may end sooner, is asked for at once."""
    monkeypatch.setattr(pace, "REST_MAX_S", 1e6)
    backend = DeviceBackend("cuda")
    backend._pace.ended("long", 10**15)
    marker = _endless(long := backend.stream("one").submit(lambda: 1, label="long"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert backend._resting is not None
    async with asyncio.timeout(10):
        assert await backend.stream("two").submit(lambda: 2, label="short") == 2
    assert not long.done()
    marker.questions = 0
    backend.poll()
    async with asyncio.timeout(10):
        assert await long == 1
    await backend.close()
