"""Recording a chain of work once, to run it again as one operation: a device's graph, or on the CPU the closures in order.

The streams made here look like a backend's: whoever submits work to them issues the very calls of an eager run, and waits between streams
become edges. Knows no steps.

Invariants:
1. Recorded work never runs Python again on a device: what it must see anew it reads from tensors. The CPU's form runs the same closures.
2. Work that ran here has run for its shapes before: kernels are compiled and libraries have their handles.
3. What is recorded uses no buffer that may move or be given back while the recording lives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from streams.event import Event
from streams.stream import Stream

__all__ = ["ClosureRecorder", "GraphRecorder", "Mark", "Recorder", "RecordingStream"]

T = TypeVar("T")


class Recorder(Protocol):
    """Makes recordings of work that a callable issues."""

    def record(self, issue: Callable[[Callable[[str], Stream]], None], main: str) -> Callable[[], None]:
        """Let `issue` submit its work, and keep it.

        Args: issue: called once with what makes streams by name. main: the stream that a replay begins and ends on.
        Returns: work that does everything again, to be submitted to the stream `main`.
        """
        ...


class RecordingStream:
    """What both forms of a recording stream are asked for beside `submit`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self, event: Event[Any]) -> None:
        """Not part of what a step uses: its operations name what they come after."""
        raise AssertionError("a recorded chain orders its work by `after`")

    async def wait_room(self) -> None:
        """There is always room."""

    async def idle(self) -> None:
        """Nothing is ever outstanding."""

    async def close(self) -> None:
        """Nothing to close."""


class _ClosureStream(RecordingStream):
    def __init__(self, name: str, kept: list[Callable[[], Any]]) -> None:
        super().__init__(name)
        self._kept = kept

    def submit(
        self, work: Callable[[], T], *, label: str, session: str = "", after: Sequence[Event[Any]] = (),
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), payload_bytes: int = 0,
    ) -> Event[T]:  # fmt: skip
        """Keep the work."""
        self._kept.append(work)
        return Event(label, stream=self.name, session=session)


class ClosureRecorder:
    """On the CPU: the closures, run in the order they were submitted. Shows whether a chain can be replayed at all."""

    def record(self, issue: Callable[[Callable[[str], Stream]], None], main: str) -> Callable[[], None]:
        """See Recorder."""
        kept: list[Callable[[], Any]] = []
        streams: dict[str, Stream] = {}
        issue(lambda name: streams.setdefault(name, _ClosureStream(name, kept)))

        def replay() -> None:
            for work in kept:
                work()

        return replay


@dataclass(frozen=True, slots=True)
class Mark:
    """One piece of recorded work and the device's times around it, taken anew by every replay."""

    label: str
    stream: str
    after: tuple[int, ...]  # places among the marks
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _GraphEvent(Event[T]):
    __slots__ = ("marker",)

    def __init__(self, label: str, stream: str, marker: torch.cuda.Event) -> None:
        super().__init__(label, stream=stream)
        self.marker = marker


class _GraphStream(RecordingStream):
    def __init__(self, name: str, stream: torch.cuda.Stream, marks: list[Mark] | None) -> None:
        super().__init__(name)
        self.stream = stream
        self.last: torch.cuda.Event | None = None
        self._marks = marks

    def submit(
        self, work: Callable[[], T], *, label: str, session: str = "", after: Sequence[Event[Any]] = (),
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), payload_bytes: int = 0,
    ) -> Event[T]:  # fmt: skip
        """Launch the work into the graph behind what it comes after."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            for event in after:
                assert isinstance(event, _GraphEvent), f"{label} comes after {event!r}, which is not part of the graph"
                if event.stream != self.name:
                    self.stream.wait_event(event.marker)
            begin = self._timed()
            work()
            end = self._timed()
            marker = torch.cuda.Event()
            marker.record(self.stream)
        self.last = marker
        event_of_work: _GraphEvent[T] = _GraphEvent(label, self.name, marker)
        if self._marks is not None and begin is not None and end is not None:
            event_of_work.number = len(self._marks)
            self._marks.append(Mark(label, self.name, tuple(event.number for event in after), begin, end))
        return event_of_work

    def _timed(self) -> torch.cuda.Event | None:
        """A time that every replay takes here; None unless marks are kept."""
        if self._marks is None:
            return None
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(self.stream)
        return event


class GraphRecorder:
    """A device's graphs. They share one pool of scratch memory, so two of them must never run at once."""

    def __init__(self, device: torch.device) -> None:
        self.marks: list[Mark] | None = None  # set to a list before a recording: it then takes times around its work, at a cost
        self._device = device
        self._pool: Any = None

    def record(self, issue: Callable[[Callable[[str], Stream]], None], main: str) -> Callable[[], None]:
        """See Recorder. Nothing is run; the device is not waited for."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        streams: dict[str, _GraphStream] = {}

        def stream_of(name: str) -> Stream:
            if name not in streams:
                streams[name] = _GraphStream(name, torch.cuda.Stream(self._device, priority=-1), self.marks)
            return streams[name]

        begun = stream_of(main)
        assert isinstance(begun, _GraphStream), "made above"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(begun.stream):
            # Other threads may go on: what they ask of the driver is not this capture's business.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                issue(stream_of)
                for side in streams.values():
                    if side is not begun and side.last is not None:
                        begun.stream.wait_event(side.last)
            finally:
                graph.capture_end()
        return graph.replay
