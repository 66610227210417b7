"""Recordings of a chain that spans two devices, as a graph for each part of it.

Edges within a part are captured event waits. An edge between parts is a flag (`crossing.py`): raised behind the work it says is done, on a
branch of its own, and awaited once by the other part, whatever the number of those who need it. Knows no steps.

Invariants:
1. As `capture.py`'s.
2. A wait for a flag comes behind every flag that its part raised before. So no order in which a device may run what a graph leaves open
   can lock two parts up, not even one queue for all of a graph: what a wait may stand before, nobody needs who raises its flag.
3. A replay is over, for the stream that it began on, when all its graphs are, also when one of them could not be launched.
4. Graphs of one part share a pool of scratch memory, those of two never do: parts run at once.
5. No device's first graph begins inside another part's capture: with the first, torch takes memory for the device's random numbers on a
   stream that is not captured yet, and a driver refuses that, and ends the open capture.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from streams.capture import RecordingStream
from streams.crossing import Crossing
from streams.event import Event
from streams.stream import Stream

__all__ = ["PairRecorder"]

T = TypeVar("T")


class _GraphEvent(Event[T]):
    __slots__ = ("flag", "marker", "part")

    def __init__(self, label: str, stream: str, part: "_Part", marker: torch.cuda.Event) -> None:
        super().__init__(label, stream=stream)
        self.part, self.marker = part, marker
        self.flag: Tensor | None = None  # what other parts wait for, once one does


class _GraphStream(RecordingStream):
    def __init__(self, name: str, part: "_Part") -> None:
        super().__init__(name)
        self.stream = torch.cuda.Stream(part.device, priority=-1)
        self.last: torch.cuda.Event | None = None
        self._part = part

    def submit(
        self, work: Callable[[], T], *, label: str, session: str = "", after: Sequence[Event[Any]] = (),
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), payload_bytes: int = 0,
    ) -> Event[T]:  # fmt: skip
        """Launch the work into the graph behind what it comes after."""
        part = self._part
        with torch.cuda.stream(self.stream), torch.no_grad():
            if self.last is None:
                self.stream.wait_event(part.begun)
            for event in after:
                assert isinstance(event, _GraphEvent), f"{label} comes after {event!r}, which is not part of the graph"
                if event.part is not part:
                    part.cross(self, event)
                elif event.stream != self.name:
                    self.stream.wait_event(event.marker)
            work()
            self.last = _marker(self.stream)
        return _GraphEvent(label, self.name, part, self.last)


class _Part:
    """One graph of a recording, and the streams that are captured into it."""

    def __init__(self, name: str, device: torch.device, crossing: Crossing) -> None:
        self.name, self.device = name, device
        # Both are made once none is captured any more: what making one asks of a driver must not fall into another.
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.lead = torch.cuda.Stream(device, priority=-1)  # where the graph begins and ends, and flags are raised
        self._crossing = crossing
        self._streams: dict[str, _GraphStream] = {}
        self._arrived: dict[Event[Any], torch.cuda.Event] = {}  # behind the wait for an event of another part

    def stream(self, name: str) -> _GraphStream:
        """The stream of that name."""
        if name not in self._streams:
            self._streams[name] = _GraphStream(name, self)
        return self._streams[name]

    def begin(self, pool: Any) -> None:
        """Capture from here on."""
        with torch.cuda.stream(self.lead):
            # Other threads may go on: what they ask of the driver is not this capture's business.
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._crossing.work.advance(self._crossing.epoch_of[self.name])
            self.begun = _marker(self.lead)

    def cross(self, waiting: _GraphStream, event: "_GraphEvent[Any]") -> None:
        """Let what comes next on a stream follow an event of another part."""
        crossing = self._crossing
        if event in self._arrived:
            waiting.stream.wait_event(self._arrived[event])
            return
        flag = event.part.raised(event)
        waiting.stream.wait_event(_marker(self.lead))  # see invariant 2
        crossing.work.wait(flag, crossing.epoch_of[self.name], crossing.lost)
        waiting.last = self._arrived[event] = _marker(waiting.stream)

    def raised(self, event: "_GraphEvent[Any]") -> Tensor:
        """The flag that says that an event of this part has happened."""
        crossing = self._crossing
        if event.flag is None:
            event.flag = crossing.next_flag()
            with torch.cuda.stream(self.lead):
                self.lead.wait_event(event.marker)
                crossing.work.signal(event.flag, crossing.epoch_of[self.name])
        return event.flag

    def join(self) -> None:
        """All that was captured comes before the graph's end."""
        for side in self._streams.values():
            if side.last is not None:
                self.lead.wait_event(side.last)

    def end(self) -> None:
        """Capture no more."""
        with torch.cuda.stream(self.lead):
            self.graph.capture_end()


