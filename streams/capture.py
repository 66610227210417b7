"""Recording a chain of work once, to run it again as one operation: a device's graphs (`graphs.py`), or on the CPU the closures in order.

The streams made here look like a backend's: whoever submits work to them issues the very calls of an eager run, and waits between streams
become edges. Knows no steps.

Invariants:
1. Recorded work never runs Python again on a device: what it must see anew it reads from tensors. The CPU's form runs the same closures.
2. Work that ran here has run for its shapes before: kernels are compiled and libraries have their handles.
3. What is recorded uses no buffer that may move or be given back while the recording lives.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from streams.event import Event
from streams.stream import Stream

__all__ = ["ClosureRecorder", "Recorder", "RecordingStream"]

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
