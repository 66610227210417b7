"""One suite for every backend. A backend's test module subclasses `Conformance` and supplies the `arm` fixture.

An arm makes backends and *holds*: work that is submitted now and does not complete before the test says so. Nothing here sleeps.
"""

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest
import torch
from structlog.testing import capture_logs

from streams import Backend, Closed, DependencyFailed, Event, Full, Observer, Stream


class Hold(Protocol):
    """Keeps work from completing until `open`."""

    def submit(self, stream: Stream, work: Callable[[], Any], *, label: str, **rest: Any) -> Event[Any]: ...

    def open(self) -> None: ...


class Arm(Protocol):
    """One backend under the suite."""

    def backend(self, observer: Observer | None = None) -> Backend: ...

    def hold(self, backend: Backend) -> Hold: ...


class GateHold:
    """A hold for devices: work comes after an event of no backend, which happens at `open`."""

    def __init__(self) -> None:
        self._gate: Event[None] = Event("gate")

    def submit(self, stream: Stream, work: Callable[[], Any], *, label: str, **rest: Any) -> Event[Any]:
        rest["after"] = [*rest.get("after", ()), self._gate]
        return stream.submit(work, label=label, **rest)

    def open(self) -> None:
        if not self._gate.done():
            self._gate.settle(None, None)


class Boom(Exception):
    """What failing work raises."""


def boom() -> None:
    raise Boom("boom")


def nothing() -> None:
    """Work that does nothing."""


async def turns(count: int = 20) -> None:
    """Let the loop run some rounds: long enough for anything that is wrongly ready to show itself."""
    for _ in range(count):
        await asyncio.sleep(0)


