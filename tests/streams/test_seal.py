"""The seal: the real world raises, the virtual one works, and nothing stays changed."""

import asyncio
import builtins
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from streams import CpuBackend, Escaped, RealClock, VirtualBackend, sealed
from tests.streams.conformance import nothing

pytestmark = pytest.mark.both_loops

ESCAPES: dict[str, Callable[[], Any]] = {
    "time.time": lambda: time.time(),
    "time.monotonic": lambda: time.monotonic(),
    "time.perf_counter_ns": lambda: time.perf_counter_ns(),
    "time.sleep": lambda: time.sleep(0),
    "RealClock": lambda: RealClock().now_ns(),
    "open": lambda: open(__file__).close(),
    "pathlib": lambda: pathlib.Path(__file__).read_text(),
    "socket": lambda: socket.socket(),
    "thread": lambda: threading.Thread(target=nothing).start(),
    "process": lambda: subprocess.Popen([sys.executable, "-c", ""]),
    "timer": lambda: asyncio.get_running_loop().call_later(0.1, nothing),
    "call_at": lambda: asyncio.get_running_loop().call_at(0.0, nothing),
    "reader": lambda: asyncio.get_running_loop().add_reader(0, nothing),
    "executor": lambda: asyncio.get_running_loop().run_in_executor(None, nothing),
}


@pytest.mark.parametrize("way", ESCAPES)
async def test_ways_out_raise_at_the_call(way: str) -> None:
    """Each way to real time or real I/O raises Escaped inside the seal."""
    with sealed(), pytest.raises(Escaped):
        ESCAPES[way]()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: asyncio.sleep(0.001),
        lambda: asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.001),
        lambda: asyncio.to_thread(nothing),
        lambda: asyncio.open_connection("127.0.0.1", 9),
    ],
)
async def test_real_waits_raise_in_the_task(wait: Callable[[], Any]) -> None:
    """Coroutines that wait for real time, threads or sockets raise Escaped where they are awaited."""
    with sealed(), pytest.raises(Escaped):
        await wait()


async def test_virtual_runs_work_inside() -> None:
    """Events, virtual time, sleep(0) and task groups work inside the seal, and work that escapes fails its event."""
    with sealed():
        backend = VirtualBackend(4)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(backend.clock.wait_ns(1000))
        await asyncio.sleep(0)
        event = backend.stream("a").submit(lambda: time.monotonic(), label="escaping")
        with pytest.raises(Escaped, match=r"time\.monotonic"):
            await event
        await backend.close()
    assert backend.clock.now_ns() >= 1000


async def test_threads_of_the_cpu_backend_cannot_start_inside() -> None:
    """A CPU backend used by mistake in a virtual run says so at its first submission, which leaves nothing behind."""
    backend = CpuBackend()
    with sealed(), pytest.raises(Escaped, match="Thread"):
        backend.stream("a").submit(nothing, label="real")
    assert backend.statistics().submitted == 0
    await backend.close()


async def test_other_threads_are_left_alone() -> None:
    """A thread that was there before the seal, say a tape's writer, asks the time and opens files as ever."""
    ask, answered = threading.Event(), threading.Event()
    answers: list[float] = []

    def elsewhere() -> None:
        assert ask.wait(60)
        with open(__file__):
            answers.append(time.monotonic())
        answered.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with sealed():
        ask.set()
        answered.wait()
    thread.join()
    assert len(answers) == 1


async def test_everything_is_put_back() -> None:
    """After the seal, also one left by an exception, all is as it was."""
    loop = asyncio.get_running_loop()
    before = (time.time, time.sleep, builtins.open, socket.socket.__init__, threading.Thread.start, set(vars(loop)))
    with pytest.raises(ZeroDivisionError), sealed():
        raise ZeroDivisionError
    assert (time.time, time.sleep, builtins.open, socket.socket.__init__, threading.Thread.start, set(vars(loop))) == before
    await asyncio.sleep(0.0001)
    assert await asyncio.to_thread(lambda: 3) == 3


def test_sealing_without_a_loop() -> None:
    """The seal also works where no loop runs, and seeded randomness is let through."""
    with sealed():
        assert random.Random(1).random() == random.Random(1).random()
        with pytest.raises(Escaped):
            time.time()
