"""What of a session is in flight."""

import asyncio

import pytest

from memory.operations import Operations
from streams import CpuBackend, Event
from tests.memory.memory_world import hold

pytestmark = pytest.mark.both_loops


async def test_idle_callbacks_wait_for_everything(backend: CpuBackend) -> None:
    """A callback runs once, when the last of several events is done, and at once when nothing is held."""
    operations, told = Operations(), []
    operations.when_idle(lambda: told.append("at once"))
    assert told == ["at once"]
    one, two = backend.stream("one"), backend.stream("two")
    release_one, release_two = hold(one), hold(two)
    first, second = one.submit(lambda: None, label="first"), two.submit(lambda: None, label="second")
    operations.hold(first)
    operations.hold(second)
    operations.when_idle(lambda: told.append("idle"))
    release_two()
    await second
    assert told == ["at once"]
    assert operations.outstanding == 1
    release_one()
    await first
    assert told == ["at once", "idle"]


async def test_a_cancelled_wait_leaves_the_operations_held(backend: CpuBackend) -> None:
    """Cancelling `settle` ends the wait only: the event stays outstanding and completes later."""
    operations = Operations()
    stream = backend.stream("one")
    release = hold(stream)
    event = stream.submit(lambda: 5, label="slow")
    operations.hold(event)
    wait = asyncio.ensure_future(operations.settle())
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert operations.outstanding == 1
    assert not event.done()
    release()
    await operations.settle()
    assert event.result() == 5
    assert operations.outstanding == 0


async def test_a_failure_settles_too_and_breaks_nothing_by_itself(backend: CpuBackend) -> None:
    """`settle` returns when held work failed; only `break_with` breaks a session, and the first reason stays."""
    operations = Operations()

    def fail() -> None:
        raise RuntimeError("lost")

    event: Event[None] = backend.stream("one").submit(fail, label="copy")
    operations.hold(event)
    await operations.settle()
    assert isinstance(event.error(), RuntimeError)
    assert operations.broken is None
    operations.break_with(ValueError("first"))
    operations.break_with(ValueError("second"))
    assert str(operations.broken) == "first"


async def test_frozen_until_the_freezing_copy_is_done(backend: CpuBackend) -> None:
    """Only a copy held as freezing freezes, however often it is held."""
    operations = Operations()
    stream = backend.stream("one")
    release = hold(stream)
    plain, freezing = stream.submit(lambda: None, label="plain"), stream.submit(lambda: None, label="freezing")
    operations.hold(plain)
    assert not operations.frozen
    operations.hold(freezing, freezes=True)
    operations.hold(freezing)
    assert operations.frozen
    assert operations.outstanding == 2
    release()
    await operations.settle()
    assert not operations.frozen
