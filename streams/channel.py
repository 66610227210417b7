"""A channel: tensors and messages between two stages, each send and receive an `Event`.

Holds the protocol everything above writes against, its limits and statistics. `tcp.py` is the real one, over one connection;
`virtual_channel.py` a pair of them on the virtual backend.

Rules both keep:
1. A `receive` names what must come: kind, step, dtype and shape. Frames of a kind come in order; kinds do not wait for one another.
2. Nothing is sent that the peer did not ask for. So memory is bounded on both sides, a slow reader stops the sender, and whoever reads can
   always hear that the peer is alive.
3. Buffers belong to the transfer from `send` or `receive` to its event: not written (send), not touched at all (receive). Cancelling a wait
   changes nothing about the transfer.
4. A send is done when its buffer is free again. That the peer has the bytes only an answer of the peer says.
5. A send whose `after` failed is told to the peer, whose receive fails with `TransferFailed`; the channel goes on.
6. Anything else that goes wrong ends the channel: every event in flight fails with the same `PeerLost`, later calls raise it, and `ended`
   happens once nothing of the channel is left. After `close` it is `Closed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from streams.event import Event

__all__ = ["Channel", "ChannelLimits", "ChannelStatistics"]


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """What a channel allows. A peer is lost at the latest `silence_ms_max + beat_ms` after the last byte of it was heard."""

    frame_bytes_max: int = 256 << 20
    queue_max: int = 4096  # sends, and receives, in flight
    silence_ms_max: int = 5000  # also for the whole handshake
    beat_ms: int = 1000

    def __post_init__(self) -> None:
        assert min(self.frame_bytes_max, self.queue_max) >= 1, f"{self} leaves no room for a frame"
        assert 0 < self.beat_ms * 2 <= self.silence_ms_max, f"a beat every {self.beat_ms} ms is too rare for {self.silence_ms_max} ms"


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counts since the channel opened; the last two are of now. Frames are tensors and messages, bytes their payload."""

    sent_frames: int
    sent_bytes: int
    received_frames: int
    received_bytes: int
    skipped_frames: int  # sent or received in place of one that will not come
    sends_in_flight: int
    receives_in_flight: int


class Channel(Protocol):
    """One end. Everything is called on the loop's thread."""

    @property
    def name(self) -> str:
        """Who is at the other end, for errors and logs."""
        ...

    @property
    def ended(self) -> Event[None]:
        """Happens once nothing of the channel is left: completed after our `close`, else failed with PeerLost."""
        ...

    def send(self, source: Tensor | bytes, *, kind: str, step: int, session: str = "", after: Sequence[Event[Any]] = ()) -> Event[None]:
        """Send a tensor, or a message; never waits.

        Args:
            source: contiguous, in host memory, at most 6 dimensions; not written until the event is done.
            kind: 1 to 16 printable ASCII characters, at most 32 kinds a channel.
            step: a count from 0; the receiver must expect the same.
            after: sent once these are done; if one fails, the event fails with DependencyFailed and the peer's with TransferFailed.
        Raises: Full: at the limit (`wait_room` comes before); Closed; PeerLost.
        """
        ...

    def receive(self, into: Tensor, *, kind: str, step: int, session: str = "", after: Sequence[Event[Any]] = ()) -> Event[Tensor]:
        """Ask for a tensor of the dtype and shape of `into`; the event's result is `into`.

        Args:
            into: contiguous, in host memory; not touched until the event is done. After a failure what it holds is undefined.
            after: the buffer is free once these are done; if one fails, so does the event, and the frame is dropped when it comes.
        Raises: Full; Closed; PeerLost.
        """
        ...

    def receive_bytes(self, *, kind: str, step: int, bytes_max: int, session: str = "") -> Event[bytes]:
        """Ask for a message of at most `bytes_max` bytes. Raises: Full; Closed; PeerLost."""
        ...

    async def wait_room(self) -> None:
        """Wait until `send` would not raise Full; send before the next await. Raises: Closed; PeerLost."""
        ...

    async def close(self) -> None:
        """End the channel: what is in flight fails with Closed, the peer is told. Returns when nothing is left. May be called again."""
        ...

    def statistics(self) -> ChannelStatistics:
        """A frozen snapshot."""
        ...
