"""What waits to be sent and to be received on a channel, by kind. Plain state: knows neither sockets nor frames' bytes.

Invariants:
1. Within a kind frames go and come in the order of `send` and `receive`; kinds do not wait for one another.
2. A frame is sent only while the peer has granted more receives of its kind than it got frames: a grant is a buffer that is ready.
3. An event is settled once; what it holds (the tensor) is let go then. A receive whose event failed early keeps its place: the frame that
   comes for it is read and dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from streams.errors import Full, PeerLost, Reason
from streams.event import Event
from streams.frame import BYTES, KIND_CHARS_MAX, Content, bytes_of, dtype_name, payload_bytes_of

__all__ = ["KINDS_MAX", "Lanes", "Receiving", "Sending"]

KINDS_MAX = 32
T = TypeVar("T")


class _Transfer(Event[T]):
    """An event of a channel: done after others, in the order of its kind."""

    __slots__ = ("before", "held", "kind", "order", "step")

    def __init__(self, verb: str, channel: str, kind: str, step: int, order: int, session: str) -> None:
        assert 0 <= step < 1 << 63, f"step {step} is out of range"
        super().__init__(f"{verb} {kind}", stream=channel, session=session)
        self.kind = kind
        self.step = step
        self.order = order
        self.before = 0  # events it comes after that are not done
        self.held: object = None

    def start_after(self, events: Sequence[Event[Any]], ready: Callable[[], None]) -> None:
        """Call `ready` once all of them are done; if one failed, this fails now and is ready all the same."""
        for event in events:
            if not event.done():
                self.before += 1
                event.on_done(lambda done: self._one_done(done, ready))
            else:
                self._follow(event)

    def _one_done(self, event: Event[Any], ready: Callable[[], None]) -> None:
        self.before -= 1
        self._follow(event)
        if not self.before:
            ready()

    def _follow(self, event: Event[Any]) -> None:
        failure = None if self.done() else event.dependency_failure(self.label)
        if failure is not None:
            self.finish(None, failure)

    def finish(self, value: T | None, error: BaseException | None) -> BaseException | None:
        """Settle unless it is done, and let the buffer go; returns what a callback raised."""
        self.held = None
        return None if self.done() else self.settle(value, error)


class Sending(_Transfer[None]):
    """A frame to send; done when its buffer may be written again: the machine has taken all of it."""

    __slots__ = ("dtype", "payload", "shape")

    def __init__(self, channel: str, kind: str, step: int, order: int, session: str, source: Tensor | bytes) -> None:
        super().__init__("send", channel, kind, step, order, session)
        self.held = source
        if isinstance(source, Tensor):
            self.payload, self.dtype, self.shape = bytes_of(source), dtype_name(source.dtype), tuple(source.shape)
            assert len(self.shape) <= 6, f"{len(self.shape)} dimensions do not travel; at most 6 do"
        else:
            self.payload, self.dtype, self.shape = memoryview(source), BYTES, (len(source),)


class Receiving(_Transfer[T]):
    """A frame somebody asked for. `into`: where it goes; None: a message of at most `bytes_max`, made when it comes."""

    __slots__ = ("bytes_max", "dtype", "into", "shape", "view")

    def __init__(self, channel: str, kind: str, step: int, order: int, session: str, into: Tensor | None, bytes_max: int) -> None:
        super().__init__("receive", channel, kind, step, order, session)
        self.held = self.into = into
        self.bytes_max = bytes_max
        self.view: memoryview | None = None
        self.dtype = BYTES
        self.shape: tuple[int, ...] = ()
        if into is not None:
            self.view, self.dtype, self.shape = bytes_of(into), dtype_name(into.dtype), tuple(into.shape)

    def space_for(self, header: Content) -> memoryview | None:
        """Where the payload goes; None if nobody wants it any more. Raises PeerLost: it is not what was asked for."""
        if header.step != self.step:
            raise PeerLost(Reason.OUT_OF_STEP, f"{self.kind} of step {header.step} came where step {self.step} was expected")
        if header.dtype != self.dtype or (self.dtype != BYTES and header.shape != self.shape):
            asked = f"{self.dtype} {list(self.shape)}" if self.dtype != BYTES else "a message"
            raise PeerLost(Reason.UNEXPECTED, f"{self.kind} came as {header.dtype} {list(header.shape)}, {asked} was expected")
        bytes_here = payload_bytes_of(header.dtype, header.shape)
        if self.dtype == BYTES and bytes_here > self.bytes_max:
            raise PeerLost(Reason.TOO_LARGE, f"a message {self.kind} of {bytes_here} bytes; at most {self.bytes_max} were expected")
        if self.done():
            return None
        if self.dtype == BYTES:
            self.view = memoryview(bytearray(bytes_here))
        return self.view

    def complete(self) -> BaseException | None:
        """The payload is there and whole; returns what a callback raised."""
        value: Any = self.into
        if self.into is None and self.view is not None:
            value = bytes(self.view)
        self.into = self.view = None
        return self.finish(value, None)


class _Kind:
    """One kind: what waits to be sent, and what was asked for."""

    def __init__(self) -> None:
        self.sends: deque[Sending] = deque()
        self.credit = 0  # frames the peer has buffers for
        self.posted: deque[Receiving[Any]] = deque()  # asked for, the peer does not know yet
        self.granted: deque[Receiving[Any]] = deque()

    def ready(self) -> int:
        """How many of `posted`, from the front, have a buffer that is free."""
        for place, receiving in enumerate(self.posted):
            if receiving.before:
                return place
        return len(self.posted)


class Lanes:
    """All kinds of one channel, at most `queue_max` sends and as many receives in flight."""

    def __init__(self, queue_max: int) -> None:
        self._queue_max = queue_max
        self._kinds: dict[str, _Kind] = {}
        self.sends = 0  # waiting
        self.receives = 0
        self.may_grant = False  # a frame came, and grants that waited for that may go

    def add_send(self, sending: Sending) -> None:
        """At the end of its kind. Raises Full."""
        if self.sends >= self._queue_max:
            raise Full(f"{sending.label} does not fit on {sending.stream}: {self.sends} frames wait to be sent, at most {self._queue_max}")
        self._ours(sending.kind).sends.append(sending)
        self.sends += 1

    def add_receive(self, receiving: Receiving[Any]) -> None:
        """At the end of its kind. Raises Full."""
        if self.receives >= self._queue_max:
            raise Full(f"{receiving.label} does not fit on {receiving.stream}: {self.receives} are asked for, at most {self._queue_max}")
        self._ours(receiving.kind).posted.append(receiving)
        self.receives += 1

    def grants(self) -> Iterable[tuple[str, int]]:
        """(kind, receives) to tell the peer now. Waits while the peer still has more than would be added, so that grants come in bulk."""
        self.may_grant = False
        if not any(kind.posted for kind in self._kinds.values()):
            return
        for name, kind in self._kinds.items():
            ready = kind.ready()
            if ready and (not kind.granted or len(kind.granted) < ready):
                for _ in range(ready):
                    kind.granted.append(kind.posted.popleft())
                yield name, ready

    def next_send(self) -> Sending | None:
        """Take the first of what may go: granted, its buffer ready, the first of its kind."""
        if not self.sends:
            return None
        best: _Kind | None = None
        for kind in self._kinds.values():
            if kind.credit and kind.sends and not kind.sends[0].before and (best is None or kind.sends[0].order < best.sends[0].order):
                best = kind
        if best is None:
            return None
        best.credit -= 1
        self.sends -= 1
        return best.sends.popleft()

    def add_credit(self, name: str, receives: int) -> None:
        """The peer granted more. Raises PeerLost: more than a channel may ask for."""
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                raise PeerLost(Reason.UNEXPECTED, f"frames of more than {KINDS_MAX} kinds were asked for")
            kind = self._kinds[name] = _Kind()
        kind.credit += receives
        if kind.credit > self._queue_max:
            raise PeerLost(Reason.TOO_LARGE, f"{kind.credit} frames of {name} were asked for; at most {self._queue_max} are")

    def take_granted(self, name: str) -> Receiving[Any]:
        """A frame of that kind came: who asked for it. Raises PeerLost: nobody."""
        kind = self._kinds.get(name)
        if kind is None or not kind.granted:
            raise PeerLost(Reason.UNEXPECTED, f"a frame of {name!r} came that nobody asked for")
        self.receives -= 1
        self.may_grant = self.may_grant or bool(kind.posted)
        return kind.granted.popleft()

    def drain(self) -> list[_Transfer[Any]]:
        """Take out everything, in the order it was submitted."""
        left: list[_Transfer[Any]] = []
        for kind in self._kinds.values():
            left += [*kind.sends, *kind.granted, *kind.posted]
        self._kinds.clear()
        self.sends = self.receives = 0
        return sorted(left, key=lambda transfer: transfer.order)

    def _ours(self, name: str) -> _Kind:
        kind = self._kinds.get(name)
        if kind is None:
            assert 0 < len(name) <= KIND_CHARS_MAX, f"{name!r} is no kind of frame: 1 to {KIND_CHARS_MAX} characters"
            assert all(" " <= letter <= "~" for letter in name), f"{name!r} is no kind of frame: printable ASCII"
            assert len(self._kinds) < KINDS_MAX, f"{name!r} would be one kind of frame more than {KINDS_MAX}"
            kind = self._kinds[name] = _Kind()
        return kind