class Log(Observer):
    """An observer that keeps (what, label)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.times: list[int] = []

    def submitted(self, event: Event[Any], after: Any, waits: Any, payload_bytes: int, at_ns: int) -> None:
        self.seen.append(("submitted", f"{event.label}<{','.join(one.label for one in after)}|{','.join(one.label for one in waits)}"))

    def started(self, event: Event[Any], at_ns: int) -> None:
        self.seen.append(("started", event.label))
        self.times.append(at_ns)

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        self.seen.append(("completed" if error is None else "failed", event.label))
        self.times.append(at_ns)

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        self.seen.append(("resumed" if ended else "awaited", event.label))


@pytest.mark.both_loops
class Conformance:
    """What `streams/stream.py` promises."""

    @pytest.fixture
    async def backend(self, arm: Arm) -> AsyncIterator[Backend]:
        made = arm.backend()
        yield made
        await made.close()

    # results and order

    async def test_result_comes_back(self, backend: Backend) -> None:
        """The event is not done at submission, then carries what the work returned, however often it is asked."""
        event = backend.stream("a").submit(lambda: 7, label="seven", session="s1")
        assert not event.done()
        assert event.error() is None
        with pytest.raises(AssertionError, match="seven"):
            event.result()
        assert await event == 7
        assert event.done()
        assert (await event, event.result(), event.error()) == (7, 7, None)
        assert (event.label, event.stream, event.session) == ("seven", "a", "s1")

    async def test_one_stream_runs_in_order(self, backend: Backend) -> None:
        """Work of one stream runs, and its events happen, in submission order."""
        ran: list[int] = []
        happened: list[int] = []
        stream = backend.stream("a")
        for one in range(50):
            stream.submit(lambda one=one: ran.append(one), label="step").on_done(lambda _, one=one: happened.append(one))
        await stream.idle()
        assert ran == list(range(50))
        assert happened == ran

    async def test_streams_overlap(self, backend: Backend, arm: Arm) -> None:
        """Work on one stream completes while another stream's work is still going."""
        hold = arm.hold(backend)
        slow = hold.submit(backend.stream("a"), nothing, label="slow")
        await backend.stream("b").submit(nothing, label="quick")
        assert not slow.done()
        hold.open()
        await slow

    async def test_after_starts_later(self, backend: Backend, arm: Arm) -> None:
        """Work ordered after another stream's event sees all its effects and does not run before."""
        hold = arm.hold(backend)
        source, target = torch.zeros(8), torch.zeros(8)
        first = hold.submit(backend.stream("a"), lambda: source.fill_(3.0), label="fill", writes=(source,))
        second = backend.stream("b").submit(lambda: target.copy_(source), label="copy", after=(first,), reads=(source,), writes=(target,))
        await turns()
        assert not second.done()
        hold.open()
        await second
        assert first.done()
        assert target.tolist() == [3.0] * 8

    async def test_wait_orders_the_next_work(self, backend: Backend, arm: Arm) -> None:
        """`wait` holds back everything submitted to that stream afterwards, and nothing submitted before."""
        hold = arm.hold(backend)
        gate = hold.submit(backend.stream("a"), nothing, label="gate")
        stream = backend.stream("b")
        before = stream.submit(nothing, label="before")
        stream.wait(gate)
        behind = [stream.submit(nothing, label="behind") for _ in range(3)]
        await before
        await turns()
        assert not any(event.done() for event in behind)
        hold.open()
        await behind[-1]
        assert gate.done()

    async def test_streams_wait_for_each_other_without_deadlock(self, backend: Backend) -> None:
        """A chain that zigzags between two streams completes, also where a stream waits for work submitted after its own."""
        one, two = backend.stream("a"), backend.stream("b")
        order: list[str] = []
        event = one.submit(lambda: order.append("a0"), label="a0")
        for step in range(1, 20):
            event = two.submit(lambda step=step: order.append(f"b{step}"), label="b", after=(event,))
            one.wait(event)
            event = one.submit(lambda step=step: order.append(f"a{step}"), label="a")
        await event
        assert order == ["a0", *(f"{name}{step}" for step in range(1, 20) for name in "ba")]

    async def test_random_graphs_match_running_in_sequence(self, arm: Arm) -> None:
        """Random graphs of dependent writes leave what running them one by one in submission order leaves."""
        for seed in range(10):
            await _random_graph(arm, seed)

    async def test_same_name_same_stream(self, backend: Backend) -> None:
        """A name stands for one stream."""
        assert backend.stream("a") is backend.stream("a")
        assert backend.stream("a") is not backend.stream("b")
        assert backend.stream("a").name == "a"

    async def test_work_records_no_gradients(self, backend: Backend) -> None:
        """Work on parameters leaves nothing for autograd, and does not change the caller's own setting."""
        weight = torch.ones(3, requires_grad=True)
        product = await backend.stream("a").submit(lambda: weight * 2, label="product")
        assert not product.requires_grad
        assert torch.is_grad_enabled()

    async def test_foreign_and_completed_events_order_too(self, backend: Backend, arm: Arm) -> None:
        """Work may come after another backend's event, and after one that was complete from the start."""
        other = arm.backend()
        hold = arm.hold(other)
        foreign = hold.submit(other.stream("x"), nothing, label="foreign")
        event = backend.stream("a").submit(nothing, label="mine", after=(foreign, Event.completed(1)))
        await turns()
        assert not event.done()
        hold.open()
        await event
        failing = hold.submit(other.stream("x"), boom, label="foreign boom")
        with pytest.raises(DependencyFailed) as caught:
            await backend.stream("a").submit(nothing, label="mine", after=(failing,))
        assert caught.value.__cause__ is failing.error()
        await other.close()

    # failures

    async def test_failure_is_the_original(self, backend: Backend) -> None:
        """A failed event raises the very exception of the work, every time."""
        failure = Boom("here")

        def work() -> None:
            raise failure

        event = backend.stream("a").submit(work, label="failing")
        for _ in range(2):
            with pytest.raises(Boom) as caught:
                await event
            assert caught.value is failure
        assert event.error() is failure

    async def test_failure_reaches_what_comes_after_and_nothing_else(self, backend: Backend) -> None:
        """A chain of dependents fails without running, its cause the first failure; other work of the same streams runs."""
        one, two = backend.stream("a"), backend.stream("b")
        ran: list[str] = []
        first = one.submit(boom, label="first")
        second = two.submit(lambda: ran.append("second"), label="second", after=(first,))
        third = one.submit(lambda: ran.append("third"), label="third", after=(second,))
        beside = one.submit(lambda: ran.append("beside"), label="beside")
        two.wait(first)
        ordered = two.submit(lambda: ran.append("ordered"), label="ordered")
        await beside
        await ordered
        assert sorted(ran) == ["beside", "ordered"]
        for event in (second, third):
            with pytest.raises(DependencyFailed) as caught:
                await event
            assert caught.value.__cause__ is first.error()
        with pytest.raises(DependencyFailed):
            await two.submit(nothing, label="late", after=(first,))

    async def test_even_exits_stay_in_the_event(self, backend: Backend) -> None:
        """Work that raises SystemExit fails its event; the stream goes on."""

        def leave() -> None:
            raise SystemExit(3)

        event = backend.stream("a").submit(leave, label="leaving")
        assert await backend.stream("a").submit(lambda: 1, label="next") == 1
        assert isinstance(event.error(), SystemExit)

    async def test_unobserved_failure_is_counted_and_logged_once(self, arm: Arm) -> None:
        """A failure nobody asked about shows in the statistics and once in the log; an observed one, or one with dependents, does not."""
        backend = arm.backend()
        stream = backend.stream("a")
        stream.submit(boom, label="lost")
        seen = stream.submit(boom, label="seen")
        root = stream.submit(boom, label="root")
        leaf = stream.submit(nothing, label="leaf", after=(root,))
        await stream.idle()
        assert isinstance(seen.error(), Boom)
        assert isinstance(leaf.error(), DependencyFailed)
        statistics = backend.statistics()
        assert (statistics.failed, statistics.unobserved_failures) == (4, 1)
        with capture_logs() as logs:
            await backend.close()
            await backend.close()
        assert [(line["event"], line["unobserved"], line["labels"]) for line in logs] == [("operation.failed", 1, ["lost"])]

    async def test_callback_failure_surfaces_at_close(self, arm: Arm) -> None:
        """A callback that raises stops neither other callbacks nor waiters, reaches the loop's handler, and close raises it."""
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(type(context["exception"]).__name__))
        backend = arm.backend()
        event = backend.stream("a").submit(lambda: 5, label="five")
        event.on_done(lambda _: boom())
        event.on_done(lambda done: told.append(str(done.result())))
        assert await event == 5
        assert told == ["5", "Boom"]
        with pytest.raises(Boom):
            await backend.close()
        await backend.close()

    # waiting and cancelling

    async def test_cancelled_wait_leaves_the_work(self, backend: Backend, arm: Arm) -> None:
        """Cancelling one of two waiters ends that wait only: the work completes and the other waiter gets its result."""
        hold = arm.hold(backend)
        event = hold.submit(backend.stream("a"), lambda: 9, label="held")

        async def wait() -> int:
            value: int = await event
            return value

        leaves, stays = asyncio.create_task(wait()), asyncio.create_task(wait())
        await turns()
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert not event.done()
        hold.open()
        assert await stays == 9

    async def test_buffers_live_until_completion(self, backend: Backend, arm: Arm) -> None:
        """Buffers and closure outlive every other reference, also a cancelled wait, and are dropped once the event is done."""
        hold = arm.hold(backend)
        read, write, captured = torch.ones(4), torch.zeros(4), torch.ones(4)
        dead = [weakref.ref(one) for one in (read, write, captured)]
        event = hold.submit(
            backend.stream("a"), lambda captured=captured: captured.sum(), label="held", reads=(read,), writes=(write,)
        )  # fmt: skip
        del read, write, captured
        waiting = asyncio.ensure_future(event.wait_done())
        await turns()
        waiting.cancel()
        await turns()
        gc.collect()
        assert all(one() is not None for one in dead)
        hold.open()
        await event
        await backend.stream("a").submit(nothing, label="next")
        gc.collect()
        assert [one() for one in dead] == [None, None, None]

    async def test_callbacks_precede_waiters_and_follow_dependencies(self, backend: Backend) -> None:
        """A dependent's callbacks run after its dependency's, a late callback at once, and waiters see what callbacks did."""
        seen: list[str] = []
        first = backend.stream("a").submit(nothing, label="first")
        second = backend.stream("b").submit(nothing, label="second", after=(first,))
        second.on_done(lambda event: seen.append(event.label))
        first.on_done(lambda event: seen.append(event.label))
        first.on_done(lambda event: event.on_done(lambda _: seen.append("nested")))
        await second
        assert seen == ["first", "nested", "second"]
        second.on_done(lambda _: seen.append("late"))
        assert seen[-1] == "late"

    async def test_idle_waits_for_failures_too(self, backend: Backend) -> None:
        """`idle` returns at once on a fresh stream, and after the last of what was submitted, raising nothing."""
        stream = backend.stream("a")
        await stream.idle()
        events = [stream.submit(work, label="any") for work in (nothing, boom, nothing, boom)]
        await stream.idle()
        assert [event.error() is None for event in events] == [True, False, True, False]

    # limits and closing

    async def test_full_then_room(self, backend: Backend, arm: Arm) -> None:
        """At the limit `submit` raises Full and changes nothing; `wait_room` returns once there is room, to one submitter after another."""
        hold = arm.hold(backend)
        stream = backend.stream("a", queue_max=2)
        held = [hold.submit(stream, nothing, label="held") for _ in range(2)]
        with pytest.raises(Full, match="at most 2"):
            stream.submit(nothing, label="over")
        done: list[int] = []

        async def submitter(one: int) -> None:
            await stream.wait_room()
            await stream.submit(nothing, label="room")
            done.append(one)

        tasks = [asyncio.create_task(submitter(one)) for one in range(5)]
        await turns()
        assert not any(task.done() for task in tasks)
        hold.open()
        await asyncio.gather(*tasks)
        assert sorted(done) == list(range(5))
        assert all(event.done() for event in held)
        await stream.wait_room()
        assert backend.statistics().submitted == 7

    async def test_close_while_busy(self, backend: Backend, arm: Arm) -> None:
        """Closing refuses work at once, wakes those who wait for room with Closed, and returns when what was submitted is complete."""
        hold = arm.hold(backend)
        stream = backend.stream("a", queue_max=1)
        event = hold.submit(stream, lambda: 4, label="held")
        room = asyncio.create_task(stream.wait_room())
        await turns()
        closing = asyncio.create_task(stream.close())
        await turns()
        with pytest.raises(Closed, match="late"):
            stream.submit(nothing, label="late")
        with pytest.raises(Closed):
            await room
        assert not closing.done()
        hold.open()
        await closing
        assert event.result() == 4
        await stream.close()
        assert await backend.stream("b").submit(lambda: 1, label="elsewhere") == 1

    async def test_backend_close_waits_for_all_streams(self, arm: Arm) -> None:
        """A backend closes after failures, waits for every stream, refuses work on all at once, and may be closed twice at a time."""
        backend = arm.backend()
        hold = arm.hold(backend)
        one, two = backend.stream("a"), backend.stream("b")
        failing = one.submit(boom, label="failing")
        held = hold.submit(two, lambda: 2, label="held")
        closing = [asyncio.create_task(backend.close()) for _ in range(2)]
        await turns()
        with pytest.raises(Closed):
            two.submit(nothing, label="late")
        with pytest.raises(Closed):
            backend.stream("c")
        assert not any(task.done() for task in closing)
        hold.open()
        await asyncio.gather(*closing)
        assert (held.result(), type(failing.error())) == (2, Boom)

    async def test_unused_backend_closes(self, arm: Arm) -> None:
        """A backend that never ran anything closes."""
        backend = arm.backend()
        backend.stream("a")
        await backend.close()
        assert backend.statistics().submitted == 0

    async def test_statistics_count(self, backend: Backend, arm: Arm) -> None:
        """Statistics are a snapshot of what was submitted, completed, failed and in flight, for each stream and in all."""
        hold = arm.hold(backend)
        stream = backend.stream("a")
        await stream.submit(nothing, label="copy", payload_bytes=100)
        await stream.submit(boom, label="boom", payload_bytes=10).wait_done()
        held = hold.submit(backend.stream("b"), nothing, label="held")
        before = backend.statistics()
        assert (before.submitted, before.completed, before.failed, before.in_flight) == (3, 1, 1, 1)
        assert [(one.name, one.in_flight, one.payload_bytes) for one in before.streams] == [("a", 0, 110), ("b", 1, 0)]
        hold.open()
        await held
        assert (backend.statistics().in_flight, before.in_flight) == (0, 1)

    async def test_other_threads_may_not_submit(self, backend: Backend) -> None:
        """Submitting or waiting from another thread is our bug and asserts."""
        stream = backend.stream("a")
        event = stream.submit(nothing, label="bind")
        raised: list[type[BaseException]] = []

        def elsewhere() -> None:
            for call in (lambda: stream.submit(nothing, label="wrong"), lambda: stream.wait(event)):
                try:
                    call()
                except AssertionError as error:
                    raised.append(type(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert raised == [AssertionError, AssertionError]
        await event

    async def test_observer_sees_the_life_of_events(self, arm: Arm) -> None:
        """The observer is told submit, start, completion and waits, in an order that agrees with what happened."""
        log = Log()
        backend = arm.backend(log)
        first = backend.stream("a").submit(nothing, label="first")
        backend.stream("b").wait(first)
        second = backend.stream("b").submit(boom, label="second")
        third = backend.stream("b").submit(nothing, label="third", after=(first, second))
        with pytest.raises(DependencyFailed):
            await third
        await backend.close()
        assert log.seen == [
            ("submitted", "first<|"), ("submitted", "second<|first"), ("submitted", "third<first,second|"), ("awaited", "third"),
            ("started", "first"), ("completed", "first"), ("started", "second"), ("failed", "second"), ("failed", "third"),
            ("resumed", "third"),
        ]  # fmt: skip
        assert log.times == sorted(log.times)

    async def test_raising_observer_changes_nothing(self, arm: Arm) -> None:
        """An observer that raises disturbs no submission, completion or wait; close raises its failure."""

        class Broken(Log):
            def submitted(self, *_: Any) -> None:
                boom()

            def completed(self, *_: Any) -> None:
                boom()

        backend = arm.backend(Broken())
        assert [await backend.stream("a").submit(lambda: 3, label="three") for _ in range(2)] == [3, 3]
        with pytest.raises(Boom):
            await backend.close()


async def _random_graph(arm: Arm, seed: int) -> None:
    """Three streams, cells that operations add into; every access is ordered by `after`, `wait` or the stream itself."""
    draw = random.Random(seed)
    backend = arm.backend()
    cells = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    expected = [0] * len(cells)
    touched: list[list[Event[Any]]] = [[] for _ in cells]  # what later work on a cell must come after

    def mix(target: torch.Tensor, source: torch.Tensor, term: int) -> None:
        target.mul_(3).add_(source).add_(term)

    for step in range(40):
        stream = backend.stream(draw.choice("abc"))
        to, source = draw.sample(range(len(cells)), 2)
        before = [*touched[to], *touched[source]]
        cut = draw.randrange(len(before) + 1)
        for event in before[:cut]:
            stream.wait(event)
        event = stream.submit(
            lambda to=to, source=source, step=step: mix(cells[to], cells[source], step),
            label=f"mix{step}", after=before[cut:], reads=(cells[source],), writes=(cells[to],),
        )  # fmt: skip
        expected[to] = expected[to] * 3 + expected[source] + step
        touched[to] = [event]
        touched[source].append(event)
        if draw.random() < 0.2:
            await event
    await backend.close()
    wrapped = [(value + 2**63) % 2**64 - 2**63 for value in expected]
    assert [cell.tolist() for cell in cells] == [[value, value] for value in wrapped], f"seed {seed}"
