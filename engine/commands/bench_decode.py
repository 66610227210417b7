"""`forebay bench decode`: decode steps in both placements, in this process.

The table goes to standard output, all else to standard error. Exit code: 0 all outputs equal, 1 they differ, 2 a bad command line.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.text import Text

from engine.commands.command import Command, Invocation
from engine.commands.measuring import add_json, count_of, engine_flags, json_target, measured, results
from engine.commands.run import read_prompt
from engine.config import DRAFT_DEPTH_MAX
from engine.errors import BadSetting
from engine.gate import parse_history
from engine.settings import SETTINGS, add_flags

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.bench.arm import Load
    from engine.bench.decode import Comparison, DecodePlan

__all__ = ["COMMAND", "add_model", "placements_of"]

_COUNTS = ("prompt_tokens", "warmup_tokens", "new_tokens", "probe_tokens")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, the engine's settings but its placement, and where the JSON goes."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    add_json(parser)
    add_flags(parser, engine_flags("placement"))
    add_flags(parser, ("demo", "log_format"))


def placements_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """`--placements` as a list, not checked."""
    return tuple(name.strip() for name in str(options["placements"]).split(",") if name.strip())


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, what is generated, and in which order the arms run."""
    add_model(parser)
    parser.add_argument("--history", metavar="synthetic:SEED:ROWS", help="made-up rows before the prompt")
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help="seeded ids that are really read (64)")
    parser.add_argument("--prompt-file", dest="prompt_file", metavar="FILE", help="a text to read in place of seeded ids")
    parser.add_argument("--warmup-tokens", dest="warmup_tokens", metavar="N", help="first tokens of the answer, not timed (16)")
    parser.add_argument("--new-tokens", dest="new_tokens", metavar="N", help="timed tokens behind them (256)")
    parser.add_argument("--probe-tokens", dest="probe_tokens", metavar="N", help="watched tokens behind those (64); 0: nothing is watched")
    parser.add_argument(
        "--placements", metavar="LIST", default="resident,offload", help="arms in order; one may come twice (resident,offload)"
    )
    parser.add_argument(
        "--draft-depths", dest="draft_depths", metavar="LIST", help="run all arms at each of these depths (what --draft-depth says)"
    )


def _load(invocation: Invocation) -> "Load":
    """What every arm runs. Raises BadSetting."""
    options = invocation.options
    given: dict[str, Any] = {name: count for name in _COUNTS if (count := count_of(options, name)) is not None}
    if options.get("history") is not None:
        given["history"] = parse_history(str(options["history"]))
    if options.get("prompt_file") is not None:
        if "prompt_tokens" in given:
            raise BadSetting("--prompt-file and --prompt-tokens exclude each other; give one")
        given["prompt_text"] = read_prompt(str(options["prompt_file"]))
    model = invocation.settings.model_directory()
    from engine.bench.arm import Load

    return Load(model=model, **given)


def _depths(invocation: Invocation) -> tuple[int | None, ...]:
    """`--draft-depths`, else the one depth of the settings. Raises BadSetting."""
    given = invocation.options.get("draft_depths")
    if given is None:
        return (invocation.settings.engine.draft_depth,)
    names = [one.strip() for one in str(given).split(",")]
    if not all(name.isdecimal() and int(name) <= DRAFT_DEPTH_MAX for name in names):
        raise BadSetting(f"--draft-depths must be a list of numbers from 0 to {DRAFT_DEPTH_MAX} with commas between, not {given!r}")
    depths = tuple(map(int, names))
    if len(set(depths)) < len(depths):
        raise BadSetting(f"--draft-depths {given} names a depth twice; give each once, and an arm that is to run twice in --placements")
    return depths


async def _measure(plan: "DecodePlan", target: Path | None) -> "Comparison":
    from engine.bench.decode import as_json, compare

    return await measured(partial(compare, plan), partial(as_json, plan), target, probe=plan.engine.device != "cpu")


def run(invocation: Invocation) -> int:
    """Returns 0 when all outputs are equal, else 1. Raises ForebayError."""
    target, depths, load = json_target(invocation.options), _depths(invocation), _load(invocation)
    from engine.bench.decode import DecodePlan, added_us, first_difference, table

    plan = DecodePlan(load, invocation.settings.engine, placements_of(invocation.options), depths)
    found = uvloop.run(_measure(plan, target))
    console = results()
    console.print(table(found))
    if not found.equal:
        console.print(Text(f"OUTPUTS DIFFER, so nothing is said of speed: {first_difference(found.arms)}", style="bold red"))
        return 1
    added = added_us(found.arms)
    said = ["all outputs equal"]
    if found.absolute:
        said.append(f"copy bandwidth {found.bandwidth / 1e12:.2f} TB/s")
        said += [] if added is None else [f"offload adds {added:+.1f} us a step"]
    else:
        said.append("ratios only: absolute times need a device")
    console.print(Text("; ".join(said)))
    return 0


COMMAND = Command("decode", "decode steps, resident and offload, against the bytes they must read", configure, run)
