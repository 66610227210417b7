"""The CPU backend: the common suite, and what only threads can get wrong."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from streams import Backend, CpuBackend, Event, Observer, Stream, cpu
from tests.streams.conformance import Conformance, boom, nothing


class _ThreadHold:
    """Work blocks its worker until `open`."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def submit(self, stream: Stream, work: Callable[[], Any], *, label: str, **rest: Any) -> Event[Any]:
        def held() -> Any:
            assert self._opened.wait(60), f"{label} was never let go"
            return work()

        return stream.submit(held, label=label, **rest)

    def open(self) -> None:
        self._opened.set()


class _CpuArm:
    def backend(self, observer: Observer | None = None) -> CpuBackend:
        return CpuBackend(observer)

    def hold(self, backend: Backend) -> _ThreadHold:
        return _ThreadHold()


class TestCpu(Conformance):
    """The common suite."""

    @pytest.fixture
    def arm(self) -> _CpuArm:
        return _CpuArm()


def _worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("stream-")]


async def test_work_overlaps_on_threads_of_its_own() -> None:
    """Two streams' work runs at the same time: each waits inside its work for the other."""
    backend = CpuBackend()
    meeting = threading.Barrier(2, timeout=60)
    events = [backend.stream(name).submit(lambda: (meeting.wait(), threading.get_ident())[1], label="meet") for name in "ab"]
    idents = {await event for event in events}
    assert len(idents) == 2
    assert threading.get_ident() not in idents
    await backend.close()


async def test_workers_use_one_torch_thread() -> None:
    """Inside work torch has one thread and no gradients."""
    backend = CpuBackend()
    assert await backend.stream("a").submit(lambda: (torch.get_num_threads(), torch.is_grad_enabled()), label="ask") == (1, False)
    await backend.close()


async def test_close_joins_threads_after_errors() -> None:
    """No worker thread is left after close, failures or not."""
    others = _worker_threads()
    backend = CpuBackend()
    failing = [backend.stream(name).submit(boom, label="boom") for name in "abc"]
    mine = [thread for thread in _worker_threads() if thread not in others]
    assert len(mine) == 3
    await backend.close()
    assert not any(thread.is_alive() for thread in mine)
    assert all(event.error() for event in failing)


async def test_forgotten_backend_stops_its_threads() -> None:
    """A backend nobody holds any more takes its worker threads with it."""
    others = _worker_threads()  # of tests before this one in the process, whose backends nobody has collected yet
    backend = CpuBackend()
    await backend.stream("a").submit(nothing, label="start")
    threads, gone = [thread for thread in _worker_threads() if thread not in others], weakref.ref(backend)
    assert len(threads) == 1
    del backend
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


async def test_wake_ups_are_shared() -> None:
    """Outcomes that pile up while the loop is busy reach it with one wake-up."""
    backend = CpuBackend()
    stream = backend.stream("a")
    await stream.submit(nothing, label="bind")
    loop = asyncio.get_running_loop()
    wakes = 0
    real = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal wakes
        wakes += 1
        return real(*args, **kwargs)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    finished = threading.Event()
    events = [stream.submit(nothing, label="many") for _ in range(100)]
    stream.submit(finished.set, label="last")
    assert finished.wait(60)  # the loop is held here, so that everything finishes behind its back
    assert not any(event.done() for event in events)
    await stream.idle()
    assert 1 <= wakes <= 2  # the last outcome may come after the first drain
    await backend.close()


async def test_outcomes_enter_the_queue_before_dependents_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker can see an operation finished that is not yet on its way to the loop: dependents cannot overtake it."""
    finished: list[bool] = []
    real = cpu._Workers.append
    monkeypatch.setattr(cpu._Workers, "append", lambda self, one: (finished.append(one.finished), real(self, one)))
    backend = CpuBackend()
    await backend.stream("a").submit(nothing, label="one")
    await backend.close()
    assert finished == [False]


def test_a_second_loop_is_refused() -> None:
    """A backend that ran on one loop asserts when another one submits to it, instead of never waking anybody."""
    backend = CpuBackend()

    async def use() -> None:
        await backend.stream("a").submit(nothing, label="use")

    asyncio.run(use())
    with pytest.raises(AssertionError, match="one loop"):
        asyncio.run(use())


async def test_stopping_drops_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a backend that is gone end after the operation they are in, also one that waits for another's dropped work."""
    monkeypatch.setattr(cpu, "_STOP_WAIT_S", 60.0)
    others = _worker_threads()
    backend = CpuBackend()
    opened = threading.Event()
    ran: list[str] = []
    backend.stream("a").submit(lambda: opened.wait(60), label="running")
    backend.stream("b").wait(backend.stream("a").submit(lambda: ran.append("queued"), label="queued"))
    backend.stream("b").submit(lambda: ran.append("waiting"), label="waiting")
    workers = [thread for thread in _worker_threads() if thread not in others]
    assert len(workers) == 2
    stopping = threading.Thread(target=backend._workers.stop)
    stopping.start()
    while not backend._workers.stopped:  # noqa: ASYNC110  # the other thread's flag, one instruction away
        await asyncio.sleep(0)
    opened.set()
    await asyncio.to_thread(stopping.join, 60)
    assert not any(thread.is_alive() for thread in workers)
    assert not ran


def test_interpreter_exits_cleanly_without_close() -> None:
    """A program that never closes its backend, with work queued, exits with status 0 and without a word."""
    program = (
        "import asyncio, torch\n"
        "from streams import CpuBackend\n"
        "x = torch.ones(400, 400)\n"
        "backend = CpuBackend()\n"
        "async def main():\n"
        "    for _ in range(300):\n"
        "        last = backend.stream('a').submit(lambda: x @ x, label='product')\n"
        "    backend.stream('b').wait(last)\n"
        "    backend.stream('b').submit(lambda: 1, label='after')\n"
        "asyncio.run(main())\n"
        "print('end')\n"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")
