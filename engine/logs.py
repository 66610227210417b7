"""Log set-up: one structlog chain, JSON lines or a console, on standard error.

Holds the chain. Does not know events; their names are `<noun>.<past verb>` and their keys carry units.

1. Lines of the libraries underneath take the same shape, from WARNING up.
2. No line shows a local variable of a traceback.
3. Nothing is cached at first use, so that a test may capture any logger.
4. A line that cannot be written is lost, and nothing else happens: whoever logs never fails because of the log.
"""

import logging
import sys
from contextlib import suppress
from typing import Literal, TextIO, cast

import structlog

__all__ = ["configure"]

_LOST = (OSError, ValueError)  # the reader of a pipe has left, the disk is full; the stream was closed


class _Sink:
    """A text stream that never raises. Standard error is looked up at each write: it may be replaced and closed meanwhile."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write all of it or lose it; returns characters."""
        stream = self._target()
        if stream is not None:
            with suppress(*_LOST):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what the stream buffers, or lose it."""
        stream = self._target()
        if stream is not None:
            with suppress(*_LOST):
                stream.flush()

    def isatty(self) -> bool:
        """Whether somebody looks at it; a closed stream is no terminal."""
        stream = self._target()
        with suppress(*_LOST):
            return stream is not None and stream.isatty()
        return False

    def _target(self) -> TextIO | None:
        """None: the process was started without standard error."""
        return self._stream if self._stream is not None else sys.stderr


def configure(log_format: Literal["auto", "json", "console"], stream: TextIO | None = None) -> None:
    """Send every log line to `stream` (standard error by default). `auto` is console on a terminal, else json."""
    target = cast("TextIO", _Sink(stream))  # as much of one as loggers use
    console = log_format == "console" or (log_format == "auto" and target.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[structlog.typing.Processor]
    if console:
        # Plain tracebacks: the default draws local variables, and those hold prompts and keys.
        last = [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    foreign = logging.StreamHandler(target)
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[foreign], level=logging.WARNING, force=True)
