"""What can go wrong with ordered work, and whose doing it was.

`Closed`, `Busy` and `Full` are ours; `PeerLost` (with a `Reason`) and `TransferFailed` come from outside; `DependencyFailed` follows
another failure; `BufferChanged`, `Unordered`, `Escaped` and `TapeMismatch` are raised by the virtual backend only.
"""

from enum import StrEnum

__all__ = [
    "BufferChanged", "Busy", "Closed", "DependencyFailed", "DeviceLost", "Escaped", "Full", "PeerLost", "Reason", "StreamError",
    "TapeMismatch", "TransferFailed", "Unordered",
]  # fmt: skip


class StreamError(Exception):
    """Root of the errors of this package. `str()` is one line."""


class Closed(StreamError):
    """Work was given to a stream, backend or channel that we closed."""


class Reason(StrEnum):
    """Why a channel ended that we did not close. At most 16 characters: it travels in a frame."""

    UNREACHABLE = "unreachable"  # no connection could be made
    LOST = "lost"  # the connection broke, or ended without a word
    CLOSED = "closed"  # the peer closed it in good order
    SILENT = "silent"  # nothing was heard for the time-out
    MALFORMED = "malformed"  # no frame of ours
    TOO_LARGE = "too large"
    OUT_OF_STEP = "out of step"  # a frame is missing, came twice or belongs to another step
    UNEXPECTED = "unexpected"  # nobody asked for it, or another dtype or shape was asked for
    DAMAGED = "damaged"  # a checksum differs
    UNAUTHENTICATED = "unauthenticated"  # the peer has not the key
    VERSION = "version"  # another version of the protocol
    MISMATCH = "mismatch"  # another model or another layer map


class PeerLost(StreamError):
    """The other side of a connection went away, fell silent or broke the rules; `reason` says which."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


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
