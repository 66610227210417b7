"""Recordings as graphs, over a device that is not there: which edges become flags, what a wait comes behind, and launches that fail."""

from collections.abc import Callable

import pytest
import torch

from streams.crossing import Crossing
from streams.event import Event
from streams.stream import Stream
from tests.streams.fake_graphs import FakeDevice, FakeRecorder, Node, ancestors

DEVICES = {"": torch.device("cpu", 0), ".peer.": torch.device("cpu", 1)}


def crossing_of(fake: FakeDevice) -> Crossing:
    return Crossing(DEVICES, fake.flag_work())


def recorded(
    monkeypatch: pytest.MonkeyPatch, issue: Callable[[Callable[[str], Stream]], None], **settings: bool | int
) -> tuple[FakeDevice, FakeRecorder, Callable[[], None]]:
    fake = FakeDevice(**settings)  # type: ignore[arg-type]  # its own fields
    fake.install(monkeypatch)
    recorder = FakeRecorder(fake, crossing_of(fake))
    return fake, recorder, recorder.record(issue, "s.compute")


def labels(nodes: list[Node], among: tuple[str, ...] = ("advance", "signal", "wait")) -> list[str]:
    return [node.label for node in nodes if node.label in among]


class Chained:
    """Work that notes its label, and that all it comes after has been noted before."""

    def __init__(self, *, checks: bool = True) -> None:
        self.said: list[str] = []
        self._checks = checks

    def submit(self, stream: Stream, label: str, *after: Event[object]) -> Event[object]:
        previous = [event.label for event in after]

        def work() -> None:
            assert not self._checks or set(previous) <= set(self.said), f"{label} ran before {set(previous) - set(self.said)}"
            self.said.append(label)

        return stream.submit(work, label=label, after=after)


def pair(chained: Chained) -> Callable[[Callable[[str], Stream]], None]:
    """A chain over four streams of two parts: an event that two of the other part need, and ends that nobody waits for."""

    def issue(stream_of: Callable[[str], Stream]) -> None:
        compute, beside = stream_of("s.compute"), stream_of("s.selection")
        peer, its = stream_of("s.peer.compute"), stream_of("s.peer.selection")
        begun = chained.submit(compute, "begin")
        brought = chained.submit(its, "bring", begun)
        asked = chained.submit(peer, "ask", begun)
        chosen = chained.submit(beside, "choose", begun)
        merged = chained.submit(beside, "merge", chosen, brought)
        ended = chained.submit(compute, "end", begun, asked, merged)
        chained.submit(its, "last", brought, ended)

    return issue


def test_an_event_is_signalled_once_and_awaited_once_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams that need one event of the other part share its flag and its wait; events within a part need none."""
    fake, _, _ = recorded(monkeypatch, pair(Chained()))
    own, its = fake.graphs[2:]  # behind the first of each device
    assert labels(own.nodes) == ["advance", "signal", "wait", "wait", "signal"]
    assert labels(its.nodes) == ["advance", "wait", "signal", "signal", "wait"]
    assert own.pool is not its.pool, "graphs that run at once have scratch of their own"


def test_a_wait_comes_behind_all_flags_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none of them, nor the work they speak of, can be held up by it."""
    fake, _, _ = recorded(monkeypatch, pair(Chained()))
    for graph in fake.graphs:
        for place, node in enumerate(graph.nodes):
            if node.label == "wait":
                raised = {each for each in graph.nodes[:place] if each.label == "signal"}
                assert raised <= ancestors(frozenset([node]))


@pytest.mark.parametrize("seed", range(20))
def test_one_queue_locks_nothing_up(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A wait of one stream cannot stand before what the other part needs of another stream, though neither comes after the other."""
    chained = Chained()

    def issue(stream_of: Callable[[str], Stream]) -> None:
        noted = chained.submit(stream_of("s.selection"), "note")
        taken = chained.submit(stream_of("s.peer.compute"), "take", noted)
        chained.submit(stream_of("s.compute"), "use", taken)

    fake, _, replay = recorded(monkeypatch, issue, seed=seed, queues=True)
    replay()
    assert chained.said == ["note", "take", "use"]
    assert fake.stuck == 0


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_keeps_every_edge(monkeypatch: pytest.MonkeyPatch, seed: int, queues: bool) -> None:
    """Replayed again and again, in any order the graphs allow or in one queue each, all work runs behind what it comes after."""
    chained = Chained()
    fake, recorder, replay = recorded(monkeypatch, pair(chained), seed=seed, queues=queues)
    assert chained.said == [], "nothing runs while it is recorded"
    for _ in range(5):
        chained.said.clear()
        replay()
        assert sorted(chained.said) == sorted(["begin", "bring", "ask", "choose", "merge", "end", "last"])
    assert fake.stuck == 0
    assert recorder.crossing is not None
    assert [int(epoch) for epoch in recorder.crossing.epoch_of.values()] == [5, 5]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_launch_that_fails_ends_the_other_and_leaves_both_in_step(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """The replay raises; a graph that was launched ends without the other; the next replays run as if nothing had been."""
    fake, recorder, replay = recorded(monkeypatch, pair(Chained(checks=False)), seed=3)
    crossing = recorder.crossing
    assert crossing is not None
    replay()
    fake.refuse.append(fake.graphs[2 + refused])
    ran: list[str] = []
    monkeypatch.setattr(fake, "run", lambda run=fake.run: (ran.append("run"), run()))
    with pytest.raises(RuntimeError, match="refuses"):
        replay()
    assert ran == ["run"]
    assert int(crossing.lost[0]) == 2
    assert fake.stuck == 0, "who waits is told that nobody comes"
    for epoch in (3, 4):
        replay()
        assert [int(each) for each in crossing.epoch_of.values()] == [epoch, epoch]
    assert int(crossing.lost[0]) == 2
    assert fake.stuck == 0


def test_a_flag_that_nobody_raises_ends_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait comes to its limit, no other waits after it, and the next replay is well."""
    fake, recorder, replay = recorded(monkeypatch, pair(Chained(checks=False)))
    crossing = recorder.crossing
    assert crossing is not None
    fake.lowered.add(crossing._flags[0].data_ptr())
    replay()
    assert fake.stuck == 1
    assert int(crossing.lost[0]) == 1
    fake.lowered.clear()
    replay()
    assert fake.stuck == 1
    assert [int(each) for each in crossing.epoch_of.values()] == [2, 2]
