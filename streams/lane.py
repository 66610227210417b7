"""What waits to be sent and to be received on a channel, by kind. Plain state: knows neither sockets nor frames' bytes.

Invariants:
1. Within a kind frames go and come in the order of `send` and `receive`; kinds do not wait for one another.
2. A frame is sent only while the peer has granted more receives of its kind than it got frames: a grant is a buffer that is ready.
3. An event is settled once; what it holds (the tensor) is let go then. A receive whose event failed early keeps its place: the frame that
   comes for it is read and dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from streams.errors import Full, PeerLost, Reason
from streams.event import Event
from streams.frame import BYTES, HEADER_BYTES_MAX, KIND_CHARS_MAX, STEP_MAX, Content, bytes_of, dtype_name, encoded, payload_bytes_of

__all__ = ["KINDS_MAX", "Lanes", "Receiving", "Sending", "form_of", "header_with"]

KINDS_MAX = 32
T = TypeVar("T")


class Form(NamedTuple):
    """What the frames of one kind, dtype and shape have in common."""

    sends: str  # labels
    receives: str
    dtype: str
    shape: tuple[int, ...]
    header: bytes
    content: Content


@lru_cache(1024)
def form_of(kind: str, dtype: torch.dtype | None, shape: tuple[int, ...]) -> Form:
    """`dtype` None: a message. Asserts that it can travel."""
    assert 0 < len(kind) <= KIND_CHARS_MAX, f"{kind!r} is no kind of frame: 1 to {KIND_CHARS_MAX} characters"
    assert all(" " <= letter <= "~" for letter in kind), f"{kind!r} is no kind of frame: printable ASCII"
    assert len(shape) <= 6, f"{len(shape)} dimensions do not travel; at most 6 do"
    name = BYTES if dtype is None else dtype_name(dtype)
    content = Content(kind, name, tuple(shape))
    return Form(f"send {kind}", f"receive {kind}", name, content.shape, encoded(content), content)


@lru_cache(1024)
def header_with(content: Content, grants: tuple[tuple[str, int], ...]) -> bytes | None:
    """The header of a content that carries grants; None: it has no room for them."""
    header = encoded(Content(content.kind, content.dtype, content.shape, grants)) if len(grants) <= 4 else b""
    return header if 0 < len(header) <= HEADER_BYTES_MAX else None


class _Transfer(Event[T]):
    """An event of a channel: done after others, in the order of its kind."""

    __slots__ = ("before", "held", "kind", "order", "step")

    def __init__(self, label: str, channel: str, kind: str, step: int, order: int, session: str, held: object) -> None:
        assert 0 <= step <= STEP_MAX, f"step {step} is out of range"
        super().__init__(label, stream=channel, session=session)
        self.kind = kind
        self.step = step
        self.order = order
        self.before = 0  # events it comes after that are not done
        self.held = held

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
        return None if self._done else self.settle(value, error)


class Sending(_Transfer[None]):
    """A frame to send; done when its buffer may be written again: the machine has taken all of it."""

    __slots__ = ("form", "payload")

    def __init__(self, channel: str, kind: str, step: int, order: int, session: str, source: Tensor | bytes) -> None:
        if isinstance(source, Tensor):
            self.form, self.payload = form_of(kind, source.dtype, source.shape), bytes_of(source)
        else:
            self.form, self.payload = form_of(kind, None, (len(source),)), memoryview(source)
        super().__init__(self.form.sends, channel, kind, step, order, session, source)


class Receiving(_Transfer[T]):
    """A frame somebody asked for. `into`: where it goes; None: a message of at most `bytes_max`, made when it comes."""

    __slots__ = ("bytes_max", "dtype", "into", "shape", "view")

    def __init__(self, channel: str, kind: str, step: int, order: int, session: str, into: Tensor | None, bytes_max: int) -> None:
        form = form_of(kind, None, ()) if into is None else form_of(kind, into.dtype, into.shape)
        super().__init__(form.receives, channel, kind, step, order, session, into)
        self.into = into
        self.bytes_max = bytes_max
        self.view = None if into is None else bytes_of(into)
        self.dtype, self.shape = form.dtype, form.shape

    def space_for(self, header: Content, step: int) -> memoryview | None:
        """Where the payload goes; None if nobody wants it any more. Raises PeerLost: it is not what was asked for."""
        if step != self.step:
            raise PeerLost(Reason.OUT_OF_STEP, f"{self.kind} of step {step} came where step {self.step} was expected")
        if header.dtype != self.dtype or (header.shape != self.shape and self.dtype != BYTES):
            asked = f"{self.dtype} {list(self.shape)}" if self.dtype != BYTES else "a message"
            raise PeerLost(Reason.UNEXPECTED, f"{self.kind} came as {header.dtype} {list(header.shape)}, {asked} was expected")
        if self.dtype == BYTES:
            return self._space_for_message(payload_bytes_of(header.dtype, header.shape))
        return None if self._done else self.view

    def _space_for_message(self, length: int) -> memoryview | None:
        if length > self.bytes_max:
            raise PeerLost(Reason.TOO_LARGE, f"a message {self.kind} of {length} bytes; at most {self.bytes_max} were expected")
        if not self._done:
            self.view = memoryview(bytearray(length))
        return self.view

    def complete(self) -> BaseException | None:
        """The payload is there and whole; returns what a callback raised."""
        value: Any = self.into
        if value is None and self.view is not None:
            value = bytes(self.view)
        self.into = self.view = self.held = None
        return None if self._done else self.settle(value, None)


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
        self.may_grant = False  # grants may go with whatever is written next
        self.must_grant = False  # they go by themselves at the end of this round: the peer has few or none

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
        kind = self._ours(receiving.kind)
        kind.posted.append(receiving)
        self.receives += 1
        self._weigh(kind)

    def grants(self) -> list[tuple[str, int]]:
        """(kind, receives) to tell the peer now: in bulk, so not while the peer has more than would be added."""
        self.may_grant = self.must_grant = False
        found = []
        for name, kind in self._kinds.items():
            ready = kind.ready() if 2 * len(kind.posted) >= len(kind.granted) else 0
            if ready and 2 * ready >= len(kind.granted):
                for _ in range(ready):
                    kind.granted.append(kind.posted.popleft())
                found.append((name, ready))
        return found

    def _weigh(self, kind: _Kind) -> None:
        waiting, ahead = len(kind.posted), len(kind.granted)
        if 2 * waiting >= ahead:
            self.may_grant = True
            self.must_grant = self.must_grant or waiting > ahead

    def may_go(self, kind: str) -> bool:
        """Whether a frame of that kind may be sent this moment, before any other; if so it counts as sent."""
        lane = self._kinds.get(kind)
        if self.sends or lane is None or not lane.credit:
            return False
        lane.credit -= 1
        return True

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
        receiving = kind.granted.popleft()
        if kind.posted:
            self._weigh(kind)
        return receiving

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
            assert len(self._kinds) < KINDS_MAX, f"{name!r} would be one kind of frame more than {KINDS_MAX}"
            kind = self._kinds[name] = _Kind()
        return kind
