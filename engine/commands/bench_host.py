"""`forebay bench host`: how soon the loop goes on after the device's work has ended, and the device's copy bandwidth.

The table goes to standard output. Exit code: 0, or 2 where there is no device.
"""

import argparse
import sys

import uvloop
from rich.console import Console

from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, count_of, json_target, results
from engine.gate import write_json
from engine.gate.machine import machine
from engine.settings import add_flags

__all__ = ["COMMAND"]

_TURNS = 300


def configure(parser: argparse.ArgumentParser) -> None:
    """How often."""
    parser.add_argument("--turns", metavar="N", help=f"times the loop is woken ({_TURNS})")
    add_json(parser)
    add_flags(parser, ("device", "log_format"))


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting: there is no device."""
    target, turns = json_target(invocation.options), count_of(invocation.options, "turns")
    from engine.bench.host import as_json, measure_host, table

    config = invocation.settings.engine
    bars = Bars("bench.running", Console(file=sys.stderr))
    try:
        found = uvloop.run(measure_host(config, _TURNS if turns is None else turns, bars))
    finally:
        bars.close()
    if target is not None:
        write_json(target, as_json(config, found, machine(probe=True)))
    results().print(table(found))
    return 0


COMMAND = Command("host", "how soon the loop goes on after the device's work has ended; copy bandwidth", configure, run)
