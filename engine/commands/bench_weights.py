"""`forebay bench weights`: what rounding the packaged model's weights costs in held-out loss and in the likeliest token.

The table goes to standard output. Exit code: 0, 2 a bad command line.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, count_of, json_target, results
from engine.errors import BadSetting
from engine.gate import write_json
from engine.gate.machine import machine

__all__ = ["COMMAND"]

_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
_ROWS, _TOKENS = 4, 2048


def configure(parser: argparse.ArgumentParser) -> None:
    """How much text."""
    parser.add_argument("--rows", metavar="N", help=f"rows of held-out text ({_ROWS})")
    parser.add_argument("--tokens", metavar="N", help=f"tokens of a row ({_TOKENS})")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting."""
    options, target = invocation.options, json_target(invocation.options)
    asked = count_of(options, "rows"), count_of(options, "tokens")
    rows, tokens = (usual if given is None else given for given, usual in zip(asked, (_ROWS, _TOKENS), strict=True))
    if rows < 1 or not 2 <= tokens <= 16_384:
        raise BadSetting(f"--rows must be at least 1 and --tokens from 2 to 16384, not {rows} and {tokens}")
    from engine.bench.weights import as_json, judge, table

    bars = Bars("bench.running", Console(file=sys.stderr))
    try:
        found = judge(_MODEL, rows, tokens, bars)
    finally:
        bars.close()
    if target is not None:
        write_json(target, as_json(found, _MODEL, tokens, machine(probe=False)))
    results().print(table(found))
    return 0


COMMAND = Command("weights", "the packaged model in int4, int8 and fp8: held-out loss and agreement with bf16", configure, run)
