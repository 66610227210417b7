"""`forebay bench sessions`: many long sessions in one engine, in this process.

The table goes to standard output, all else to standard error; the JSON is written after every measured piece. SIGTERM and Ctrl-C end the
measuring as its time does: what was seen until then is told. Exit code: 0 outputs equal, everything as it is promised and all of it run,
1 not, 2 a bad command line.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console
from rich.text import Text

from engine.commands.bench_decode import placements_of
from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, add_json, count_of, engine_flags, json_target, measured, results
from engine.commands.signals import Signals
from engine.errors import BadSetting, ForebayError
from engine.gate import write_json
from engine.settings import SETTINGS, add_flags, parse_integer, parse_seconds

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.bench.many import Found, SessionsPlan, Work

__all__ = ["COMMAND"]

_COUNTS = ("prompt_tokens", "new_tokens", "warmup_tokens", "alone_tokens", "usual_tokens", "append_after")


def configure(parser: argparse.ArgumentParser) -> None:
    """What is measured, of how many sessions of which length."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    parser.add_argument("--part", metavar="decode|resident|footprint|gap", default="decode", help="what is measured (decode)")
    parser.add_argument("--sessions", metavar="LIST", help="sessions at once, a run each (1,2,4,8,16); resident: one number (10)")
    parser.add_argument("--rows", metavar="LIST", help="rows in front of the new tokens (all that fit; resident and gap 50000)")
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help="of these rows, seeded ids that are really read (64)")
    parser.add_argument("--new-tokens", dest="new_tokens", metavar="N", help="tokens that each session generates (1024)")
    parser.add_argument("--warmup-tokens", dest="warmup_tokens", metavar="N", help="first of them, not timed (16)")
    parser.add_argument("--alone-tokens", dest="alone_tokens", metavar="N", help="first of them, compared with the session alone (64)")
    parser.add_argument(
        "--placements", metavar="LIST", default="resident,offload,offload,resident", help="arms of --part resident (A B B A, A resident)"
    )
    parser.add_argument("--append", dest="append", metavar="N", help="gap: ids that are read while a stream runs (all that fit)")
    parser.add_argument(
        "--append-after", dest="append_after", metavar="ROWS", help="gap: made-up rows that the session they are appended to has before (0)"
    )
    parser.add_argument("--usual-tokens", dest="usual_tokens", metavar="N", help="gap: tokens of the stream before that (256)")
    parser.add_argument(
        "--limit", metavar="SECONDS", help="begin nothing more after so long (480); gap: the append ends so long after it began"
    )
    add_json(parser)
    add_flags(parser, engine_flags("placement"))
    add_flags(parser, ("demo", "log_format"))


def _list(options: Mapping[str, object], name: str) -> tuple[int, ...]:
    text = options.get(name)
    try:
        return () if text is None else tuple(parse_integer(part.strip()) for part in str(text).split(","))
    except ValueError:
        raise BadSetting(f"--{name} must be a number, or several with commas between, not {text!r}") from None


def _plan(invocation: Invocation) -> "SessionsPlan":
    """Raises BadSetting."""
    options = invocation.options
    given: dict[str, Any] = {name: count for name in _COUNTS if (count := count_of(options, name)) is not None}
    append = count_of(options, "append")
    if append is not None:
        if append < 1:
            raise BadSetting(f"--append must be at least 1, not {append}")
        given["append_rows"] = append
    if options.get("limit") is not None:
        try:
            given["limit_s"] = parse_seconds(str(options["limit"]))
        except ValueError as error:
            raise BadSetting(f"--limit must be {error}, not {options['limit']!r}") from None
    given |= {name: _list(options, name) for name in ("sessions", "rows")}
    model = invocation.settings.model_directory()
    from engine.bench.many import SessionsPlan

    return SessionsPlan(
        model, invocation.settings.engine, part=options["part"], placements=placements_of(options), **given  # type: ignore[arg-type]
    )  # fmt: skip


async def _measure(work: "Work", target: Path | None) -> "Found":
    """Raises ForebayError: as the part does, or a signal came before there was anything to tell."""
    from engine.bench.parts import as_json, run_part

    signals, told = Signals(), list["Found"]()

    def piece(found: "Found") -> None:
        told.append(found)
        if target is not None:
            write_json(target, as_json(work, found, {}))

    async def measure(bars: Bars) -> "Found":
        async with signals.until_signal():
            return await run_part(work, bars, piece)
        if not told:
            raise ForebayError("stopped by a signal before anything was measured; no JSON was written")
        return told[-1]

    with signals.caught():
        return await measured(measure, partial(as_json, work), target, probe=work.engine.device != "cpu")


def run(invocation: Invocation) -> int:
    """Returns 0 when outputs are equal, what is held is as promised, and all was run, else 1. Raises ForebayError."""
    target, plan = json_target(invocation.options), _plan(invocation)
    from engine.bench.many import prepared

    work = prepared(plan)
    Console(stderr=True, highlight=False, width=None if invocation.settings.interactive else 160).print(work.table())
    found = uvloop.run(_measure(work, target))
    console = results()
    console.print(found.table())
    if found.trouble:
        console.print(Text(f"NOTHING IS SAID OF SPEED: {found.trouble}", style="bold red"))
        return 1
    console.print(Text(found.said() if found.complete else f"{found.said()}; not all was run"))
    return 0 if found.complete else 1


COMMAND = Command("sessions", "many long sessions that decode at once: steps, floors, memory, gaps", configure, run)