class PairRecorder:
    """Graphs of both parts of a pair. All recordings share each part's scratch memory: two replays never run at once."""

    def __init__(self, crossing: Crossing) -> None:
        """Capture a graph a device that nobody replays. Args: crossing: the launches of its work have run on every device."""
        self.crossing = crossing
        self._devices = crossing.devices
        epochs = {device: crossing.epoch_of[name] for name, device in self._devices.items()}
        self._first = [_captured(device, partial(crossing.work.advance, epoch)) for device, epoch in epochs.items()]  # see invariant 5
        self._pools: dict[str, Any] = {}
        # Made once, soon after the streams of the backend: torch has 32 of a priority and gives them out again, and of two graphs that came
        # to share one stream the second would not begin while the first waits for it.
        self._beside = {name: torch.cuda.Stream(of, priority=-1) for name, of in self._devices.items() if name}

    def record(self, issue: Callable[[Callable[[str], Stream]], None], main: str) -> Callable[[], None]:
        """See Recorder. Nothing is run; no device is waited for."""
        crossing = self.crossing
        parts = {name: _Part(name, device, crossing) for name, device in self._devices.items()}
        crossing.restart()

        def stream_of(name: str) -> Stream:
            return parts[crossing.part_of(name)].stream(name)

        first = stream_of(main)
        assert isinstance(first, _GraphStream), "made above"
        with torch.cuda.stream(first.stream), ExitStack() as ends:
            for name, part in parts.items():
                if name not in self._pools:
                    with torch.cuda.device(part.device):
                        self._pools[name] = torch.cuda.graph_pool_handle()
                part.begin(self._pools[name])
                ends.callback(part.end)
            issue(stream_of)
            for part in parts.values():
                part.join()
        for part in parts.values():
            with torch.cuda.device(part.device):
                part.graph.instantiate()
        return _together(crossing, parts[""], [(part, self._beside[name]) for name, part in parts.items() if name])


def _together(crossing: Crossing, own: _Part, beside: Sequence[tuple[_Part, torch.cuda.Stream]]) -> Callable[[], None]:
    """Replay the graphs of all parts: the first one's on the current stream of its device, the others' on streams of their own.

    The first leads: it goes on without the others by what it holds itself, where they would read addresses that it never wrote. So it is
    launched first, and where it cannot be, none is.
    """
    others = [(part, stream, torch.cuda.Event()) for part, stream in beside]
    begun = torch.cuda.Event()

    def replay() -> None:
        here = torch.cuda.current_stream(own.device)
        begun.record(here)
        align = crossing.begin()
        try:
            align(own.name)
            own.graph.replay()
            for part, stream, ended in others:
                with torch.cuda.stream(stream):
                    stream.wait_event(begun)
                    align(part.name)
                    part.graph.replay()
                    ended.record(stream)
        except BaseException:
            crossing.give_up()
            raise
        finally:
            # Behind the own graph, which the others wait for. Of one that was not launched this is its last replay, which is over.
            for _, _, ended in others:
                here.wait_event(ended)

    return replay


def _captured(device: torch.device, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of that work alone. While it is held, what torch took for the device's graphs stays."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        work()
        graph.capture_end()
    return graph


def _marker(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all that a stream was given so far."""
    marker = torch.cuda.Event()
    marker.record(stream)
    return marker
