"""The virtual backend: the common suite under several seeds, and what only it can see.

It can imitate every completion order that streams and dependencies allow, a fast or slow host, failed and late operations.
It cannot imitate work of two streams inside one another, or real durations.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from streams import (
    Backend,
    BufferChanged,
    Cost,
    DependencyFailed,
    Event,
    Fault,
    Observer,
    SeededOrder,
    Stream,
    TransferFailed,
    Unordered,
    VirtualBackend,
)
from tests.streams.conformance import Conformance, Log, nothing, turns

pytestmark = pytest.mark.both_loops


class _VirtualHold:
    """The backend keeps the operations from completing."""

    def __init__(self, backend: VirtualBackend) -> None:
        self._backend = backend
        self._events: list[Event[Any]] | None = []

    def submit(self, stream: Stream, work: Callable[[], Any], *, label: str, **rest: Any) -> Event[Any]:
        event = stream.submit(work, label=label, **rest)
        if self._events is not None:
            self._backend.hold(event)
            self._events.append(event)
        return event

    def open(self) -> None:
        events, self._events = self._events or [], None
        for event in events:
            self._backend.release(event)


class _VirtualArm:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def backend(self, observer: Observer | None = None) -> VirtualBackend:
        return VirtualBackend(self._seed, observer=observer)

    def hold(self, backend: Backend) -> _VirtualHold:
        assert isinstance(backend, VirtualBackend)
        return _VirtualHold(backend)


class TestVirtual(Conformance):
    """The common suite."""

    @pytest.fixture(params=range(3))
    def arm(self, request: pytest.FixtureRequest) -> _VirtualArm:
        return _VirtualArm(request.param)


# effects appear at completion


async def test_destination_is_poison_until_completion() -> None:
    """From start to completion a destination reads as poison of its dtype; afterwards only what the work wrote has changed."""
    backend = VirtualBackend(1)
    dtypes = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)
    buffers = [torch.zeros(4, dtype=dtype) for dtype in dtypes]

    def work() -> None:
        for buffer in buffers:
            buffer[1] = 1

    event = backend.stream("a").submit(work, label="write", writes=buffers)
    poisoned = [torch.isnan(buffer).all().item() if buffer.is_floating_point() else buffer[0].item() for buffer in buffers]
    assert poisoned == [True, True, -(2**31), -(2**63), 255, True]
    await event
    assert [buffer.to(torch.int64).tolist() for buffer in buffers] == [[0, 1, 0, 0]] * len(buffers)
    await backend.close()


async def test_ordered_predecessors_never_see_poison() -> None:
    """Work that is ordered before a write to the same buffer, declared or not, reads what was there before."""
    for seed in range(20):
        backend = VirtualBackend(seed)
        buffer = torch.ones(4)
        seen: list[float] = []
        one, two = backend.stream("a"), backend.stream("b")
        first = one.submit(lambda seen=seen, buffer=buffer: seen.append(buffer.sum().item()), label="read undeclared")
        second = one.submit(lambda seen=seen, buffer=buffer: seen.append(buffer.sum().item()), label="read", reads=(buffer,))
        two.wait(first)
        await two.submit(lambda buffer=buffer: buffer.mul_(2), label="double", after=(second,), writes=(buffer,))
        assert (seen, buffer.tolist()) == ([4.0, 4.0], [2.0] * 4), f"seed {seed}"
        await backend.close()


async def test_forgotten_await_reads_poison() -> None:
    """A host that uses a result before its event sees NaN, under every seed."""
    for seed in range(10):
        backend = VirtualBackend(seed)
        source, target = torch.ones(4), torch.zeros(4)
        backend.stream("a").submit(lambda t=target, s=source: t.copy_(s), label="copy", reads=(source,), writes=(target,))
        assert torch.isnan(target.sum()), f"seed {seed}"
        await backend.close()


async def test_source_changed_in_flight_fails_the_copy() -> None:
    """Writing a source before its copy completes fails the copy, its dependents, and the backend's close."""
    backend = VirtualBackend()
    source, target = torch.ones(4), torch.zeros(4)
    copy = backend.stream("a").submit(lambda: target.copy_(source), label="copy", reads=(source,), writes=(target,))
    after = backend.stream("b").submit(nothing, label="after", after=(copy,))
    source[3] = 2
    with pytest.raises(BufferChanged, match=r"copy on a .* reads\[0\]"):
        await copy
    with pytest.raises(DependencyFailed):
        await after
    with pytest.raises(BufferChanged):
        await backend.close()


