"""Exceptions as OpenAI-shaped error bodies.

1. Only our own errors show their message; anything else is our bug, and its text stays in the log.
2. A message is one line of at most 500 characters.
"""

from engine.errors import ForebayError, StaleRevision

__all__ = ["error_body", "error_fields"]

_MESSAGE_MAX = 500  # a template's own sentence may repeat a whole prompt


def error_fields(message: str, kind: str, *, field: str | None = None, code: str | None = None) -> dict[str, object]:
    """The body of an error answer; also the last chunk of a stream that failed."""
    text = " ".join(message[: 2 * _MESSAGE_MAX].split())
    text = text if len(text) <= _MESSAGE_MAX else f"{text[: _MESSAGE_MAX - 3]}..."
    return {"error": {"message": text, "type": kind, "param": field, "code": code}}


def error_body(error: BaseException) -> tuple[int, dict[str, object]]:
    """HTTP status and body for `error`."""
    if isinstance(error, ForebayError):
        body = error_fields(str(error) or error.kind, error.kind, field=getattr(error, "field", None), code=error.code)
        if isinstance(error, StaleRevision):
            body["revision"] = error.revision  # the present one, beside the error: clients read `error` by its four fields
        return error.status, body
    return 500, error_fields("internal error: see the server's log", ForebayError.kind)
