"""Everything the engine tells a caller has gone wrong, each with a stable exit code and HTTP status.

Messages are one line and say what to do. Exit codes: 0 done, 1 outputs differed, 2 bad usage or setting, 3 bad model files,
4 does not fit, 5 cannot bind or reach, 70 device failure.
"""

import reprlib
from typing import Final, Literal, TypeAlias

__all__ = [
    "ArchiveFailed", "ArchiveReason", "ArchiveRefused", "BadModel", "BadRequest", "BadSetting", "DeviceFailed", "ForebayError",
    "FormBroken", "NeverFits", "NodeLost", "NotAdmitted", "PARTED", "QuotaExceeded", "RequestCancelled", "RequestTimedOut",
    "SessionBroken", "SessionBusy", "StaleRevision", "TooLong", "UnknownRequest", "UnknownSession", "shown",
]  # fmt: skip

ArchiveReason: TypeAlias = Literal["damaged", "truncated", "foreign", "newer", "missing", "format"]
_REASONS: Final = {
    "damaged": "damaged", "truncated": "truncated", "foreign": "of another model", "newer": "newer than this program",
    "missing": "incomplete", "format": "in another format",
}  # fmt: skip

PARTED: Final = 1 << 30  # in place of a row's first bad layer: the step's devices lost one another
_CONTEXT_EXCEEDED: Final = "context_length_exceeded"  # OpenAI's: clients shorten the conversation on it
_SHOWN_MAX = 100
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxlevel = _SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 2


def shown(value: object) -> str:
    """A value as a message may repeat it: on one line, at most 100 characters, whatever somebody sent."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        text = "a very long number"
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 3]}..."


class ForebayError(Exception):
    """Root of the errors that callers may catch. `str()` is one line."""

    exit_code = 1
    status = 500
    kind = "internal_error"
    code: str | None = None  # as OpenAI names it, where clients act on one
    retry = True  # whether clients that ask again of themselves may


class BadSetting(ForebayError):
    """A flag, FOREBAY_* variable, TOML key or config field that is unknown, malformed or contradictory."""

    exit_code = 2
    status = 400
    kind = "invalid_setting"


class BadModel(ForebayError):
    """A model directory that cannot be loaded; the message names the file, tensor or field."""

    exit_code = 3
    kind = "invalid_model"


class BadRequest(ForebayError):
    """A request that can never be served as asked; the message names the field."""

    exit_code = 2
    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class FormBroken(BadRequest):
    """The form that a request asked for cannot go on: its grammar became too complex, or leads nowhere. May come after any chunk."""


class TooLong(BadRequest):
    """A prompt, or a prompt and what it asks for, that is longer than the context."""

    code = _CONTEXT_EXCEEDED


class UnknownSession(BadRequest):
    """No session of that id."""

    status = 404
    kind = "not_found_error"


class StaleRevision(BadRequest):
    """The session is at another revision, or a turn is under way that moves it. `revision` is the present one."""

    status = 409
    kind = "conflict_error"

    def __init__(self, message: str, revision: int) -> None:
        super().__init__(message, field="session.revision")
        self.revision = revision


class NotAdmitted(ForebayError):
    """Does not fit now (`retry_after_s` set) or ever; the message gives the missing bytes per tier."""

    exit_code = 4
    status = 503
    kind = "capacity_error"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        if retry_after_s is not None:
            self.status = 429


class QuotaExceeded(ForebayError):
    """An archive would take the key's archives past its quota; nothing was written. The session lives on."""

    exit_code = 4
    status = 403
    kind = "quota_error"


class UnknownRequest(BadRequest):
    """No request of that id is running."""

    status = 404
    kind = "not_found_error"


class RequestCancelled(ForebayError):
    """Somebody ended the request by its id."""

    status = 499  # a 409 would be asked again by clients of themselves
    kind = "cancelled_error"
    code = "request_cancelled"
    retry = False


class RequestTimedOut(ForebayError):
    """The request took longer than the server lets any take."""

    status = 504
    kind = "timeout_error"
    code = "request_timeout"
    retry = False


class NeverFits(NotAdmitted):
    """More than all there is could hold, whoever else leaves: no time makes it right."""

    status = 400
    kind = "invalid_request_error"
    code = _CONTEXT_EXCEEDED


class NodeLost(ForebayError):
    """A machine that holds some of the layers is away. Running requests end with it, new ones are refused until it is back."""

    exit_code = 5
    status = 503
    kind = "node_lost"
    retry_after_s = 2.0


class DeviceFailed(ForebayError):
    """The device reported an error, or ends nothing any more, and the process that has it must end. Sessions come back from archives."""

    exit_code = 70
    status = 503
    kind = "device_failed"
    retry_after_s = 10.0


class SessionBroken(ForebayError):
    """This session cannot go on (a failed copy, a non-finite layer output named in the message); others can."""

    kind = "session_broken"

    @classmethod
    def not_finite(cls, layer: int, layers: int) -> "SessionBroken":
        """A value that is not finite came out of a layer, or with `layer == layers` of the head; `PARTED` is none."""
        if layer == PARTED:
            return cls("owner and peer waited for one another in vain in a step; this request ends, others go on")
        place = "the output head" if layer == layers else f"layer {layer}"
        return cls(f"{place} produced a value that is not finite; this request ends, others go on")


class SessionBusy(BadRequest):
    """The session is at something that this cannot be done beside; later it can."""

    status = 409
    kind = "conflict_error"


class ArchiveRefused(ForebayError):
    """An archive that is not taken; nothing of it is. `reason` says why."""

    exit_code = 3
    status = 422
    kind = "archive_refused"

    def __init__(self, reason: ArchiveReason, where: str, message: str) -> None:
        super().__init__(f"archive {shown(where)} is {_REASONS[reason]}: {message}")
        self.reason = reason


class ArchiveFailed(ForebayError):
    """An archive could not be written or read: the disk is full, or the directory is not ours to write. The session lives on."""

    exit_code = 4
    status = 507
    kind = "archive_failed"
