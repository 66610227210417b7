"""Replay: the whole conformance suite again from its own tapes, runs of real threads replayed, and runs that leave their tape."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from streams import (
    Backend,
    CpuBackend,
    Event,
    Fault,
    Observer,
    ReplayOrder,
    SeededOrder,
    Stream,
    Tape,
    TapeMismatch,
    TapeRecorder,
    TransferFailed,
    VirtualBackend,
)
from streams.tape import Completed, Header, Record, Submitted
from tests.streams.conformance import Conformance, boom, nothing

pytestmark = pytest.mark.both_loops


class _Tee(Observer):
    """Tells two observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def submitted(self, *args: Any) -> None:
        for one in self._observers:
            one.submitted(*args)

    def started(self, *args: Any) -> None:
        for one in self._observers:
            one.started(*args)

    def completed(self, *args: Any) -> None:
        for one in self._observers:
            one.completed(*args)

    def awaited(self, *args: Any) -> None:
        for one in self._observers:
            one.awaited(*args)


class _Hold:
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


class _TapingArm:
    """Makes virtual backends that record; the n-th one follows the n-th tape, if there are tapes."""

    def __init__(self, tapes: list[Tape] | None = None) -> None:
        self._follow = tapes
        self._recorders: list[tuple[TapeRecorder, list[Record]]] = []

    def backend(self, observer: Observer | None = None) -> VirtualBackend:
        place = len(self._recorders)
        records: list[Record] = []
        recorder = TapeRecorder(records.extend)
        self._recorders.append((recorder, records))
        watch = recorder if observer is None else _Tee(recorder, observer)
        return VirtualBackend(SeededOrder(11) if self._follow is None else ReplayOrder(self._follow[place]), observer=watch)

    def hold(self, backend: Backend) -> _Hold:
        assert isinstance(backend, VirtualBackend)
        return _Hold(backend)

    def tapes(self) -> list[Tape]:
        for recorder, _ in self._recorders:
            recorder.flush()
        return [Tape(Header(), tuple(records)) for _, records in self._recorders]


SUITE = [name for name, _ in inspect.getmembers(Conformance, inspect.iscoroutinefunction) if name.startswith("test_")]


async def _run(name: str, arm: _TapingArm) -> None:
    test = getattr(Conformance(), name)
    if "backend" in inspect.signature(test).parameters:
        backend = arm.backend()
        arguments = {"backend": backend, "arm": arm}
        await test(**{key: value for key, value in arguments.items() if key in inspect.signature(test).parameters})
        await backend.close()
    else:
        await test(arm=arm)


@pytest.mark.parametrize("name", SUITE)
async def test_suite_replays(name: str) -> None:
    """Each test of the common suite passes again when its backends follow the tapes of its first run, and records equal outcomes."""
    first = _TapingArm()
    await _run(name, first)
    again = _TapingArm(first.tapes())
    await _run(name, again)
    for one, two in zip(first.tapes(), again.tapes(), strict=True):
        assert [_timed(record) for record in one.records if isinstance(record, Completed)] == [
            _timed(record) for record in two.records if isinstance(record, Completed)
        ]


def _timed(record: Completed) -> tuple[int, int, str]:
    return record.number, record.at_ns, record.error


# a program whose outcome depends on the order of completion


async def _race(backend: Backend, *, extra: Callable[[], None] | None = None, label: str = "add") -> list[int]:
    """Two streams append to one list, undeclared; the host submits more work as it follows. The list tells the order."""
    order: list[int] = []

    async def follow(stream: Stream, sign: int) -> None:
        for step in range(1, 6):
            await stream.submit(lambda step=step: order.append(sign * step), label=label, payload_bytes=step)

    async with asyncio.TaskGroup() as group:
        group.create_task(follow(backend.stream("a"), 1))
        group.create_task(follow(backend.stream("b"), -1))
    if extra is not None:
        extra()
    await backend.close()
    return order


async def _taped(make: Callable[[Observer], Backend], run: Callable[[Backend], Coroutine[Any, Any, Any]]) -> tuple[Any, Tape]:
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    outcome = await run(make(recorder))
    recorder.flush()
    return outcome, Tape(Header(), tuple(records))


async def test_replay_repeats_the_order_of_real_threads() -> None:
    """A run of real threads replays on the virtual backend: completions in the recorded order, at the recorded times."""
    _, tape = await _taped(CpuBackend, _race)
    recorded = [(record.number, record.at_ns) for record in tape.records if isinstance(record, Completed)]
    _, again = await _taped(lambda observer: VirtualBackend(ReplayOrder(tape), observer=observer), _race)
    assert [(record.number, record.at_ns) for record in again.records if isinstance(record, Completed)] == recorded


async def test_replay_repeats_a_seeds_effects() -> None:
    """Effects that depend on the order come out as recorded, for many seeds, also through the file's bytes."""
    outcomes = set()
    for seed in range(15):
        order, tape = await _taped(lambda observer, seed=seed: VirtualBackend(seed, observer=observer), _race)
        back = Tape.parse(tape.encode().splitlines(), "memory")
        assert await _race(VirtualBackend(ReplayOrder(back))) == order, f"seed {seed}"
        outcomes.add(tuple(order))
    assert len(outcomes) > 5


