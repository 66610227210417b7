"""Graphs of a device that is not there: what `streams/graphs.py` captures is kept as nodes, and replays run them in any order they allow.

Takes the place of the parts of `torch.cuda` that a recording uses. Imitates: captures (of several graphs at once, a stream in one at a
time, a device's first while there is no other), edges by events, work that has to be joined to its graph's end, replays that run at once,
waits for flags that others raise, launches that fail. Does not imitate: memory pools, priorities, time.

A device may run what a graph leaves open in any order: `run` draws one node after another; with `queues` it draws an order for each graph
beforehand and keeps it, as a device that has one queue for a graph would, so that a wait holds up everything drawn behind it.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.flag import advance_epoch, await_flag, raise_flag
from streams.capture import RecordingStream
from streams.crossing import FlagWork
from streams.event import Event
from streams.graphs import PairRecorder
from streams.stream import Stream


@dataclass(eq=False)
class Node:
    """One launch. `ready`: of a wait, whether it would end."""

    work: Callable[[], object]
    after: frozenset["Node"]
    label: str
    ready: Callable[[], bool] | None = None
    done: bool = False


class FakeStream:
    """A stream: what was given to it last, and the graph it is captured into."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device = device
        self.tail: frozenset[Node] = frozenset()
        self.graph: FakeGraph | None = None

    def wait_event(self, event: "FakeEvent") -> None:
        if event.graph is not None:
            assert self.graph in (None, event.graph), "a stream of one capture waits for an event of another"
            self.graph = event.graph
        else:
            assert self.graph is None, "a captured stream waits for an event outside its capture"
        self.tail |= event.tail


class FakeEvent:
    """An event: all that a stream had been given."""

    def __init__(self, **_: bool) -> None:
        self.tail: frozenset[Node] = frozenset()
        self.graph: FakeGraph | None = None

    def record(self, stream: FakeStream) -> None:
        self.tail, self.graph = stream.tail, stream.graph


