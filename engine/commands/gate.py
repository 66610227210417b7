"""`forebay gate`: offload against resident over the real server, pair by pair.

The table goes to standard output, all else to standard error. Exit code: 0 every pair passes, 1 outputs differ or a pair is over its limit
or was not measured, 2 a bad command line; a server that does not come up gives its own code (3 bad model, 4 does not fit).
"""

import argparse
import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.text import Text

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, count_of, engine_flags, json_target, results, steady
from engine.errors import BadSetting
from engine.gate import Outcome, Plan, Runs, all_pass, modes_as_json, outcome, parse_history, table, write_json
from engine.gate.machine import machine
from engine.gate.process import serve_words, server_process
from engine.gate.prompt import PromptIds
from engine.gate.verdict import Arm
from engine.settings import SETTINGS, add_flags, parse_decimal, parse_depth

__all__ = ["COMMAND"]

_COUNTS = ("prompt_tokens", "new_tokens", "pairs", "null_pairs", "warmup_tokens")


def configure(parser: argparse.ArgumentParser) -> None:
    """What to measure, and the engine's settings but its placement."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    parser.add_argument("--prompt-file", dest="prompt_file", metavar="FILE", help="text, or a JSON list of token ids")
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help="without a file: tokens of library source (50023)")
    parser.add_argument("--new-tokens", dest="new_tokens", metavar="N", help="tokens of each answer (1024)")
    parser.add_argument("--pairs", metavar="N", help="resident/offload pairs (3)")
    parser.add_argument("--null-pairs", dest="null_pairs", metavar="N", help="resident/resident pairs between them (one less than pairs)")
    parser.add_argument("--limit", metavar="PERCENT", help="loss a pair may have; the null spread if that is larger (0.15)")
    parser.add_argument("--warmup-tokens", dest="warmup_tokens", metavar="N", help="tokens of an answer before the measured one (8)")
    parser.add_argument("--draft-depth", dest="draft_depths", metavar="D[,D]", help="auto or 0 to 7, several one after another (0)")
    parser.add_argument("--history", metavar="synthetic:SEED:ROWS", help="made-up rows before the prompt")
    parser.add_argument("--together", action="store_true", help="start a pair's two servers at once: quicker, but both must fit the device")
    add_json(parser)
    add_flags(parser, engine_flags("placement", "draft_depth"))
    add_flags(parser, ("demo", "log_format"))


def _plan(invocation: Invocation) -> Plan:
    options, settings = invocation.options, steady(invocation.settings)
    settings.model_directory()  # a model must be named
    given: dict[str, Any] = {}
    for name in _COUNTS:
        if (count := count_of(options, name)) is not None:
            given[name] = count
    if options.get("limit") is not None:
        try:
            given["limit"] = parse_decimal(str(options["limit"]).removesuffix("%")) / 100
        except ValueError as error:
            raise BadSetting(f"--limit must be {error} of percent, not {options['limit']!r}") from None
    if options.get("prompt_file") is not None:
        if "prompt_tokens" in given:
            raise BadSetting("--prompt-file and --prompt-tokens exclude each other; give one")
        given["prompt_file"] = Path(str(options["prompt_file"]))
    if options.get("history") is not None:
        given["history"] = parse_history(str(options["history"]))
    given["together"] = bool(options.get("together"))
    given.setdefault("null_pairs", max(0, given.get("pairs", 3) - 1))
    return Plan(engine=settings.engine, model=None if settings.demo else settings.model, **given)


def _modes(plan: Plan, depths: object) -> list[Plan]:
    """The plan at each depth of drafts. Raises BadSetting."""
    if depths is None:
        return [plan]
    try:
        parsed = [parse_depth(text.strip()) for text in str(depths).split(",")]
    except ValueError as error:
        raise BadSetting(f"--draft-depth must be {error}, or several separated by commas, not {depths!r}") from None
    if len(set(parsed)) != len(parsed):
        raise BadSetting(f"--draft-depth names a depth twice: {depths!r}")
    return [replace(plan, engine=replace(plan.engine, draft_depth=depth)) for depth in parsed]


async def _gate(modes: list[Plan], target: Path | None, console: Console) -> list[tuple[Plan, Outcome]]:
    found = []
    for plan in modes:
        found.append((plan, *await _mode(plan, console)))
        if target is not None:  # after each depth: an hour's measuring is not lost with the next one
            facts = await asyncio.to_thread(machine, probe=plan.engine.device != "cpu")
            write_json(target, modes_as_json(found, facts))
    return [(plan, judged) for plan, _, judged in found]


async def _mode(plan: Plan, console: Console) -> tuple[PromptIds | None, Outcome]:
    """All pairs of one depth."""

    def start(arm: Arm) -> AbstractAsyncContextManager[str]:
        return server_process(serve_words(plan, arm))

    bars = Bars("gate.running", console)
    runs = Runs(plan, start, bars)
    try:
        pairs = await runs.all()
    finally:
        bars.close()
    return runs.prompt, outcome(plan, pairs)


def _print(found: Outcome, plan: Plan, console: Console) -> None:
    console.print(table(found, plan))
    spread = "no null pair" if found.null_spread is None else f"null spread {found.null_spread:.3%}"
    equal = "all outputs equal" if found.outputs_equal else "OUTPUTS NOT ALL EQUAL"
    verdict = Text("pass" if found.passes else "FAIL", style="green" if found.passes else "bold red")
    console.print(Text(f"{equal}; {spread}; limit {plan.limit:.3%}: ").append(verdict))


def run(invocation: Invocation) -> int:
    """Returns 0 when every pair of every depth passes, else 1. Raises BadSetting, ServerFailed."""
    modes, target = _modes(_plan(invocation), invocation.options.get("draft_depths")), json_target(invocation.options)
    logs.configure(invocation.settings.server.log_format)
    found = uvloop.run(_gate(modes, target, Console(file=sys.stderr)))
    console = results()
    for plan, judged in found:
        _print(judged, plan, console)
    passes = all_pass(found)
    if not passes and all(judged.passes for _, judged in found):
        console.print(Text("OUTPUTS DIFFER BETWEEN DEPTHS OF DRAFTS: FAIL", style="bold red"))
    return 0 if passes else 1


COMMAND = Command("gate", "offload against resident over the real server: equal outputs first, then speed", configure, run)
