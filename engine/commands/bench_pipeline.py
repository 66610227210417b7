"""`forebay bench pipeline`: what sessions decode in several stages beside one, in virtual time and on this CPU, and how long stages idle.

The table goes to standard output. Exit code: 0, 1 where tokens differ, 2 for a bad command line or a model that cannot be cut so.
"""

import argparse
import sys

import uvloop

from engine.commands.bench_decode import add_model
from engine.commands.command import Command, Invocation
from engine.commands.measuring import count_of, json_target, results
from engine.commands.tape_files import writable
from engine.errors import BadSetting
from engine.gate import write_json
from engine.gate.machine import machine

__all__ = ["COMMAND"]

_SESSIONS, _TOKENS, _PAIRS = 4, 96, 3


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, how it is cut (`--stages`), and where table and picture go."""
    add_model(parser)
    parser.add_argument("--sessions", metavar="N", help=f"that decode together ({_SESSIONS})")
    parser.add_argument("--tokens", metavar="N", help=f"of each ({_TOKENS})")
    parser.add_argument("--pairs", metavar="N", help=f"runs in one stage and in several, on the CPU ({_PAIRS})")
    parser.add_argument("--picture", metavar="SVG", help="two steps of every lane, drawn from the tape")


def run(invocation: Invocation) -> int:
    """Returns the exit code. Raises ForebayError."""
    options, settings = invocation.options, invocation.settings
    target, drawn = json_target(options), options.get("picture")
    path = None if drawn is None else writable(str(drawn))
    sessions, tokens, pairs = (count_of(options, name) for name in ("sessions", "tokens", "pairs"))
    from engine.bench.pipeline import Plan, as_json, measure, table

    stages = "2" if settings.engine.stages == "1" else settings.engine.stages
    plan = Plan(settings.model_directory(), stages, sessions or _SESSIONS, tokens or _TOKENS, pairs or _PAIRS)
    found = uvloop.run(measure(plan, settings.engine))
    if found is None:
        print("several stages gave other tokens than one: nothing is said of time", file=sys.stderr)
        return 1
    if path is not None:
        try:
            path.write_bytes(found.drawn)
        except OSError as error:
            raise BadSetting(f"--picture: cannot write {path}: {error.strerror or error}") from error
    if target is not None:
        write_json(target, as_json(plan, found, machine(probe=False)))
    results().print(table(found))
    return 0


COMMAND = Command("pipeline", "decoding in several stages beside one, and how long stages idle", configure, run)
