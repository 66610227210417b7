"""Staging on the CPU: nothing is copied twice, and a glance sees what is there. Its device half is in test_on_device.py."""

import pytest
import torch

import memory.staging
from memory.staging import Glance, _Arriving, landing, outside_streams, pinned

CPU = torch.device("cpu")


def test_host_values_are_their_own_staging_on_the_cpu() -> None:
    """No copy is made where no device copies, and values that would have to be staged twice are our bug."""
    values = torch.arange(12).view(3, 4)
    assert pinned(values, CPU) is values
    with pytest.raises(AssertionError, match="not contiguous"):
        pinned(values[:, :2], CPU)
    assert outside_streams(CPU)


def test_a_landing_has_room_for_its_source() -> None:
    """Shape and dtype are the source's, for a strided one too, and it is contiguous."""
    source = torch.arange(12, dtype=torch.int32).view(3, 4)[:, ::2]
    found = landing(source)
    found.copy_(source)
    assert found.is_contiguous()
    assert found.dtype == torch.int32
    assert torch.equal(found, source)


def test_a_glance_asks_again_unless_nothing_changed() -> None:
    """While steps run every look asks; two looks at the same still moment ask once; another moment asks anew."""
    asked = 0

    def values() -> torch.Tensor:
        nonlocal asked
        asked += 1
        return torch.tensor([asked, 10 * asked])

    glance = Glance(CPU, 2)
    assert glance.look(values, still="a") == [1, 10]
    assert glance.look(values, still="a") == [1, 10]
    assert glance.look(values, still=None) == [2, 20]
    assert glance.look(values, still="a") == [3, 30]
    assert glance.look(values, still="b") == [4, 40]


class _Card:
    """What a glance asks of a device, which answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.queried, self.answers, self.fails = 0, 0, True, False
        monkeypatch.setattr(Glance, "_ask", lambda _, found, still: _Arriving(found, self, still))  # type: ignore[arg-type]
        self.glance = Glance(torch.device("cuda"), 1)

    def query(self) -> bool:
        self.queried += 1
        if self.fails:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return self.answers

    def values(self) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([self.asked])

    def look(self, still: object) -> list[int]:
        return self.glance.look(self.values, still)


def test_a_glance_at_a_device_shows_what_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """While steps run what the look before asked for; when nothing changes, what is there now, asked for once."""
    card = _Card(monkeypatch)
    assert [card.look(None) for _ in range(3)] == [[0], [1], [2]]
    assert [card.look("a"), card.look("a"), card.look("b")] == [[4], [4], [5]]
    assert card.look(None) == [5]
    assert card.look(None) == [6]


def test_a_glance_at_a_device_that_hangs_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the newest that arrived and asks no more: a device takes so many launches and then lets nobody go on. Later it goes on."""
    monkeypatch.setattr(memory.staging, "_PATIENCE_NS", 100_000)
    card = _Card(monkeypatch)
    assert card.look("a") == [1]
    card.answers = False
    assert card.look("b") == [1]
    queried = card.queried
    assert [card.look(still) for still in ("b", "c", None, None, "d")] == 5 * [[1]]
    assert card.asked == 2
    assert card.queried == queried + 5, "it was waited for again"
    card.answers = True
    assert card.look("d") == [3]
    assert card.asked == 3
    card.answers = False
    queried = card.queried
    assert card.look("e") == [3]
    assert card.queried > queried + 1, "of a device that went on it is waited for again"


def test_a_glance_at_a_device_that_failed_shows_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's streams say what happened."""
    card = _Card(monkeypatch)
    assert card.look("a") == [1]
    card.fails = True
    assert [card.look(still) for still in ("b", None, "c")] == 3 * [[1]]