async def test_destination_written_in_flight_fails_the_copy() -> None:
    """Writing a destination before the work that writes it completes is found, also where the value is a part of a view."""
    backend = VirtualBackend()
    target = torch.zeros(4, 4)
    copy = backend.stream("a").submit(lambda: target[:, 1].fill_(1), label="copy", writes=(target[:, 1],))
    target[2, 0] = 5  # beside it: allowed
    target[2, 1] = 5
    with pytest.raises(BufferChanged, match=r"writes\[0\]"):
        await copy
    with pytest.raises(BufferChanged):
        await backend.close()


@pytest.mark.parametrize("roles", ["reads writes", "writes reads", "writes writes"])
async def test_unordered_sharing_is_refused_at_submission(roles: str) -> None:
    """Two operations in flight that share bytes, one writing, must be ordered; the later submission raises and the earlier goes on."""
    backend = VirtualBackend()
    buffer = torch.zeros(8)
    first, second = roles.split()
    earlier = backend.stream("a").submit(nothing, label="earlier", **{first: (buffer[:5],)})
    backend.stream("c").submit(nothing, label="beside", **{second: (buffer[5:],)})
    with pytest.raises(Unordered, match="later on b shares a buffer with earlier on a"):
        backend.stream("b").submit(nothing, label="later", **{second: (buffer[4:5],)})
    await backend.stream("d").submit(nothing, label="ordered", after=(earlier,), **{second: (buffer[4:5],)})
    assert (await earlier, backend.statistics().in_flight) == (None, 0)
    with pytest.raises(Unordered):
        await backend.close()


async def test_readers_may_share_and_chains_are_ordered() -> None:
    """Reads share freely; an order through a third stream's operation counts."""
    backend = VirtualBackend(3)
    buffer = torch.zeros(8)
    one = backend.stream("a").submit(nothing, label="read", reads=(buffer,))
    two = backend.stream("b").submit(nothing, label="read too", reads=(buffer,))
    backend.stream("c").wait(one)
    middle = backend.stream("c").submit(nothing, label="middle", after=(two,))
    await backend.stream("d").submit(lambda: buffer.fill_(1), label="write", after=(middle,), writes=(buffer,))
    await backend.close()
    assert buffer.tolist() == [1.0] * 8


async def test_a_streams_own_order_is_enough() -> None:
    """Operations of one stream may share buffers without naming one another."""
    backend = VirtualBackend(6)
    buffer = torch.ones(4)
    for factor in (2, 3, 5):
        backend.stream("a").submit(lambda factor=factor: buffer.mul_(factor), label="scale", reads=(buffer,), writes=(buffer,))
    await backend.close()
    assert buffer.tolist() == [30.0] * 4


async def test_buffers_of_one_operation_may_overlap() -> None:
    """What an operation reads and writes, or writes twice by overlapping views, is as it was when its work runs."""
    backend = VirtualBackend()
    buffer = torch.arange(6.0)
    seen: list[list[float]] = []
    event = backend.stream("a").submit(
        lambda: seen.append(buffer.tolist()), label="look", reads=(buffer[:4],), writes=(buffer[1:], buffer[2:4], buffer)
    )
    assert torch.isnan(buffer).all()
    await event
    assert seen == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    assert buffer.tolist() == seen[0]
    await backend.close()


# seeds, faults, time


async def _completions(seed: int) -> list[str]:
    log = Log()
    backend = VirtualBackend(seed, observer=log)
    for step in range(12):
        event = backend.stream("abc"[step % 3]).submit(nothing, label=f"{step}")
        if step % 5 == 4:
            await event
    await backend.close()
    return [f"{what} {label}" for what, label in log.seen]


async def test_a_seed_is_a_run() -> None:
    """The same seed gives the same run, and different seeds give many different ones."""
    runs = [await _completions(seed) for seed in range(20)]
    assert runs == [await _completions(seed) for seed in range(20)]
    assert len({tuple(run) for run in runs}) > 15


async def test_any_allowed_order_comes_up() -> None:
    """Three unordered operations complete in each of their six orders within a few dozen seeds."""
    orders = set()
    for seed in range(60):
        backend = VirtualBackend(seed)
        order: list[str] = []
        for name in "abc":
            backend.stream(name).submit(lambda name=name, order=order: order.append(name), label=name)
        await backend.close()
        orders.add("".join(order))
    assert orders == {"abc", "acb", "bac", "bca", "cab", "cba"}


