"""`forebay bench kernels`: single operations at the model's true shapes, checked, then timed on the device.

The table goes to standard output, progress to standard error. Exit code: 0 all outputs right, 1 one was wrong, 2 no device or a bad line.
"""

import argparse
import os
import sys
from typing import Any

from rich.console import Console

from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, count_of, json_target, results
from engine.errors import BadSetting
from engine.gate import write_json
from engine.gate.machine import machine

__all__ = ["COMMAND"]


def configure(parser: argparse.ArgumentParser) -> None:
    """What to time."""
    parser.add_argument("--only", metavar="WORDS", help="cases whose name holds one of these words, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="try tilings at every weight's shape instead; the constants are chosen by it")
    parser.add_argument("--processes", metavar="N", help="processes that compile ahead (0: none; as many as processors, at most 16)")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Returns 0 when every output is right, else 1. Raises BadSetting."""
    options = invocation.options
    target, processes = json_target(options), count_of(options, "processes")
    if processes is not None and processes < 0:
        raise BadSetting(f"--processes must not be negative, not {processes}")
    ahead = min(16, os.cpu_count() or 1) if processes is None else processes
    from engine.bench import constants, kernels, sweep
    from engine.bench.cases import TRUE
    from engine.bench.floor import copy_bandwidth
    from engine.bench.timing import GraphTimer

    device = kernels.needs_device()
    only = None if options.get("sweep") else options.get("only")
    words = [word.strip() for word in str(options.get("only") or "").split(",")]
    cases = kernels.chosen(kernels.all_cases(TRUE), only)  # type: ignore[arg-type]  # argparse gives a string or None
    if ahead and (options.get("sweep") or options.get("only") is None):
        sweep.compile_ahead(ahead, "sweep" if options.get("sweep") else "cases", words)
    timer, console, bars = GraphTimer(), results(), Bars("bench.running", Console(file=sys.stderr))
    bandwidth, launch = copy_bandwidth(device), kernels.launch_us(device, timer)
    written: dict[str, Any]
    if options.get("sweep"):
        swept = list(sweep.sweep(sweep.named(sweep.trials(TRUE), words), device, timer, lambda done, total: bars("tilings", done, total)))
        tried = list(
            constants.try_settings(sweep.named_settings(words), cases, device, timer, lambda done, total: bars("settings", done, total))
        )
        console.print(sweep.table(swept))
        console.print(constants.table(tried))
        console.print("\n".join(sweep.constants(swept)), soft_wrap=True)
        right = any(one.microseconds for one in swept) or any(one.microseconds for one in tried)
        written = {
            "version": 1, "kind": "sweep", "machine": machine(probe=True), "trials": sweep.as_json(swept),
            "constants": sweep.constants(swept), "settings": constants.as_json(tried),
        }  # fmt: skip
    else:
        found = list(kernels.measure(cases, device, timer, lambda done, total: bars("kernels", done, total)))
        console.print(kernels.table(found, bandwidth, launch))
        right = all(one.equal for one in found)
        written = kernels.as_json(found, bandwidth, launch, machine(probe=True))
    bars.close()
    if target is not None:
        write_json(target, written)
    return 0 if right else 1


COMMAND = Command("kernels", "single operations at true shapes against bytes and copy bandwidth; needs a device", configure, run)
