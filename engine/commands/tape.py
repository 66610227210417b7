"""`forebay tape`: recorded runs, and the search for orders of events that break something.

`tape_runs.py` records and replays, `tape_files.py` exports and compares; the search is here.
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import structlog
from rich.console import Console

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.display import Bar
from engine.commands.tape_files import add_diff, add_export, run_diff, run_export
from engine.commands.tape_runs import add_record, add_replay, run_record, run_replay
from engine.errors import BadSetting
from engine.settings import nearest, parse_integer

__all__ = ["COMMAND"]

log = structlog.get_logger()
_SEEDS = 200


def configure(parser: argparse.ArgumentParser) -> None:
    """One subcommand each for what can be done."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = actions.add_parser("record", help="one generation on the CPU, with every event on a tape", allow_abbrev=False)
    add_record(record)
    replay = actions.add_parser("replay", help="the same in the tape's order; exit 1 unless the tokens are equal", allow_abbrev=False)
    add_replay(replay)
    export = actions.add_parser("export", help="a tape as a Chrome trace, for Perfetto, or as a picture", allow_abbrev=False)
    add_export(export)
    diff = actions.add_parser("diff", help="name the first event where two tapes part; exit 1 if they do", allow_abbrev=False)
    add_diff(diff)
    search = actions.add_parser(
        "search", help="run scenarios under many seeds; exit 1 and the smallest failing seed's tape on a finding", allow_abbrev=False
    )
    search.add_argument("--seeds", metavar="N", help=f"how many (default: {_SEEDS})")
    search.add_argument("--seed", metavar="N", help="run this one alone, as it would be among the others")
    search.add_argument("--scenario", metavar="NAME", action="append", help="only this one; may be given more than once")
    search.add_argument("--out", metavar="DIR", default=".", help="where a failing seed's tape goes (default: here)")
    search.add_argument("--list", dest="list_scenarios", action="store_true", help="print the names of the scenarios and end")


def _search(invocation: Invocation) -> int:
    """Returns 1 when a seed fails, else 0."""
    # Imported here: torch takes seconds to import, and no other action needs the scenarios.
    from engine.search.hunt import SCENARIOS, hunt, record, single

    options, console = invocation.options, Console(file=sys.stderr, highlight=False)
    known = [scenario.name for scenario in SCENARIOS]
    if options.get("list_scenarios"):
        print("\n".join(known))
        return 0
    asked = options.get("scenario")
    names = [str(name) for name in asked] if isinstance(asked, list) else []
    for name in names:
        if name not in known:
            raise BadSetting(f"--scenario: no scenario {name!r}{nearest(name, known)}; --list names them")
    directory = Path(str(options["out"]))
    if not directory.is_dir():
        raise BadSetting(f"--out: {directory} is not a directory")
    seeds, seed = _count(options, "seeds", 1), _count(options, "seed", 0)
    if seed is not None and seeds is not None:
        raise BadSetting("--seed runs one, --seeds many: give one of them")
    if seed is not None:
        outcome = single(seed, names)
    else:
        with Bar("searching", "search.running", "seeds", console) as bar:
            outcome = hunt(seeds or _SEEDS, names, progress=bar.update)
    many = "" if outcome.seeds == 1 else "s"
    width = max(map(len, outcome.seeds_of), default=0)
    for name, count in outcome.seeds_of.items():
        console.print(f"{name:{width}} {count:6,}", markup=False)
    speed = f"{outcome.seeds:,} seed{many} in {outcome.seconds:.0f} s, {outcome.seeds / outcome.seconds:.1f} seeds/s"
    if outcome.finding is None:
        console.print(f"{speed}: nothing found")
        return 0
    path = directory / f"{outcome.finding.scenario.replace(' ', '-')}-{outcome.finding.seed}.tape"
    tell = partial(console.print, markup=False, soft_wrap=True)  # soft: a line to be copied stays one
    tell(f"{speed}: found\n{outcome.finding}")
    try:
        again = record(outcome.finding, path)
        if again != outcome.finding:
            tell(f"run again in a fresh process: {again or 'nothing found'}")
        tell(f"tape: {path}")
    except OSError as error:  # the finding is worth no less without
        tell(f"no tape: cannot write {path}: {error.strerror or error}")
    tell(f"again: forebay tape search --scenario '{outcome.finding.scenario}' --seed {outcome.finding.seed}")
    return 1


def _count(options: Mapping[str, object], name: str, least: int) -> int | None:
    text = options.get(name)
    try:
        count = None if text is None else parse_integer(str(text))
    except ValueError as error:
        raise BadSetting(f"--{name} must be {error}, not {text!r}") from None
    if count is not None and count < least:
        raise BadSetting(f"--{name} must be at least {least}, not {count}")
    return count


_ACTIONS = {"record": run_record, "replay": run_replay, "export": run_export, "diff": run_diff, "search": _search}


def run(invocation: Invocation) -> int:
    """Returns the action's exit code. Raises ForebayError."""
    logs.configure(invocation.settings.server.log_format)
    return _ACTIONS[str(invocation.options["action"])](invocation)


COMMAND = Command("tape", "record, replay, export and compare runs; search for orders of events that break something", configure, run)
