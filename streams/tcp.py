"""The real channel, over one TCP connection. `meeting.py` makes it: `connect` and `listen`.

Joins a `Connection` (bytes and silence), a `FrameReader` (frames), a `Handshake` (who) and `Lanes` (what waits).

Invariants:
1. Everything happens on the loop's thread, in callbacks of the connection or calls of the owner; there are no tasks to leak.
2. Whatever comes was asked for, so it has a place, and the connection is read without rest.
3. A channel ends once, with one error that everybody gets. After `close` a batch under way is finished first, within the time-out.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import structlog
from torch import Tensor

from streams.channel import ChannelLimits, ChannelStatistics
from streams.clock import Clock
from streams.connection import Connection, Heard
from streams.errors import Closed, PeerLost, Reason, StreamError, TransferFailed
from streams.event import Event
from streams.frame import (
    Beat,
    Bye,
    Content,
    FrameReader,
    Grant,
    Header,
    Hello,
    Proof,
    Skip,
    cut,
    head_of,
)  # fmt: skip
from streams.handshake import TERMS_BYTES_MAX, Handshake, Terms
from streams.lane import Lanes, Receiving, Sending, header_with

__all__ = ["TcpChannel"]

T = TypeVar("T")
_BATCH_BYTES = 1 << 20
_BATCH_PIECES = 128
_log = structlog.get_logger("streams")


class TcpChannel:
    """See `Channel`. Of use once `opened` is done."""

    def __init__(self, handshake: Handshake, limits: ChannelLimits, clock: Clock) -> None:
        self.opened: Event[None] = Event("open")
        self.ended: Event[None] = Event("end")
        self.name = "?"
        self._limits = limits
        self._handshake = handshake
        self._lanes = Lanes(limits.queue_max)
        self._reader = FrameReader(self._arrived, self._whole)
        self._reader.payload_bytes_max = TERMS_BYTES_MAX
        heard = Heard(self._begun, self._taken, self._quiet, self._failed, self._gone)
        self.connection = Connection(self._reader, heard, limits, clock)
        self._loop = asyncio.get_running_loop()
        self._error: StreamError | None = None  # why it ended
        self._order = self._sequence = self._seed = 0
        self._header: Header = Beat()  # of the frame being read
        self._step = 0  # of that frame, unless it is a `Content`
        self._terms = bytearray()
        self._receiving: Receiving[Any] | None = None  # whose frame is being read
        self._batch: list[Sending] | None = None  # what the connection holds a part of
        self._kept: list[object] = []  # buffers that the connection may still read once their transfers were told of the end
        self._pumping = self._wrote = self._writing = False
        self._room: list[asyncio.Future[None]] = []
        self._sent_frames = self._sent_bytes = self._received_frames = self._received_bytes = self._skipped = 0

    # the owner's side

    @property
    def peer(self) -> Terms:
        """What the other side said of itself; asserts that the channel opened."""
        assert self._handshake.peer is not None, f"{self!r} has not opened"
        return self._handshake.peer

    def send(
        self, source: Tensor | bytes, *, kind: str, step: int, session: str = "", after: Sequence[Event[Any]] = ()
    ) -> Event[None]:  # fmt: skip
        """See `Channel.send`."""
        self._check()
        self._order += 1
        sending = Sending(self.name, kind, step, self._order, session, source)
        taken = len(sending.payload)
        assert taken <= self._limits.frame_bytes_max, f"{taken} bytes in a frame; at most {self._limits.frame_bytes_max}"
        if not (after or self._wrote or self._writing) and self._batch is None and self._lanes.may_go(kind):
            self._send_now(sending)
            return sending
        self._lanes.add_send(sending)
        if after:
            sending.start_after(after, self._schedule)
        if self._wrote:
            self._schedule()
        else:  # the first after something came goes now, others of this round of the loop with one write at its end
            self._wrote = True
            self._write_ready()
        return sending

    def receive(
        self, into: Tensor, *, kind: str, step: int, session: str = "", after: Sequence[Event[Any]] = ()
    ) -> Event[Tensor]:  # fmt: skip
        """See `Channel.receive`."""
        self._order += 1
        return self._receive(Receiving(self.name, kind, step, self._order, session, into, 0), after)

    def receive_bytes(self, *, kind: str, step: int, bytes_max: int, session: str = "") -> Event[bytes]:
        """See `Channel.receive_bytes`."""
        self._order += 1
        return self._receive(Receiving(self.name, kind, step, self._order, session, None, bytes_max), ())

    def _receive(self, receiving: Receiving[T], after: Sequence[Event[Any]]) -> Event[T]:
        self._check()
        self._lanes.add_receive(receiving)
        if after:
            receiving.start_after(after, self._one_free)
        if self._lanes.must_grant:
            self._schedule()
        return receiving

    def _one_free(self) -> None:
        """The buffer of a receive is free now."""
        self._lanes.may_grant = True
        self._schedule()

    async def wait_room(self) -> None:
        """See `Channel.wait_room`."""
        while self._error is None and self._lanes.sends >= self._limits.queue_max:
            waiter = self._loop.create_future()
            self._room.append(waiter)
            await waiter
        self._check()

    async def close(self) -> None:
        """See `Channel.close`. Returns once the peer knows; a peer that does not answer within the time-out is left without."""
        self._end(Closed(f"the channel to {self.name} is closed"))
        await self.ended.wait_done()

    def statistics(self) -> ChannelStatistics:
        """See `Channel.statistics`."""
        return ChannelStatistics(
            self._sent_frames, self._sent_bytes, self._received_frames, self._received_bytes, self._skipped,
            self._lanes.sends + len(self._batch or ()), self._lanes.receives + (self._receiving is not None),
        )  # fmt: skip

    def __repr__(self) -> str:
        state = f"ended, {self._error}" if self._error else "open" if self._handshake.done else "opening"
        return f"<TcpChannel to {self.name}: {state}; {self._lanes.sends} to send, {self._lanes.receives} to receive>"

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # the same one each time: its traceback must not grow
        assert self._handshake.done, f"{self!r} has not opened"

    # writing

    def _schedule(self) -> None:
        """Write at the end of this round of the loop all that was submitted in it."""
        if not self._pumping and self._error is None:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = self._wrote = False
        self._write_ready()

    def _write_ready(self) -> None:
        """Write what may go, unless a batch is under way."""
        if self._writing:
            return
        self._writing = True
        while self._error is None and self._batch is None:
            pieces, batch = self._gather()
            if not pieces:
                break
            if self.connection.write(pieces, batch=True):
                self._sent(batch)
            else:
                self._batch = batch
        self._writing = False

    def _send_now(self, sending: Sending) -> None:
        """Write one frame that nothing waits before."""
        self._wrote = self._writing = True
        if self.connection.write(self._framed_with_grants(sending), batch=True):
            self._sent_frames += 1
            self._sent_bytes += len(sending.payload)
            sending.finish(None, None)  # nobody has it yet, so nobody is told
        else:
            self._batch = [sending]
        self._writing = False

    def _framed_with_grants(self, sending: Sending) -> list[bytes | memoryview]:
        """The pieces of a frame, and of the grants that go with it: in its header where that has room."""
        form, payload = sending.form, sending.payload
        header = form.header
        pieces: list[bytes | memoryview] = []
        if self._lanes.may_grant:
            grants = self._lanes.grants()
            together = header_with(form.content, tuple(grants))
            if together is None:
                pieces += [self._framed(Grant(kind, receives)) for kind, receives in grants]
            else:
                header = together
        pieces.append(self._framed(header, sending.step, payload))
        if len(payload):
            pieces.append(payload)
        return pieces

    def _gather(self) -> tuple[list[bytes | memoryview], list[Sending]]:
        """The frames that may go now, as far as one batch takes them."""
        lanes = self._lanes
        pieces: list[bytes | memoryview] = []
        batch: list[Sending] = []
        batch_bytes = 0
        while lanes.sends and batch_bytes < _BATCH_BYTES and len(pieces) < _BATCH_PIECES:
            sending = lanes.next_send()
            if sending is None:
                break
            if sending.done():  # something in its `after` failed
                pieces.append(self._framed(Skip(sending.kind, cut(str(sending.error()))), sending.step))
                self._skipped += 1
                continue
            pieces += self._framed_with_grants(sending)
            batch.append(sending)
            batch_bytes += len(sending.payload)
        if lanes.may_grant:
            pieces += [self._framed(Grant(kind, receives)) for kind, receives in lanes.grants()]
        return pieces, batch

    def _sent(self, batch: list[Sending]) -> None:
        """These buffers are free."""
        for sending in batch:
            self._sent_frames += 1
            self._sent_bytes += len(sending.payload)
            self._finish(sending, None)
        if self._room and self._lanes.sends < self._limits.queue_max:
            self._wake_room()

    def _taken(self) -> None:
        """The batch that was under way is out; go on, or say farewell."""
        batch, self._batch = self._batch or [], None
        self._sent(batch)
        if self._error is not None:
            self._farewell(Reason.CLOSED)
        else:
            self._write_ready()

    def _quiet(self) -> None:
        self._put(Beat())

    def _framed(self, header: Header | bytes, step: int = 0, payload: memoryview | bytes = b"") -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return head_of(header, sequence, self._seed, step, payload)

    def _put(self, header: Header, payload: bytes = b"") -> None:
        self.connection.write([self._framed(header, 0, payload) + payload], batch=False)

    # reading

    def _begun(self) -> None:
        self.name = self.connection.peer_address
        self._put(self._handshake.begin())

    def _arrived(self, header: Header, step: int, payload_bytes: int) -> memoryview | None:
        """A head came: find the place of its payload."""
        self._wrote = False
        if isinstance(header, Content) and self._handshake.done:
            for kind, receives in header.grants:
                self._lanes.add_credit(kind, receives)
            receiving = self._receiving = self._lanes.take_granted(header.kind)
            return receiving.space_for(header, step)
        self._header, self._step = header, step
        if isinstance(header, Bye):
            reason = Reason.CLOSED if header.reason == Reason.CLOSED else Reason.LOST if self._handshake.done else header.reason
            raise PeerLost(reason, f"{self.name} ended the channel: {header.text}")
        if isinstance(header, Hello | Proof) and not self._handshake.done:
            self._terms = bytearray(payload_bytes)
            return memoryview(self._terms)
        if not self._handshake.done or isinstance(header, Hello | Proof):
            raise PeerLost(
                Reason.UNAUTHENTICATED, f"a {type(header).__name__} came {'after' if self._handshake.done else 'in'} the handshake"
            )
        return None

    def _whole(self) -> None:
        """The frame is whole: do what it says."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            self._received_frames += 1
            self._received_bytes += 0 if receiving.view is None else len(receiving.view)
            raised = receiving.complete()
            if raised is not None:
                self._tell(receiving, raised)
            if self._lanes.must_grant:
                self._schedule()  # behind whom that woke, so that a grant goes with what they send
            if self._lanes.sends:
                self._write_ready()  # what the grants that came with it allow
            return
        header = self._header
        if isinstance(header, Grant):
            self._lanes.add_credit(header.kind, header.receives)
            if self._lanes.sends:
                self._write_ready()
        elif isinstance(header, Hello | Proof):
            self._shake(header)
        elif isinstance(header, Skip):
            self._take_skip(header)

    def _shake(self, header: Hello | Proof) -> None:
        answer = self._handshake.take(header, bytes(self._terms))
        if answer is not None:
            self._put(*answer)
        if self._handshake.peer is not None:
            self._handshake.agree()
            self.connection.established = True
            self._reader.payload_bytes_max = self._limits.frame_bytes_max
            self._reader.seed = self._seed = self._handshake.seed
            self.name = f"stage {self._handshake.peer.stage} at {self.name}"
            self._tell(self.opened, self.opened.settle(None, None))

    def _take_skip(self, header: Skip) -> None:
        receiving = self._receiving = self._lanes.take_granted(header.kind)
        if self._step != receiving.step:
            raise PeerLost(Reason.OUT_OF_STEP, f"{header.kind} of step {self._step} came where step {receiving.step} was expected")
        self._receiving = None
        self._skipped += 1
        self._finish(receiving, TransferFailed(f"{header.kind} of step {self._step} will not come from {self.name}: {header.text}"))
        if self._lanes.must_grant:
            self._schedule()

    # the end

    def _failed(self, lost: PeerLost) -> None:
        self._end(lost)

    def _gone(self, cause: Exception | None, inside: bool) -> None:
        """The connection is no more."""
        words = "in the middle of a frame" if inside else "without a word"
        lost = PeerLost(Reason.LOST, f"the connection to {self.name} ended {words}" + (f" ({cause})" if cause else ""))
        lost.__cause__ = cause
        self._end(lost)
        batch, self._batch = self._batch or [], None
        for sending in batch:
            self._finish(sending, self._error)
        self._kept.clear()
        error = None if isinstance(self._error, Closed) else self._error
        self._tell(self.ended, self.ended.settle(None, error))

    def _end(self, error: StreamError) -> None:
        """End the channel, once: everybody gets `error`, the peer is told why if it can be."""
        if self._error is not None:
            return
        self._error = error
        if isinstance(error, PeerLost) and self._handshake.done:
            if error.reason == Reason.CLOSED:
                _log.info("channel.closed", peer=self.name)
            else:
                _log.warning("peer.lost", peer=self.name, reason=str(error.reason), error=str(error))
        finishing = isinstance(error, Closed) and self._batch is not None
        if finishing:
            self.connection.deafen()
        else:
            self._farewell(error.reason if isinstance(error, PeerLost) else Reason.CLOSED)
        left: list[Any] = [] if finishing or self._batch is None else self._batch
        if not finishing:
            self._batch = None
            self._kept = [sending.held for sending in left]
        left = left + ([] if self._receiving is None else [self._receiving]) + self._lanes.drain()
        self._receiving = None
        for transfer in left:
            self._finish(transfer, error)
        if not self.opened.done():
            self._tell(self.opened, self.opened.settle(None, error))
        self._wake_room()

    def _farewell(self, reason: Reason) -> None:
        """Tell the peer why, unless half a frame is in the way, and let the connection go: when we leave by ourselves, once it knows."""
        if not self.connection.held_bytes and self.connection.writable:
            self._put(Bye(reason, cut(str(self._error))))
            if isinstance(self._error, Closed) and self._handshake.done:
                return self.connection.depart()
        return self.connection.abort()

    def _wake_room(self) -> None:
        waiting, self._room = self._room, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _finish(self, transfer: Any, error: BaseException | None) -> None:
        self._tell(transfer, transfer.finish(None, error))

    def _tell(self, event: Event[Any], raised: BaseException | None) -> None:
        if raised is not None:
            self._loop.call_exception_handler({"message": f"a callback of {event!r} raised", "exception": raised})
