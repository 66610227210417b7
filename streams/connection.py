"""The loop's side of a channel's TCP connection: reads into given buffers, writes batches, hears silence. Knows nothing of frames' meaning.

Invariants:
1. The connection is always read, straight to where the reader says.
2. One batch is written at a time; where `write` does not say that the machine took all of it, `taken` is called once it has.
3. Silence is counted in ticks, and a tick counts at most as two beats: a loop that stood still itself does not take that for the peer's
   silence. A connection that takes no byte for as long is silent too.
4. `gone` is called exactly once, last; then there is no timer and no descriptor.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from streams.channel import ChannelLimits
from streams.clock import Clock
from streams.errors import PeerLost, Reason
from streams.frame import FrameReader

__all__ = ["Connection", "Heard"]

_IP_MTU, _IPV6_MTU = 14, 24  # Linux's numbers; Python has no names for them


@dataclass(frozen=True, slots=True)
class Heard:
    """What a connection tells its owner, on the loop's thread."""

    begun: Callable[[], None]  # it is there
    taken: Callable[[], None]  # the batch is out of its hands
    quiet: Callable[[], None]  # nothing was written for a beat
    failed: Callable[[PeerLost], None]  # the peer broke the rules or fell silent; abort it
    gone: Callable[[Exception | None, bool], None]  # why, and whether in the middle of a frame


class Connection(asyncio.BufferedProtocol):
    """See above. `established` is set by the owner once the peer is who it should be: until then all time counts as silence."""

    def __init__(self, reader: FrameReader, heard: Heard, limits: ChannelLimits, clock: Clock) -> None:
        self.established = False
        self.admit: Callable[[], bool] = lambda: True  # asked once it is made, a TLS handshake included
        self.peer_address = ""
        self._reader = reader
        self._owner = heard
        self._beat_ns = limits.beat_ms * 1_000_000
        self._silence_ns = limits.silence_ms_max * 1_000_000
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._aborted = self._departing = False
        self._writing = False  # a batch is in the connection's hands
        self._heard = self._wrote = False
        self._ticked_ns = self._silent_ns = self._stuck_ns = self._held_bytes = 0

    # called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's has the methods and another parent
        transport.set_write_buffer_limits(high=0)  # so `resume_writing` says when nothing is left
        address = transport.get_extra_info("peername")
        self.peer_address = f"{address[0]}:{address[1]}" if isinstance(address, tuple) and len(address) >= 2 else str(address or "?")
        self._ticked_ns = self._clock.now_ns()
        self._timer = asyncio.get_running_loop().call_later(self._beat_ns / 1e9, self._tick_on)
        if self.admit():
            self._owner.begun()
        else:
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop: where the next bytes go."""
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop: so many came."""
        self._heard = True
        try:
            self._reader.advance(nbytes)
        except PeerLost as lost:
            self._reader.stop()
            self._owner.failed(lost)

    def resume_writing(self) -> None:
        """Called by the loop: the connection holds little or nothing any more."""
        if self._writing and not self.held_bytes:
            self._writing = False
            self._owner.taken()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, last."""
        self._aborted, self._writing = True, False
        self._transport = None
        inside = self._reader.inside()
        self._reader.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._owner.gone(exc, inside)

    # called by the owner

    @property
    def held_bytes(self) -> int:
        """Bytes that were written and not taken by the machine."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def path_mtu(self) -> int | None:
        """Bytes of the largest packet that goes to the peer in one piece, as this machine knows it now; None where it does not say."""
        told = None if self._transport is None else self._transport.get_extra_info("socket")
        if told is None:
            return None
        level, name = (socket.IPPROTO_IPV6, _IPV6_MTU) if told.family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
        try:
            return int(told.getsockopt(level, name))
        except OSError:
            return None

    @property
    def writable(self) -> bool:
        """Whether `write` has somewhere to write to."""
        return self._transport is not None and not self._aborted and not self._departing

    def write(self, pieces: Sequence[bytes | memoryview], *, batch: bool) -> bool:
        """Write; returns whether the machine has all of it. Of a `batch`, whose buffers must stay as they are till then, `taken` tells."""
        transport = self._transport
        assert transport is not None, "written to a connection that is gone"
        assert not (batch and self._writing), "a batch was written over another"
        self._wrote = True
        transport.writelines(pieces)
        if not transport.get_write_buffer_size():
            return True
        self._writing = self._writing or batch
        return False

    def abort(self) -> None:
        """Let the connection go now; what the machine has taken still arrives. Nothing is read any more."""
        already, self._aborted = self._aborted, True
        self._reader.stop()
        if self._transport is not None and not already:
            self._transport.abort()

    def deafen(self) -> None:
        """Drop whatever comes from now on; who sends it is still heard to be alive."""
        self._reader.stop()

    def depart(self) -> None:
        """Write nothing more, drop what comes, and let the connection go when the peer does, or after the time of its silence.

        A connection that is let go while the peer still sends is reset, and then what the peer has not received yet never arrives.
        """
        self._departing, self._silent_ns = True, 0
        self._reader.stop()
        try:
            if self._transport is not None and self._transport.can_write_eof():
                self._transport.write_eof()
        except OSError:  # the peer went first
            self.abort()

    def tick(self) -> None:
        """Count silence, and ask for a beat if nothing was written. Called by the loop's timer every beat."""
        now_ns = self._clock.now_ns()
        elapsed_ns, self._ticked_ns = min(now_ns - self._ticked_ns, 2 * self._beat_ns), now_ns
        self._silent_ns = 0 if self._heard and self.established and not self._departing else self._silent_ns + elapsed_ns
        held, self._held_bytes = self._held_bytes, self.held_bytes
        self._stuck_ns = self._stuck_ns + elapsed_ns if held and held == self._held_bytes else 0
        wrote, self._heard, self._wrote = self._wrote, False, False
        if self._aborted:
            return
        lost = self._silence(held)
        if lost is not None:
            self._owner.failed(lost)
            self.abort()
        elif self.established and not wrote and not self._held_bytes and not self._departing:
            self._owner.quiet()

    def _silence(self, held: int) -> PeerLost | None:
        if self._silent_ns >= self._silence_ns:
            what = "nothing was heard" if self.established else "the handshake was not done"
            return PeerLost(Reason.SILENT, f"{what} for {self._silent_ns // 1_000_000} ms")
        if self._stuck_ns >= self._silence_ns:
            return PeerLost(Reason.SILENT, f"nothing of {held} bytes was taken for {self._stuck_ns // 1_000_000} ms")
        return None

    def _tick_on(self) -> None:
        self.tick()
        if self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(self._beat_ns / 1e9, self._tick_on)
