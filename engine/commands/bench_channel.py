"""`forebay bench channel`: what a channel between two nodes takes beside a bare connection and, where it is installed, iperf3.

The table goes to standard output. Exit code: 0.
"""

import argparse
import sys
from contextlib import nullcontext

import uvloop
from rich.console import Console

from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, count_of, json_target, results
from engine.gate import write_json
from engine.gate.machine import machine
from engine.settings import add_flags

__all__ = ["COMMAND"]

_ROUNDS, _FRAMES, _TURNS = 12, 200, 500


def configure(parser: argparse.ArgumentParser) -> None:
    """How much and how often."""
    parser.add_argument("--rounds", metavar="N", help=f"times every arm is measured ({_ROUNDS})")
    parser.add_argument("--frames", metavar="N", help=f"frames of 64 rows of 12 KiB a round ({_FRAMES})")
    parser.add_argument("--turns", metavar="N", help=f"turns of 12 KiB there and back a round ({_TURNS})")
    parser.add_argument("--namespaces", action="store_true", help="between two network namespaces in place of loopback; needs root")
    add_json(parser)
    add_flags(parser, ("log_format",))


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting."""
    target, options = json_target(invocation.options), invocation.options
    rounds, frames, turns = (count_of(options, name) for name in ("rounds", "frames", "turns"))
    from engine.bench.channel import as_json, measure_channel, table
    from engine.bench.two_hosts import two_hosts

    bars = Bars("bench.running", Console(file=sys.stderr))
    counts = (_ROUNDS if rounds is None else rounds, _FRAMES if frames is None else frames, _TURNS if turns is None else turns)
    try:
        with two_hosts() if options.get("namespaces") else nullcontext() as hosts:
            found = uvloop.run(measure_channel(*counts, bars, hosts=hosts))
    finally:
        bars.close()
    if target is not None:
        write_json(target, as_json(found, machine(probe=False), namespaces=hosts is not None))
    results().print(table(found))
    return 0


COMMAND = Command("channel", "a channel between two nodes beside a bare connection and iperf3", configure, run)
