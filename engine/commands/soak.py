"""`forebay soak`: conversations come and go for minutes, with aborts, forks, archives and faults; then nothing may be left or lost.

Over a tiny model that it makes itself, on the CPU. Exit code: 0, or 1 if anything was wrong, which it says.
"""

import argparse
import asyncio
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from engine.commands.command import Command, Invocation
from engine.commands.display import Bar
from engine.commands.measuring import count_of, json_target, results
from engine.errors import BadSetting

__all__ = ["COMMAND"]

_MINUTES = 5.0
_RUNNING = "soak.running"


def configure(parser: argparse.ArgumentParser) -> None:
    """How long, from which seed, and where the counts go."""
    parser.add_argument("--minutes", metavar="N", help=f"how long conversations begin ({_MINUTES:g})")
    parser.add_argument("--seed", metavar="N", help="of what clients do and which operations fail (0)")
    parser.add_argument("--json", metavar="FILE", help="write what happened to this file")


def _minutes(text: object) -> float:
    try:
        minutes = float(str(text))
    except ValueError:
        minutes = -1.0
    if not 0 < minutes <= 24 * 60:
        raise BadSetting(f"--minutes must be a number above 0 and at most 1440, not {text!r}")
    return minutes


def _only_progress(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What the engine logs of thousands of archives, and of failures that were planned, is not for the reader of a soak."""
    if event.get("event") != _RUNNING:
        raise structlog.DropEvent
    return event


def run(invocation: Invocation) -> int:
    """Returns 0 or 1. Raises BadSetting."""
    options = invocation.options
    minutes = _MINUTES if options.get("minutes") is None else _minutes(options["minutes"])
    seed, target = count_of(options, "seed"), json_target(options)
    from engine.gate import write_json
    from engine.gate.machine import machine
    from engine.search.soak import SoakPlan, SoakResult, run_soak

    plan, logged = SoakPlan(60 * minutes, seed or 0), structlog.get_config()["processors"]
    structlog.configure(processors=[_only_progress, *logged])
    try:
        with Bar("soaking", _RUNNING, "seconds", Console(file=sys.stderr)) as bar:

            def progress(seconds: float, result: SoakResult) -> None:
                bar.update(int(seconds), int(plan.seconds))

            found = asyncio.run(run_soak(plan, progress))
    finally:
        structlog.configure(processors=logged)
    table = Table("what", "how often", box=None)
    for kind, count in sorted(found.counts.items()):
        table.add_row(kind, f"{count:,}")
    results().print(table)
    for line in found.wrong:
        results().print(f"wrong: {line}", markup=False)
    if target is not None:
        write_json(target, {**found.as_json(), "machine": machine(probe=False)})
    return 1 if found.wrong else 0


COMMAND = Command(
    "soak", "conversations come and go for minutes with everything happening to them; nothing is left or lost", configure, run
)
