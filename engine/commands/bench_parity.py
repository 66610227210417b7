"""`forebay bench parity`: this engine beside transformers, on the same weights and device.

The table goes to standard output, all else to standard error. Exit code: 0 both answered, 1 transformers answered with neither cache,
2 a bad command line or no transformers.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from engine.commands.bench_decode import add_model, placements_of
from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, count_of, json_target, results
from engine.gate import write_json
from engine.gate.machine import machine

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.bench.parity import Parity, ParityPlan

__all__ = ["COMMAND"]

_PROMPT, _WARMUP, _NEW = 2_000, 16, 128


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, what is answered, and the engine's arms."""
    add_model(parser)
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help=f"seeded ids that both read ({_PROMPT})")
    parser.add_argument("--warmup-tokens", dest="warmup_tokens", metavar="N", help=f"first tokens of an answer, not timed ({_WARMUP})")
    parser.add_argument("--new-tokens", dest="new_tokens", metavar="N", help=f"timed tokens behind them ({_NEW})")
    parser.add_argument("--placements", metavar="LIST", default="offload", help="the engine's arms (offload)")


def _plan(invocation: Invocation) -> "ParityPlan":
    defaults = {"prompt_tokens": _PROMPT, "warmup_tokens": _WARMUP, "new_tokens": _NEW}
    counts = {name: default if (count := count_of(invocation.options, name)) is None else count for name, default in defaults.items()}
    model = invocation.settings.model_directory()
    from engine.bench.arm import Load
    from engine.bench.parity import ParityPlan

    load = Load(
        model=model, probe_tokens=0, prompt_tokens=counts["prompt_tokens"], warmup_tokens=counts["warmup_tokens"],
        new_tokens=counts["new_tokens"],
    )  # fmt: skip
    return ParityPlan(load, invocation.settings.engine, placements_of(invocation.options))


def _measure(plan: "ParityPlan", target: Path | None) -> "Parity":
    from engine.bench.parity import Parity, as_json, run_ours, run_theirs
    from engine.device import device_of

    bars = Bars("bench.running", Console(file=sys.stderr))
    try:
        theirs = run_theirs(plan, bars)
        found = Parity(theirs, uvloop.run(run_ours(plan, bars)), device_of(plan.engine))
    finally:
        bars.close()
    if target is not None:
        write_json(target, as_json(plan, found, machine(probe=plan.engine.device != "cpu")))
    return found


def run(invocation: Invocation) -> int:
    """Returns 0 when there is something to compare, else 1. Raises ForebayError."""
    target, plan = json_target(invocation.options), _plan(invocation)
    from engine.bench.parity import table

    found = _measure(plan, target)
    console = results()
    console.print(table(found))
    if found.device.type == "cpu":
        console.print("ratios only: absolute times need a device")
    return 0 if any(not one.error for one in found.theirs) else 1


COMMAND = Command("parity", "tokens and speed beside transformers on the same weights and device", configure, run)