@dataclass
class FakeDevice:
    """Streams and graphs; `install` puts them into `torch.cuda`."""

    seed: int = 0
    queues: bool = False
    stuck: int = 0  # waits that would not have ended
    refuse: list["FakeGraph"] = field(default_factory=list)  # launches of these fail, once each
    graphs: list["FakeGraph"] = field(default_factory=list)  # in order of their making
    lowered: set[int] = field(default_factory=set)  # addresses of flags that nobody raises
    captured: set[torch.device | None] = field(default_factory=set)  # devices that have had a graph
    _of_thread: threading.local = field(default_factory=threading.local)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._random = random.Random(self.seed)
        fakes: dict[str, Any] = {
            "Stream": FakeStream, "Event": FakeEvent, "CUDAGraph": lambda keep_graph=False: FakeGraph(self), "stream": self.on,
            "device": lambda device: nullcontext(), "graph_pool_handle": object, "current_stream": lambda device=None: self.current,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def current(self) -> FakeStream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream, self._of_thread.pending = FakeStream(), []
        stream: FakeStream = self._of_thread.stream
        return stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def launch(self, work: Callable[[], object], label: str, ready: Callable[[], bool] | None = None) -> None:
        """What a kernel's launch is: captured, or run."""
        stream = self.current
        if stream.graph is None:
            work()
            return
        node = Node(work, stream.tail, label, ready)
        stream.graph.nodes.append(node)
        stream.tail = frozenset([node])

    def flag_work(self) -> FlagWork:
        """The references of kernels/flag as launches."""

        def raise_once(flag: Tensor, epoch: Tensor) -> None:
            if flag.data_ptr() not in self.lowered:
                raise_flag(flag, epoch)

        return FlagWork(
            lambda epoch: self.launch(lambda: advance_epoch(epoch), "advance"),
            lambda flag, epoch: self.launch(lambda: raise_once(flag, epoch), "signal"),
            lambda flag, epoch, lost: self.launch(
                lambda: await_flag(flag, epoch, lost), "wait", lambda: int(flag[0]) == int(epoch) or int(lost[0]) >= int(epoch)
            ),
        )

    def replayed(self, graph: "FakeGraph") -> None:
        """A graph is launched to the current stream."""
        if graph in self.refuse:
            self.refuse.remove(graph)
            raise RuntimeError("the driver refuses this launch")
        stream = self.current
        assert stream.graph is None, "a graph is launched into a capture"
        made: dict[Node, Node] = {}
        for node in graph.nodes:
            after = frozenset(made[each] for each in node.after) or stream.tail
            made[node] = Node(node.work, after, node.label, node.ready)
        self._of_thread.pending.append(list(made.values()))
        stream.tail = frozenset(made.values())

    def run(self) -> None:
        """Run what was launched by this thread until nothing is left."""
        waiting: list[list[Node]] = self._of_thread.pending
        self._of_thread.pending = []
        if self.queues:
            waiting = [self._drawn(nodes) for nodes in waiting]
        while waiting := [left for nodes in waiting if (left := [node for node in nodes if not node.done])]:
            heads = [nodes[:1] for nodes in waiting] if self.queues else waiting
            able = [node for nodes in heads for node in nodes if all(each.done for each in node.after)]
            chosen = [node for node in able if node.ready is None or node.ready()]
            assert able, "launches wait for one another"
            if not chosen:  # nobody will raise the flag: the wait comes to its limit
                self.stuck += 1
            node = self._random.choice(chosen or able)
            node.work()
            node.done = True

    def _drawn(self, nodes: list[Node]) -> list[Node]:
        """Any order that keeps the graph's edges."""
        order: list[Node] = []
        left = list(nodes)
        while left:
            able = [node for node in left if not any(each in left for each in node.after)]
            order.append(self._random.choice(able))
            left.remove(order[-1])
        return order


class FakeGraph:
    """A graph: its nodes in the order they were captured."""

    def __init__(self, device: FakeDevice) -> None:
        self.nodes: list[Node] = []
        self.pool: object = None
        self.capturing = False
        self._device = device
        self._made = False
        device.graphs.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        stream = self._device.current
        assert stream.graph is None, "the stream is captured already"
        first, others = stream.device not in self._device.captured, [graph for graph in self._device.graphs if graph.capturing]
        assert not (first and others), f"the first graph of {stream.device} takes memory while another is captured"
        self._device.captured.add(stream.device)
        stream.graph, stream.tail, self.pool, self.capturing = self, frozenset(), pool, True

    def capture_end(self) -> None:
        stream = self._device.current
        assert stream.graph is self, "a capture ends where it began"
        ends = ancestors(stream.tail)
        assert all(node in ends for node in self.nodes), "unjoined work"
        stream.graph, self.capturing = None, False

    def instantiate(self) -> None:
        assert not any(graph is not self and graph.capturing for graph in self._device.graphs), "made while another is captured"
        self._made = True

    def replay(self) -> None:
        self._device.replayed(self)


class _Deferring(RecordingStream):
    """A recorder's stream whose work is launched, as a kernel would be, instead of run while it is captured."""

    def __init__(self, device: FakeDevice, stream: Stream) -> None:
        super().__init__(stream.name)
        self._device, self._stream = device, stream

    def submit(self, work: Callable[[], Any], *, label: str, **given: Any) -> Event[Any]:
        return self._stream.submit(lambda: self._device.launch(work, label), label=label, **given)


class FakeRecorder(PairRecorder):
    """The recorder over a device that is not there; a replay has run when it returns."""

    def __init__(self, fake: FakeDevice, *given: Any) -> None:
        super().__init__(*given)
        self._fake = fake

    def record(self, issue: Callable[[Callable[[str], Stream]], None], main: str) -> Callable[[], None]:
        replay = super().record(lambda stream_of: issue(lambda name: _Deferring(self._fake, stream_of(name))), main)

        def replay_and_run() -> None:
            try:
                replay()
            finally:
                self._fake.run()

        return replay_and_run


def ancestors(nodes: frozenset[Node]) -> set[Node]:
    """These nodes and all they come after."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.after)
    return found
