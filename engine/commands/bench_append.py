"""`forebay bench append`: a large append in both placements, in this process.

The table goes to standard output, all else to standard error. Exit code: 0 all outputs equal, 1 they differ, 2 a bad command line.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.text import Text

from engine.commands.bench_decode import add_model, placements_of
from engine.commands.command import Command, Invocation
from engine.commands.measuring import count_of, json_target, measured, results
from engine.errors import BadSetting
from engine.gate import parse_history
from engine.settings import parse_integer

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.bench.append import AppendPlan, Appends

__all__ = ["COMMAND"]

_APPEND, _WARMUP, _NEW = 9_854, 16, 256


def configure(parser: argparse.ArgumentParser) -> None:
    """What is in front of the append, how long it is, and in which order the arms run."""
    add_model(parser)
    parser.add_argument("--history", metavar="ROWS", help="rows in front: a number, which are read first, or synthetic:SEED:ROWS")
    parser.add_argument("--append", dest="append", metavar="N", help=f"seeded ids that are appended ({_APPEND})")
    parser.add_argument("--warmup-tokens", dest="warmup_tokens", metavar="N", help=f"first tokens behind it, not timed ({_WARMUP})")
    parser.add_argument("--new-tokens", dest="new_tokens", metavar="N", help=f"timed tokens behind them ({_NEW})")
    parser.add_argument("--rehearsals", metavar="N", help="times the whole is run before it is measured, in the same engine (1)")
    parser.add_argument(
        "--placements", metavar="LIST", default="resident,offload,offload,resident", help="arms in order (A B B A, A resident)"
    )


def _plan(invocation: Invocation) -> "AppendPlan":
    options = invocation.options
    counts = {name: count_of(options, name) for name in ("append", "warmup_tokens", "new_tokens", "rehearsals")}
    if counts["append"] is not None and counts["append"] < 1:
        raise BadSetting(f"--append must be at least 1, not {counts['append']}")
    model, text = invocation.settings.model_directory(), str(options.get("history") or "0")
    from engine.bench.append import AppendPlan
    from engine.bench.arm import Load

    load = Load(
        model=model, prompt_tokens=counts["append"] or _APPEND, probe_tokens=0,
        warmup_tokens=_WARMUP if counts["warmup_tokens"] is None else counts["warmup_tokens"],
        new_tokens=_NEW if counts["new_tokens"] is None else counts["new_tokens"],
    )  # fmt: skip
    rows = 0
    try:
        rows = parse_integer(text)
    except ValueError:
        load = dataclasses.replace(load, history=parse_history(text))
    rehearsals = 1 if counts["rehearsals"] is None else counts["rehearsals"]
    return AppendPlan(load, invocation.settings.engine, rows, placements_of(options), rehearsals)


async def _measure(plan: "AppendPlan", target: Path | None) -> "Appends":
    from engine.bench.append import as_json, run_appends

    return await measured(partial(run_appends, plan), partial(as_json, plan), target, probe=plan.engine.device != "cpu")


def run(invocation: Invocation) -> int:
    """Returns 0 when all outputs are equal, else 1. Raises ForebayError."""
    target, plan = json_target(invocation.options), _plan(invocation)
    from engine.bench.append import table
    from engine.bench.decode import first_difference

    found = uvloop.run(_measure(plan, target))
    console = results()
    console.print(table(plan, found))
    if not found.equal:
        console.print(Text(f"OUTPUTS DIFFER, so nothing is said of speed: {first_difference(found.arms)}", style="bold red"))
        return 1
    ratio, loss = found.first_token_ratio(), found.decode_loss()
    said = ["all outputs equal"]
    if ratio is not None and loss is not None:
        said.append(f"time to the first token, offload over resident: {ratio:.4f}; decode loss behind it {loss:.3%}")
    console.print(Text("; ".join(said)))
    return 0


COMMAND = Command("append", "a large append, resident and offload: first token, decoding behind it, device memory", configure, run)
