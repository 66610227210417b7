"""Observers that join a backend for a while."""

from collections.abc import Sequence
from typing import Any

import pytest

from streams import Backend, CpuBackend, Event, VirtualBackend, observed

pytestmark = pytest.mark.both_loops


class _Seen:
    """Keeps what it was told of, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def submitted(self, event: Event[Any], after: Sequence[Any], waits: Sequence[Any], payload_bytes: int, at_ns: int) -> None:
        self.told.append(("submitted", event.label))

    def started(self, event: Event[Any], at_ns: int) -> None:
        self.told.append(("started", event.label))

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        self.told.append(("completed", event.label))

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        self.told.append(("resumed" if ended else "awaited", event.label))

    @property
    def labels(self) -> set[str]:
        return {label for _, label in self.told}


async def _ran(backend: Backend, label: str) -> None:
    await backend.stream("one").submit(lambda: None, label=label)


@pytest.mark.parametrize("make", [CpuBackend, VirtualBackend])
async def test_who_joins_sees_what_happens_meanwhile_and_nothing_else(make: Any) -> None:
    """An observer sees the work of its own block, beside the one that was there; afterwards the backend calls nobody else."""
    always, guest = _Seen(), _Seen()
    for first in (None, always):
        backend = make(observer=first)
        await _ran(backend, "before")
        with observed(backend, guest):
            await _ran(backend, "meanwhile")
        await _ran(backend, "after")
        await backend.close()
        assert backend.observer is first
        assert guest.labels == {"meanwhile"}
        assert [what for what, _ in guest.told if what in ("submitted", "started", "completed")] == ["submitted", "started", "completed"]
        guest.told.clear()
    assert always.labels == {"before", "meanwhile", "after"}


async def test_guests_leave_in_any_order() -> None:
    """The one that came first may leave first: the other still sees, and the backend is left as it was."""
    backend, one, other = CpuBackend(), _Seen(), _Seen()
    first, second = observed(backend, one), observed(backend, other)
    first.__enter__()
    second.__enter__()
    await _ran(backend, "both")
    first.__exit__(None, None, None)
    await _ran(backend, "second")
    second.__exit__(None, None, None)
    assert backend.observer is None
    await backend.close()
    assert (one.labels, other.labels) == ({"both"}, {"both", "second"})


async def test_a_wait_outlives_who_saw_its_beginning() -> None:
    """Work that was submitted under a guest is awaited and ends after that has left, and nobody misses it."""
    backend = CpuBackend()
    with observed(backend, _Seen()):
        event = backend.stream("one").submit(lambda: 7, label="late")
    assert await event == 7
    await backend.close()
