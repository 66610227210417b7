"""Log lines that cannot be written, and where lines go when standard error is replaced."""

import io
import logging
import os
import sys

import pytest
import structlog

from engine import logs


class Leaky(io.StringIO):
    """Fails as a pipe without a reader does."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("log_format", ["auto", "json", "console"])
def test_a_line_that_cannot_be_written_is_lost(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither our loggers nor those of libraries raise when the stream does, and nothing is printed about it."""
    logs.configure(log_format, Leaky())  # type: ignore[arg-type]  # of its literals
    structlog.get_logger().info("thing.done")
    logging.getLogger("library").error("failed")
    closed = io.StringIO()
    closed.close()
    logs.configure(log_format, closed)  # type: ignore[arg-type]
    structlog.get_logger().info("thing.done")
    logging.getLogger("library").error("failed")
    assert capsys.readouterr() == ("", "")


def test_standard_error_is_looked_up_at_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines go to what sys.stderr is when they are written, although the first one was closed, and nowhere without one."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure("json")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    structlog.get_logger().info("thing.done")
    logging.getLogger("library").error("failed")
    assert [line.split('"event": "')[1].split('"')[0] for line in second.getvalue().splitlines()] == ["thing.done", "failed"]
    monkeypatch.setattr(sys, "stderr", None)
    structlog.get_logger().info("thing.done")
    assert second.getvalue().count("\n") == 2


def test_a_pipe_without_a_reader_fails_nobody() -> None:
    """Writing to a real pipe whose reader has left loses the line, again and again."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    logs.configure("json", stream)
    for _ in range(3):
        structlog.get_logger().info("thing.done", size_bytes=100_000 * "x")
    with pytest.raises(BrokenPipeError):  # what was buffered still cannot leave
        stream.close()