async def test_fault_fails_one_operation_and_leaves_poison() -> None:
    """A fault fails the operation it names without running it; the destination is not what it was, and the next one is well."""
    backend = VirtualBackend(SeededOrder(0, faults=(Fault("copy*", nth=1),)))
    targets = [torch.zeros(2) for _ in range(3)]
    stream = backend.stream("a")
    events = [stream.submit(lambda t=target: t.fill_(1), label=f"copy{one}", writes=(target,)) for one, target in enumerate(targets)]
    await stream.idle()
    assert [type(event.error()) for event in events] == [type(None), TransferFailed, type(None)]
    assert (targets[0].tolist(), targets[2].tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert torch.isnan(targets[1]).all()
    await backend.close()


async def test_delayed_operation_comes_last() -> None:
    """A delayed operation completes only when nothing else can, under every seed."""
    for seed in range(10):
        backend = VirtualBackend(SeededOrder(seed, faults=(Fault("late", kind="delay"),)))
        order: list[str] = []
        backend.stream("a").submit(nothing, label="late").on_done(lambda event, order=order: order.append(event.label))
        for _ in range(5):
            backend.stream("b").submit(nothing, label="b").on_done(lambda event, order=order: order.append(event.label))
        await backend.close()
        assert order == ["b"] * 5 + ["late"], f"seed {seed}"


async def test_time_is_the_cost_models() -> None:
    """A chain takes the sum of its costs, beside it nothing is added, and a wait of virtual time takes no real time."""
    backend = VirtualBackend(SeededOrder(5, cost=Cost(launch_ns=100, bytes_per_us=1000)))
    one, two = backend.stream("a"), backend.stream("b")
    first = one.submit(nothing, label="first", payload_bytes=50)
    second = two.submit(nothing, label="second", after=(first,))
    await second
    assert backend.clock.now_ns() == 150 + 100
    await backend.clock.wait_ns(3_600 * 10**9)
    assert backend.clock.now_ns() == 250 + 3_600 * 10**9
    await backend.close()


async def test_timers_fire_in_order_between_completions() -> None:
    """Timers fire at their time, in order of time then of making, before a completion that is later; a cancelled one is forgotten."""
    backend = VirtualBackend(SeededOrder(2, cost=Cost(launch_ns=1000)))
    seen: list[tuple[str, int]] = []

    async def wait(name: str, duration_ns: int) -> None:
        await backend.clock.wait_ns(duration_ns)
        seen.append((name, backend.clock.now_ns()))

    stream = backend.stream("a")
    first = stream.submit(nothing, label="bind")
    await first
    began_ns = backend.clock.now_ns()
    tasks = [asyncio.create_task(wait(*one)) for one in (("late", 2000), ("early", 10), ("twin", 10), ("never", 50))]
    await asyncio.sleep(0)  # the timers are made, and nothing has happened yet
    stream.submit(nothing, label="work").on_done(lambda _: seen.append(("work", backend.clock.now_ns())))
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [(name, at_ns - began_ns) for name, at_ns in seen] == [("early", 10), ("twin", 10), ("work", 1000), ("late", 2000)]
    await backend.clock.wait_ns(0)
    await backend.close()


async def test_idle_backend_schedules_nothing() -> None:
    """With nothing in flight, or everything held, the backend asks the loop for nothing."""
    backend = VirtualBackend()
    loop = asyncio.get_running_loop()
    event = backend.stream("a").submit(nothing, label="held")
    backend.hold(event)
    await turns(3)
    calls = 0
    real = loop.call_soon

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    loop.call_soon = counted  # type: ignore[method-assign]
    for _ in range(10):
        await asyncio.sleep(0)
    quiet = calls
    backend.release(event)
    await event
    assert quiet <= 10  # the test's own ten steps at most: asyncio's tasks written in C do not come this way
    assert calls > quiet
    await backend.close()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65])
async def test_strided_and_empty_buffers_are_watched_exactly(length: int) -> None:
    """Interleaved views of one storage do not share bytes; the same column from another stream does."""
    backend = VirtualBackend()
    table = torch.zeros(length, 3)
    for column in range(2):
        backend.stream(f"{column}").submit(lambda c=column: table[:, c].fill_(c + 1), label="fill", writes=(table[:, column],))
    if length:
        with pytest.raises(Unordered):
            backend.stream("x").submit(nothing, label="clash", reads=(table[-1:, 1],))
        with pytest.raises(Unordered):
            await backend.close()
    else:
        backend.stream("x").submit(nothing, label="no clash", reads=(table[-1:, 1],))
        await backend.close()
    assert table.tolist() == [[1.0, 2.0, 0.0]] * length
