"""Ordered work as awaitable events.

`streams` moves buffers and knows no rows: `memory` decides which rows, `engine` decides when.

Parts
    event.py    `Event`: happens once, carries a result or an error, awaitable, with callbacks in completion order
    stream.py   the protocols `Stream`, `Backend`, `Observer` and the rules all backends keep
    queued.py   what backends share on the loop's side: limits, room, closing, counting, observing
    cpu.py      `CpuBackend`: a worker thread a stream; real overlap without a device
    device.py   `DeviceBackend` (import it from there): streams of a GPU through torch.cuda, one poller a loop;
                `pace.py`: when that asks next
    capture.py  recordings of a chain, replayed as one operation; `graphs.py`: as a graph for each device of a pair;
                `crossing.py`: how those wait for one another
    virtual.py  `VirtualBackend`: a virtual clock, every interleaving chosen by an order; `order.py`: by a seed, with faults
    seal.py     `sealed`: real time or real I/O inside a virtual run raises
    observed.py `observed`: an observer that joins for a while
    tape.py     recorded runs as versioned JSON lines; `replay.py`: an order read from a tape; `trace.py`: a tape for Perfetto;
                `picture.py`: a tape as an SVG
    channel.py  `Channel`: tensors and messages to and from another stage, as events. `tcp.py`: over one connection, which `connect` and
                `listen` (meeting.py) make; `connection.py`: its bytes and its silence; `frame.py`: what stands in them; `handshake.py`:
                who is at the other end; `lane.py`: what waits. `virtual_channel.py`: a pair of them in virtual time
    guard.py    poison and fingerprints of the buffers of work in flight
    clock.py    the only source of time
    errors.py   what can go wrong, and whose doing it was

Invariants
    1. Submitted is not completed. Nothing but an event says that work is complete.
    2. Work owns its buffers until it completes. Cancelling a wait never cancels work.
    3. Events become done on the loop's thread, in completion order, dependencies first; so state that callbacks change needs no locks.
    4. A channel sends nothing that its peer did not ask for, and ends as a whole, with a reason.
    5. A failure reaches the work ordered `after` it and nothing else.

Choices
    Events, not asyncio futures: cancelling a waiter cancels its future, and a dropped failure is reported long after its place.
    Workers wait for one another's work on their own threads: a hop over the loop for each would cost more than most operations.
"""

from streams.channel import Channel, ChannelLimits, ChannelStatistics
from streams.clock import Clock, RealClock
from streams.cpu import CpuBackend
from streams.errors import (
    BufferChanged,
    Busy,
    Closed,
    DependencyFailed,
    DeviceLost,
    Escaped,
    Full,
    PeerLost,
    Reason,
    StreamError,
    TapeMismatch,
    TransferFailed,
    Unordered,
)
from streams.event import Event
from streams.handshake import BadKey, Terms, read_key
from streams.meeting import Listener, connect, listen
from streams.observed import observed
from streams.order import Cost, Fault, Order, SeededOrder
from streams.picture import picture
from streams.replay import ReplayOrder
from streams.seal import sealed
from streams.stream import Backend, BackendStatistics, Observer, Stream, StreamStatistics
from streams.tape import Tape, TapeFile, TapeRecorder
from streams.tcp import TcpChannel
from streams.trace import chrome_trace
from streams.virtual import VirtualBackend
from streams.virtual_channel import VirtualChannel, virtual_pair

__all__ = [
    "Event",
    "Stream", "Backend", "Observer", "observed", "BackendStatistics", "StreamStatistics",
    "CpuBackend", "VirtualBackend", "Order", "SeededOrder", "Cost", "Fault", "sealed",
    "Tape", "TapeFile", "TapeRecorder", "ReplayOrder", "chrome_trace", "picture",
    "Channel", "ChannelLimits", "ChannelStatistics", "TcpChannel", "VirtualChannel", "Listener", "Terms",
    "connect", "listen", "read_key", "virtual_pair",
    "Clock", "RealClock",
    "StreamError", "Closed", "Full", "Busy", "PeerLost", "Reason", "BadKey", "TransferFailed", "DependencyFailed", "DeviceLost",
    "BufferChanged", "Unordered", "Escaped", "TapeMismatch",
]  # fmt: skip
