"""`forebay bench round`: one round of the hot cache on the device, plan, gather and attention, at several shares of misses.

The table goes to standard output, progress to standard error. Exit code: 0 all outputs right, 1 one was wrong, 2 no device or a bad line.
"""

import argparse
import sys

from rich.console import Console

from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, json_target, results
from engine.errors import BadSetting, shown
from engine.gate import write_json
from engine.gate.machine import machine

__all__ = ["COMMAND"]


def configure(parser: argparse.ArgumentParser) -> None:
    """What to time."""
    parser.add_argument(
        "--misses", metavar="LIST", default="0,0.01,0.05,0.1,1", help="shares of a selection that no slot holds (0,0.01,0.05,0.1,1)"
    )
    parser.add_argument("--places", metavar="LIST", default="1,16", help="sessions in a round (1,16)")
    add_json(parser)


def _numbers(text: object, flag: str, least: float, most: float) -> list[float]:
    try:
        found = [float(part) for part in str(text).split(",")]
    except ValueError:
        raise BadSetting(f"{flag} must be numbers separated by commas, not {shown(text)}") from None
    if not all(least <= number <= most for number in found):
        raise BadSetting(f"{flag} must lie between {least:g} and {most:g}, not {shown(text)}")
    return found


def run(invocation: Invocation) -> int:
    """Returns 0 when every output is right, else 1. Raises BadSetting."""
    options = invocation.options
    target = json_target(options)
    shares = _numbers(options["misses"], "--misses", 0.0, 1.0)
    places = [int(number) for number in _numbers(options["places"], "--places", 1, 64)]
    from engine.bench import round as rounds
    from engine.bench.kernels import needs_device
    from engine.bench.timing import GraphTimer

    device, bars = needs_device(), Bars("bench.running", Console(file=sys.stderr))
    shapes = rounds.RoundShapes()
    found = list(rounds.measure(shapes, device, GraphTimer(), places, shares, lambda done, total: bars("rounds", done, total)))
    bars.close()
    results().print(rounds.table(found))
    if target is not None:
        write_json(target, rounds.as_json(found, shapes, machine(probe=True)))
    return 1 if any(one.wrong for one in found) else 0


COMMAND = Command("round", "one round of the hot cache: plan, gather and attention by the plan; needs a device", configure, run)