async def test_replay_repeats_device_failures() -> None:
    """A failure the device caused is on the tape and happens again, with poison and dependents; the work's own happens by itself."""

    async def run(backend: Backend) -> list[str]:
        target = torch.zeros(2)
        copy = backend.stream("a").submit(lambda: target.fill_(1), label="copy", writes=(target,))
        own = backend.stream("b").submit(boom, label="own")
        after = backend.stream("b").submit(nothing, label="after", after=(copy,))
        await backend.close()
        assert torch.isnan(target).all()
        return [type(event.error()).__name__ for event in (copy, own, after)]

    faults = (Fault("copy"),)
    first, tape = await _taped(lambda observer: VirtualBackend(SeededOrder(1, faults=faults), observer=observer), run)
    assert first == [TransferFailed.__name__, "Boom", "DependencyFailed"]
    assert await run(VirtualBackend(ReplayOrder(tape))) == first


async def _tape_of_race() -> Tape:
    _, tape = await _taped(lambda observer: VirtualBackend(4, observer=observer), _race)
    return tape


def _edited(tape: Tape, place: int, record: Record | None) -> Tape:
    records = [*tape.records]
    records[place : place + 1] = [] if record is None else [record]
    return replace(tape, records=tuple(records))


async def _mismatch(tape: Tape, **change: Any) -> str:
    """The message of the mismatch that replaying `tape` ends in: raised by what the program awaits, and by close."""
    backend = VirtualBackend(ReplayOrder(tape))
    with pytest.raises((TapeMismatch, ExceptionGroup)):
        await _race(backend, **change)
    try:
        await backend.close()
    except TapeMismatch as mismatch:
        return str(mismatch)
    return ""


async def test_program_that_submits_something_else_fails_there() -> None:
    """A run that submits what the tape has not, in that place, fails at that submission and names it."""
    tape = await _tape_of_race()
    message = await _mismatch(tape, label="changed")
    assert "operation 0 (changed on a)" in message
    assert "'add'" in message


@pytest.mark.parametrize(
    ("field", "value"), [("label", "edited"), ("stream", "z"), ("session", "s9"), ("after", (0,)), ("waits", (1,)), ("payload_bytes", 99)]
)
async def test_edited_submission_fails_at_its_event(field: str, value: Any) -> None:
    """A tape whose submission was edited fails at that event and names it and the field."""
    tape = await _tape_of_race()
    place = next(place for place, record in enumerate(tape.records) if isinstance(record, Submitted) and record.number == 4)
    message = await _mismatch(_edited(tape, place, msgspec.structs.replace(tape.records[place], **{field: value})))
    assert "operation 4 (add on" in message
    assert field in message


async def test_a_wait_between_streams_that_is_missing_or_new_fails_at_its_event() -> None:
    """A run whose stream waits for less, for more or for something else than on the tape fails at the submission behind it, by name."""

    async def run(backend: Backend, waited: tuple[int, ...]) -> None:
        events = [backend.stream(name).submit(nothing, label=f"first {name}") for name in ("a", "b")]
        for place in waited:
            backend.stream("c").wait(events[place])
        await backend.stream("c").submit(nothing, label="behind")
        await backend.close()

    _, tape = await _taped(lambda observer: VirtualBackend(0, observer=observer), lambda backend: run(backend, (1,)))
    await run(VirtualBackend(ReplayOrder(tape)), (1,))
    for wrong, says in (((), r"\(\)"), ((0, 1), r"\(0, 1\)"), ((0,), r"\(0,\)")):
        backend = VirtualBackend(ReplayOrder(tape))
        with pytest.raises(TapeMismatch, match=rf"operation 2 \(behind on c\).*waits {says} against \(1,\)"):
            await run(backend, wrong)
        with pytest.raises(TapeMismatch):
            await backend.close()


async def test_sessions_may_have_other_names_but_not_mix() -> None:
    """A run whose sessions are named otherwise replays; one that gives work to the other session does not."""

    async def run(backend: Backend, sessions: str) -> None:
        for session in sessions:
            await backend.stream("a").submit(nothing, label="step", session=session.strip())
        await backend.close()

    _, tape = await _taped(lambda observer: VirtualBackend(0, observer=observer), lambda backend: run(backend, "xyx"))
    await run(VirtualBackend(ReplayOrder(tape)), "pqp")
    for wrong in ("pqq", "ppp", "xyy", " y "):
        backend = VirtualBackend(ReplayOrder(tape))
        with pytest.raises(TapeMismatch, match="session"):
            await run(backend, wrong)
        with pytest.raises(TapeMismatch):
            await backend.close()


async def test_missing_completion_is_named() -> None:
    """A tape with a completion cut out leaves the run waiting for it, and says which operation that is."""
    tape = await _tape_of_race()
    place = next(place for place, record in enumerate(tape.records) if isinstance(record, Completed) and record.number == 6)
    message = await _mismatch(_edited(tape, place, None))
    stream = next(record.stream for record in tape.records if isinstance(record, Submitted) and record.number == 6)
    assert f"add on {stream}" in message


