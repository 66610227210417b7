"""What travels on a control channel: calls to a node, and what it answers. Values only; knows no channel.

Failures travel as the name of their class, their one line and the numbers they carry, and become the same class on the other side; a class
that is not in the table becomes `NodeFailed`, with its name in the line.
"""

from typing import Any, Final

import msgspec

from engine.errors import (
    ArchiveFailed,
    ArchiveRefused,
    BadRequest,
    BadSetting,
    ForebayError,
    NeverFits,
    NotAdmitted,
    SessionBroken,
    SessionBusy,
    UnknownSession,
)  # fmt: skip
from memory.errors import BarrierFailed, CopybackInFlight, DoesNotFit, RingOverrun
from streams import Closed, DependencyFailed, DeviceLost, Full, PeerLost, Reason, TransferFailed

__all__ = [
    "CALL",
    "CALL_BYTES_MAX",
    "REPLY",
    "REPLY_BYTES_MAX",
    "WINDOW",
    "Call",
    "Failure",
    "NodeFailed",
    "Reply",
    "error_of",
    "failure_of",
]

CALL, REPLY = "call", "reply"
CALL_BYTES_MAX = 32 << 20  # the token ids of a long prompt, and some
REPLY_BYTES_MAX = 32 << 20
WINDOW = 256  # calls, and replies, that a side has asked for ahead


class NodeFailed(ForebayError):
    """Something went wrong on a node that has no name of its own here."""

    kind = "node_failed"


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call; `body` is what `name` takes, packed."""

    number: int
    name: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A failure; see the module."""

    name: str
    text: str
    extra: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the call of that number; without one (-1), something that the node tells by itself: `body` is packed."""

    number: int
    failure: Failure | None
    body: msgspec.Raw


_PLAIN: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (
        ArchiveFailed, BadSetting, BarrierFailed, Closed, CopybackInFlight, DependencyFailed, DeviceLost, Full, NeverFits,
        RingOverrun, SessionBroken, TransferFailed,
    )
}  # fmt: skip
_FIELD: Final[dict[str, type[BadRequest]]] = {each.__name__: each for each in (BadRequest, SessionBusy, UnknownSession)}


def failure_of(error: BaseException) -> Failure:
    """What of an error travels."""
    name = type(error).__name__
    extra: dict[str, Any] = {}
    text = " ".join(str(error).split())
    if isinstance(error, DoesNotFit):  # its kinds say no more than the numbers
        name, extra = "DoesNotFit", {"host": error.host_missing_bytes, "device": error.device_missing_bytes}
    elif isinstance(error, PeerLost):
        extra = {"reason": str(error.reason)}
    elif isinstance(error, ArchiveRefused):
        extra = {"reason": error.reason}
    elif type(error) is NotAdmitted:
        extra = {"retry_after_s": error.retry_after_s}
    elif name in _FIELD and isinstance(error, BadRequest):
        extra = {"field": error.field}
    return Failure(name, text[:2000], extra)


def error_of(failure: Failure, node: str) -> BaseException:
    """The error that travelled. Args: node: whose doing it was, for classes that are not known here."""
    name, text, extra = failure.name, failure.text, failure.extra
    if name == "DoesNotFit":
        return DoesNotFit(host_missing_bytes=int(extra["host"]), device_missing_bytes=int(extra["device"]))
    if name == "PeerLost":
        return PeerLost(Reason(extra["reason"]), text.partition(": ")[2] or text)
    if name == "ArchiveRefused":
        refused = ArchiveRefused(extra["reason"], node, text)
        refused.args = (text,)  # it was worded there already
        return refused
    if name == "NotAdmitted":
        return NotAdmitted(text, retry_after_s=extra["retry_after_s"])
    if name in _FIELD:
        return _FIELD[name](text, field=extra["field"])
    if name in _PLAIN:
        return _PLAIN[name](text)
    return NodeFailed(f"{node}: {name}: {text}")
