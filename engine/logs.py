"""Log set-up: one structlog chain, JSON lines or a console, on standard error.

Holds the chain. Does not know events; their names are `<noun>.<past verb>` and their keys carry units.

1. Lines of the libraries underneath take the same shape, from WARNING up.
2. No line shows a local variable of a traceback.
3. Nothing is cached at first use, so that a test may capture any logger.
"""

import logging
import sys
from typing import Literal, TextIO

import structlog

__all__ = ["configure"]


def configure(log_format: Literal["auto", "json", "console"], stream: TextIO | None = None) -> None:
    """Send every log line to `stream` (standard error by default). `auto` is console on a terminal, else json."""
    target = stream if stream is not None else sys.stderr
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
