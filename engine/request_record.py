"""The canonical log line of one request: `request.finished`, everything that is worth knowing about it in one place.

Knows no HTTP objects. Holds no text of a prompt or an answer.
"""

import time
from dataclasses import dataclass, field

import structlog

from engine.chunk import Chunk, Usage
from engine.protocol import SessionId

__all__ = ["RequestRecord"]

log = structlog.get_logger()


@dataclass(slots=True)
class RequestRecord:
    """What the canonical log line of one request says."""

    request_id: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 500
    session_id: SessionId | None = None
    usage: Usage = Usage(0, 0)  # noqa: RUF009 - frozen
    first: float | None = None
    ended: float = 0.0  # once it was written
    finish_reason: str | None = None
    key_name: str = ""

    def saw(self, chunk: Chunk, usage: Usage) -> None:
        """Count a chunk of the answer; `usage` is that of all choices."""
        if self.first is None and chunk.token_ids:
            self.first = time.perf_counter()
        self.usage, self.finish_reason = usage, chunk.finish_reason or self.finish_reason

    def write(self, method: str, path: str, *, quiet: bool) -> None:
        """Write the line; `quiet` ones (probes) only show when debugging."""
        self.ended = now = time.perf_counter()
        line: dict[str, object] = {"request_id": self.request_id, "method": method, "path": path, "status": self.status}
        if self.key_name:
            line["key"] = self.key_name
        if self.session_id is not None or self.finish_reason is not None:
            line |= {"session_id": self.session_id, "prompt_tokens": self.usage.prompt_tokens}
            line |= {"completion_tokens": self.usage.completion_tokens, "finish_reason": self.finish_reason}
        if self.first is not None:
            line |= {"first_token_ms": round((self.first - self.started) * 1000, 1), "decode_ms": round((now - self.first) * 1000, 1)}
        write = log.debug if quiet else log.info
        write("request.finished", **line, duration_ms=round((now - self.started) * 1000, 1))
