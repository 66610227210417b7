"""What the HTTP library says about clients that do not speak HTTP: one line of ours instead of a traceback.

Holds the logger that the library is given. Knows no request: what cannot be parsed never became one.

1. Only errors of a client's making are shortened; whatever else the library reports keeps its traceback.
2. The line repeats nothing of what was sent: a header that cannot be parsed may hold a key.
"""

import logging

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["MALFORMED", "http_logger"]

log = structlog.get_logger()

MALFORMED = (HttpProcessingError, web.RequestPayloadError)  # what reading a client's bytes may raise


def _shorten(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, MALFORMED):
        return True
    log.info("request.malformed", kind=type(error).__name__)
    return False


def http_logger() -> logging.Logger:
    """The logger to give to the HTTP library."""
    logger = logging.getLogger("forebay.http")
    logger.addFilter(_shorten)  # the same function is added once
    return logger
