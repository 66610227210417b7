"""What commands draw: progress and the memory table. On a terminal with rich, elsewhere as log lines.

Knows the engine's statistics; does not open engines nor run generations. Everything goes to standard error, so that standard output is
the model's text alone.
"""

import sys
import threading
from types import TracebackType
from typing import Literal, Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.protocol import EngineStatistics

__all__ = ["Bar", "bytes_text", "memory_table"]

log = structlog.get_logger()

_LOG_PARTS = 4  # log lines a bar writes where there is no terminal


class Bar:
    """Progress of one thing, a context manager; safe to update after it was closed, and to close twice."""

    def __init__(
        self,
        title: str,
        event: str,
        unit: Literal["tensors", "weights", "rows", "tokens", "seeds", "bytes", "pictures", "seconds", "nodes"],
        console: Console | None = None,
    ) -> None:
        self._title, self._event, self._unit = title, event, unit
        self._console = console if console is not None else Console(file=sys.stderr)
        self._logged = 0  # parts of _LOG_PARTS already written
        self._progress: Progress | None = None
        self._closed = False
        self._lock = threading.Lock()  # weights are read, and so reported, on another thread

    def update(self, done: int, total: int) -> None:
        """`done` of `total` units; nothing while the total is unknown (0)."""
        with self._lock:
            if self._closed or total <= 0:
                return
            if self._console.is_terminal:
                self._draw(done, total)
            else:
                self._log(done, total)

    def _log(self, done: int, total: int) -> None:
        part = done * _LOG_PARTS // total
        if part > self._logged:
            self._logged = part
            log.info(self._event, **{f"{self._unit}_done": done, f"{self._unit}_total": total})

    def _draw(self, done: int, total: int) -> None:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(self._title)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def close(self) -> None:
        """Take the bar off the screen."""
        with self._lock:
            self._closed = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def bytes_text(size: int) -> str:
    """`1.5 MiB`; exact below 1 KiB."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def memory_table(statistics: EngineStatistics) -> Table:
    """Where the rows are, how often the hot cache had them, and the bytes of each tier."""
    table = Table(title="memory", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    reads = statistics.hits + statistics.misses
    table.add_row("rows in RAM", f"{statistics.mirrored_rows:,}")
    table.add_row("rows in the hot cache", f"{statistics.hot_rows:,}")
    table.add_row("rows in the ring", f"{statistics.ring_rows:,}")
    table.add_row("hit rate", f"{statistics.hits / reads:.2%} of {reads:,} reads" if reads else "no reads")
    table.add_row("RAM", bytes_text(statistics.host_bytes))
    table.add_row("device", bytes_text(statistics.device_bytes))
    table.add_row("device, if resident", bytes_text(statistics.resident_bytes))
    return table
