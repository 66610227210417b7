"""Two ends of a channel on a virtual backend: delays drawn from its order, buffers poisoned, every interleaving reachable from a seed.

It imitates: frames that wait for one another within a kind and for nothing else, senders that wait until they are asked, receives that
fill at their completion, failed transfers (an order's faults: labels `send KIND` and `receive KIND`), what was not asked for, a peer that
goes away (`lose`). It cannot imitate: bytes, damage, the handshake, silence.

Invariants:
1. The n-th send of a kind meets the n-th receive. The send's operation starts once the receive is there, the receive's once the send's is
   done; each is on a stream of its own, so it is on tapes as well.
2. From `receive` on, `into` holds poison (with `after`: from when the operation starts); from `send` on, `source` is watched.
3. Once an end is over its operations still complete, with its error: a virtual backend drops nothing. `ended` happens after the last.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from streams.channel import ChannelLimits, ChannelStatistics
from streams.errors import Closed, Full, PeerLost, Reason, StreamError, TransferFailed
from streams.event import Event
from streams.frame import Content, bytes_of
from streams.guard import poison
from streams.lane import Receiving, Sending
from streams.virtual import VirtualBackend

__all__ = ["VirtualChannel", "virtual_pair"]

T = TypeVar("T")


def virtual_pair(
    backend: VirtualBackend, name: str = "channel", limits: ChannelLimits | None = None
) -> tuple["VirtualChannel", "VirtualChannel"]:  # fmt: skip
    """Two ends that are open; their streams are called `NAME.0.send KIND` and the like."""
    limits = limits or ChannelLimits()
    one, two = VirtualChannel(backend, f"{name}.0", limits), VirtualChannel(backend, f"{name}.1", limits)
    one.far, two.far = two, one
    return one, two


class _Meeting:
    """The n-th frame of a kind, seen from both ends."""

    def __init__(self) -> None:
        self.asked: Event[None] = Event("asked")
        self.arrived: Event[None] = Event("arrived")
        self.sending: Sending | None = None
        self.receiving: Receiving[Any] | None = None
        self.failure: StreamError | None = None
        self.wire: Tensor | bytes = b""


class VirtualChannel:
    """See `Channel`, and above. Made by `virtual_pair`."""

    def __init__(self, backend: VirtualBackend, name: str, limits: ChannelLimits) -> None:
        self.name = name
        self.ended: Event[None] = Event("end", stream=name)
        self.far: VirtualChannel = self  # the other end, set by `virtual_pair`
        self._backend = backend
        self._limits = limits
        self._meetings: dict[tuple[str, int], _Meeting] = {}  # of frames that come here
        self._counts: dict[str, int] = {}  # frames so far, by verb and kind
        self._error: StreamError | None = None
        self._sends = self._receives = 0  # in flight
        self._done = {"sent": 0, "sent_bytes": 0, "received": 0, "received_bytes": 0, "skipped": 0}
        self._settled: Event[None] = Event("settled")  # the next end of an operation

    def send(
        self, source: Tensor | bytes, *, kind: str, step: int, session: str = "", after: Sequence[Event[Any]] = ()
    ) -> Event[None]:  # fmt: skip
        """See `Channel.send`."""
        self._check(self._sends, f"send {kind}")
        sending = Sending(self.name, kind, step, 0, session, source)
        meeting = self.far._meeting(kind, self._next(f"send {kind}"))
        meeting.sending = sending

        def work() -> None:
            self._raise_if_over()
            meeting.wire = source.clone() if isinstance(source, Tensor) else source

        stream = self._backend.stream(f"{self.name}.send {kind}")
        stream.wait(meeting.asked)
        reads = [source] if isinstance(source, Tensor) else []
        payload_bytes = len(sending.payload)
        event = stream.submit(work, label=f"send {kind}", session=session, after=after, reads=reads, payload_bytes=payload_bytes)
        self._sends += 1
        event.on_done(lambda done: self._sent(done, meeting, payload_bytes))
        self._compare(meeting)
        return event

    def receive(
        self, into: Tensor, *, kind: str, step: int, session: str = "", after: Sequence[Event[Any]] = ()
    ) -> Event[Tensor]:  # fmt: skip
        """See `Channel.receive`."""
        self._check(self._receives, f"receive {kind}")
        receiving: Receiving[Tensor] = Receiving(self.name, kind, step, 0, session, into, 0)

        def fill(wire: Tensor | bytes) -> Tensor:
            assert isinstance(wire, Tensor)
            return into.copy_(wire)

        event = self._receive(receiving, fill, [into], after)
        if not after:
            poison(into)
        return event

    def receive_bytes(self, *, kind: str, step: int, bytes_max: int, session: str = "") -> Event[bytes]:
        """See `Channel.receive_bytes`."""
        self._check(self._receives, f"receive {kind}")
        receiving: Receiving[bytes] = Receiving(self.name, kind, step, 0, session, None, bytes_max)
        return self._receive(receiving, lambda wire: wire if isinstance(wire, bytes) else bytes(bytes_of(wire)), [], ())

    async def wait_room(self) -> None:
        """See `Channel.wait_room`."""
        while self._error is None and self._sends >= self._limits.queue_max:
            await self._settled.wait_done()
        self._raise_if_over()

    async def close(self) -> None:
        """See `Channel.close`."""
        self._end(Closed(f"the channel {self.name} is closed"))
        self.far._end(PeerLost(Reason.CLOSED, f"{self.name} ended the channel"))
        await self.ended.wait_done()

    def lose(self) -> None:
        """The connection breaks: both ends are lost."""
        self._lose(Reason.LOST, "the connection broke")

    def statistics(self) -> ChannelStatistics:
        """See `Channel.statistics`."""
        done = self._done
        return ChannelStatistics(
            done["sent"], done["sent_bytes"], done["received"], done["received_bytes"], done["skipped"], self._sends, self._receives
        )  # fmt: skip

    def _receive(
        self, receiving: Receiving[T], fill: Callable[[Tensor | bytes], T], writes: list[Tensor], after: Sequence[Event[Any]]
    ) -> Event[T]:  # fmt: skip
        verb = f"receive {receiving.kind}"
        meeting = self._meeting(receiving.kind, self._next(verb))
        meeting.receiving = receiving
        payload_bytes = 0 if receiving.view is None else len(receiving.view)

        def work() -> T:
            self._raise_if_over()
            if meeting.failure is not None:
                raise meeting.failure
            return fill(meeting.wire)

        stream = self._backend.stream(f"{self.name}.{verb}")
        stream.wait(meeting.arrived)
        event = stream.submit(work, label=verb, session=receiving.session, after=after, writes=writes, payload_bytes=payload_bytes)
        self._receives += 1
        event.on_done(lambda done: self._received(done, payload_bytes))
        if not meeting.asked.done():
            meeting.asked.settle(None, None)
        self._compare(meeting)
        return event

    def _sent(self, event: Event[None], meeting: _Meeting, payload_bytes: int) -> None:
        self._sends -= 1
        error = event.error()
        if error is not None:
            meeting.failure = TransferFailed(f"{event.label} of {self.name} will not come: {error}")
        self._count("sent", payload_bytes, error)
        if not meeting.arrived.done():
            meeting.arrived.settle(None, None)
        self._one_settled()

    def _received(self, event: Event[Any], payload_bytes: int) -> None:
        self._receives -= 1
        error = event.error()
        if error is None and isinstance(event.result(), bytes):
            payload_bytes = len(event.result())
        self._count("received", payload_bytes, error)
        self._one_settled()

    def _count(self, frames: str, payload_bytes: int, error: BaseException | None) -> None:
        self._done["skipped" if error else frames] += 1
        if error is None:
            self._done[f"{frames}_bytes"] += payload_bytes

    def _one_settled(self) -> None:
        settled, self._settled = self._settled, Event("settled")
        settled.settle(None, None)
        self._end_if_over()

    def _compare(self, meeting: _Meeting) -> None:
        """Once both ends are there: the receive's own check of what comes."""
        if meeting.sending is not None and meeting.receiving is not None:
            sending = meeting.sending
            try:
                meeting.receiving.space_for(Content(sending.kind, sending.form.dtype, sending.form.shape), sending.step)
            except PeerLost as lost:
                self._lose(lost.reason, str(lost))

    def _meeting(self, kind: str, place: int) -> _Meeting:
        found = self._meetings.get((kind, place))
        if found is not None:
            del self._meetings[kind, place]  # both have come
            return found
        made = self._meetings[kind, place] = _Meeting()
        return made

    def _next(self, verb: str) -> int:
        self._counts[verb] = self._counts.get(verb, 0) + 1
        return self._counts[verb]

    def _check(self, in_flight: int, what: str) -> None:
        self._raise_if_over()
        if in_flight >= self._limits.queue_max:
            raise Full(f"{what} does not fit on {self.name}: {in_flight} in flight, at most {self._limits.queue_max}")

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _lose(self, reason: Reason, message: str) -> None:
        for end in (self, self.far):
            end._end(PeerLost(reason, message))

    def _end(self, error: StreamError) -> None:
        """Over: what is in flight at this end goes on to fail, whether its other half ever comes or not."""
        self._error = self._error or error
        for end in (self, self.far):
            for meeting in list(end._meetings.values()):
                for gate in (meeting.asked, meeting.arrived):
                    if not gate.done():
                        gate.settle(None, None)
        self._one_settled()

    def _end_if_over(self) -> None:
        if self._error is not None and not self._sends + self._receives and not self.ended.done():
            self.ended.settle(None, None if isinstance(self._error, Closed) else self._error)
