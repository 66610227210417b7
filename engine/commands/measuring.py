"""What commands that measure share: counts as flags, where the JSON goes, bars, and how a table is printed."""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from engine.commands.display import Bar
from engine.config import HOT_ROWS
from engine.errors import BadSetting
from engine.gate import write_json
from engine.gate.machine import machine
from engine.settings import SETTINGS, Settings, parse_integer

__all__ = ["Bars", "add_json", "count_of", "engine_flags", "json_target", "measured", "results", "steady"]

_Found = TypeVar("_Found")
_PLAIN_WIDTH = 160  # where there is no terminal to ask


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`."""
    parser.add_argument("--json", dest="json", metavar="FILE", help="write everything there")


def engine_flags(*without: str) -> Iterable[str]:
    """Names of the engine's settings, some left out; what is measured is never on tape."""
    return (name for name, setting in SETTINGS.items() if setting.place == "engine" and name not in ("tape", *without))


def steady(settings: Settings) -> Settings:
    """Settings as they are measured: hot caches of the usual size, where a server's would take what memory is to spare."""
    return replace(settings, engine=replace(settings.engine, hot_rows=settings.engine.hot_rows or HOT_ROWS))


def count_of(options: Mapping[str, object], name: str) -> int | None:
    """An option as a number; None where it was not given. Raises BadSetting naming the flag."""
    text = options.get(name)
    try:
        return None if text is None else parse_integer(str(text))
    except ValueError as error:
        raise BadSetting(f"--{name.replace('_', '-')} must be {error}, not {text!r}") from None


def json_target(options: Mapping[str, object]) -> Path | None:
    """Where the JSON goes; refused before hours of measuring, not after."""
    name = options.get("json")
    if name is None:
        return None
    path = Path(str(name))
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadSetting(f"--json: cannot write {path}")
    return path


def results() -> Console:
    """Standard output, wide where nobody looks."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


async def measured(
    measure: Callable[["Bars"], Awaitable[_Found]], as_json: Callable[[_Found, Mapping[str, Any]], Any], target: Path | None, *, probe: bool
) -> _Found:
    """Measure under a bar and write the JSON, if one is asked for.

    Args: as_json: what is found and the machine's facts, as JSON. probe: whether the machine's device is asked too.
    """
    bars = Bars("bench.running", Console(file=sys.stderr))
    try:
        found = await measure(bars)
    finally:
        bars.close()
    if target is not None:
        write_json(target, as_json(found, await asyncio.to_thread(machine, probe=probe)))
    return found


class Bars:
    """One bar after another, by title; the event is what it is called in a log."""

    def __init__(self, event: str, console: Console) -> None:
        self._event = event
        self._console = console
        self._title = ""
        self._bar: Bar | None = None

    def __call__(self, title: str, done: int, total: int) -> None:
        """`done` of `total` tokens of what the title says."""
        if title != self._title or self._bar is None:
            self.close()
            self._title, self._bar = title, Bar(title, self._event, "tokens", self._console)
        self._bar.update(done, total)
        if 0 < total <= done:
            self._bar.close()

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.close()
