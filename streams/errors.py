"""What can go wrong with ordered work, and whose doing it was.

`Closed`, `Busy` and `Full` are ours; `PeerLost` and `TransferFailed` come from outside; `DependencyFailed` follows another failure;
`BufferChanged`, `Unordered`, `Escaped` and `TapeMismatch` are raised by the virtual backend only.
"""

__all__ = [
    "BufferChanged", "Busy", "Closed", "DependencyFailed", "DeviceLost", "Escaped", "Full", "PeerLost", "StreamError", "TapeMismatch",
    "TransferFailed", "Unordered",
]  # fmt: skip


class StreamError(Exception):
    """Root of the errors of this package. `str()` is one line."""


class Closed(StreamError):
    """Work was given to a stream, backend or channel that we closed."""


class PeerLost(StreamError):
    """The other side of a connection went away or fell silent."""


class Busy(StreamError):
    """Two of our tasks use at once what only one may use."""


class Full(StreamError):
    """A queue is at its limit; `wait_room` comes before `submit`."""


class TransferFailed(StreamError):
    """A copy or transfer was reported failed by the device or the network."""


class DeviceLost(StreamError):
    """The device itself reported an error: every operation on it is lost, and so is everything its memory holds."""


class DependencyFailed(StreamError):
    """The work never ran, because work it comes after failed. `__cause__` is the first failure of the chain, never another of these."""


class BufferChanged(StreamError):
    """A buffer that work in flight reads or writes was written by somebody else before the work completed."""


class Unordered(StreamError):
    """Work was submitted that shares a buffer with work in flight, one of them writing it, and nothing says which comes first."""


class Escaped(StreamError):
    """Code under the virtual backend asked the real world for time, a file, a socket, a thread or a process."""


class TapeMismatch(StreamError):
    """A replay asked for something that is not on the tape, or not in that place; the message names the event."""