async def test_impossible_order_is_named() -> None:
    """A completion put before its submission's predecessor cannot happen, and the operation is named."""
    tape = await _tape_of_race()
    mine = [record for record in tape.records if isinstance(record, Submitted) and record.stream == "a"]
    first, last = (
        next(p for p, r in enumerate(tape.records) if isinstance(r, Completed) and r.number == mine[one].number) for one in (0, -1)
    )
    records = [*tape.records]
    records[first], records[last] = records[last], records[first]
    assert f"operation {mine[-1].number} (add on a)" in await _mismatch(replace(tape, records=tuple(records)))


async def test_other_outcome_is_named() -> None:
    """Work that now succeeds where the tape has it failing of itself is a mismatch at that event."""
    tape = await _tape_of_race()
    place = next(place for place, record in enumerate(tape.records) if isinstance(record, Completed) and record.number == 3)
    message = await _mismatch(_edited(tape, place, msgspec.structs.replace(tape.records[place], error="Boom")))
    assert "operation 3 (add on" in message
    assert "Boom" in message


async def test_run_that_goes_on_or_stops_short_is_named() -> None:
    """A run longer than its tape fails at the first extra submission; a shorter one at close, unless a part was asked for."""
    tape = await _tape_of_race()
    backend = VirtualBackend(ReplayOrder(tape))
    with pytest.raises(TapeMismatch, match=r"operation 10 \(extra on a\), which is not on the tape"):
        await _race(backend, extra=lambda: backend.stream("a").submit(nothing, label="extra"))
    with pytest.raises(TapeMismatch):
        await backend.close()

    async def steps(backend: Backend, count: int) -> None:
        for _ in range(count):
            await backend.stream("a").submit(nothing, label="step")
        await backend.close()

    _, tape = await _taped(lambda observer: VirtualBackend(0, observer=observer), lambda backend: steps(backend, 2))
    await steps(VirtualBackend(ReplayOrder(tape)), 2)
    await steps(VirtualBackend(ReplayOrder(tape, whole=False)), 1)
    with pytest.raises(TapeMismatch, match=r"ended before the tape did: operation 1 \(step on a\)"):
        await steps(VirtualBackend(ReplayOrder(tape)), 1)


async def test_completions_wait_for_the_submissions_before_them() -> None:
    """Where the host had submitted more before it saw a completion, the replay withholds that completion until it has done so again."""

    async def run(backend: Backend, rounds: int) -> list[bool]:
        first = backend.stream("a").submit(nothing, label="first")
        seen = []
        for _ in range(rounds):
            await asyncio.sleep(0)
            seen.append(first.done())
        await backend.stream("a").submit(nothing, label="second")
        await backend.close()
        return seen

    _, tape = await _taped(lambda observer: VirtualBackend(0, observer=observer), lambda backend: run(backend, 0))
    order = [type(record) for record in tape.records if isinstance(record, Submitted | Completed)]
    assert order[:2] == [Submitted, Submitted]
    assert await run(VirtualBackend(ReplayOrder(tape)), 50) == [False] * 50


async def test_submission_that_comes_before_what_stands_before_it_is_named() -> None:
    """A tape whose lines were moved so that something else, submitted or completed, stands before a submission fails there, by name."""

    async def run(backend: Backend) -> None:
        first, _ = (backend.stream(name).submit(nothing, label=f"first {name}") for name in "ab")
        await first
        await backend.stream("a").submit(nothing, label="second")
        await backend.close()

    lines: dict[str, Record] = {
        "s0": Submitted(0, 0, "a", "first a"), "s1": Submitted(1, 0, "b", "first b"), "s2": Submitted(2, 3, "a", "second"),
        "c0": Completed(0, 2, 1), "c1": Completed(1, 4, 1), "c2": Completed(2, 5, 4),
    }  # fmt: skip

    def order(names: str) -> ReplayOrder:
        return ReplayOrder(Tape(Header(), tuple(lines[name] for name in names.split())))

    await run(VirtualBackend(order("s0 s1 c0 s2 c1 c2")))
    for moved, says in (
        ("s1 s0 c0 s2 c1 c2", r"submits operation 0 \(first a on a\); the tape has operation 1 \(first b on b\) submitted before it"),
        ("s0 c0 s1 s2 c1 c2", r"submits operation 1 \(first b on b\) before operation 0 \(first a on a\) is done"),
    ):
        backend = VirtualBackend(order(moved))
        with pytest.raises(TapeMismatch, match=says):
            await run(backend)
        with pytest.raises(TapeMismatch, match=says):
            await backend.close()


async def test_tape_from_the_middle_is_refused() -> None:
    """A tape whose first submission is not operation 0 cannot be replayed and says so."""
    with pytest.raises(TapeMismatch, match="operation 7"):
        ReplayOrder(Tape(Header(), (Submitted(7, 0, "a", "late"),)))
