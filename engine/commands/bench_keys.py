"""`forebay bench keys`: what index keys of two bytes and of one change beside float32 ones, in selections and in answers.

The table goes to standard output, all else to standard error. Exit code: 0 measured, 2 a bad command line.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from engine.commands.bench_decode import add_model
from engine.commands.command import Command, Invocation
from engine.commands.measuring import count_of, json_target, measured, results
from engine.errors import BadSetting

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.bench.keys import KeysPlan

__all__ = ["COMMAND"]

_COUNTS = {
    "read_tokens": (16_384, "tokens read to compare selections"), "windows": (8, "pieces of the text that are answered"),
    "window_tokens": (2_048, "tokens of each"), "new_tokens": (64, "tokens of each answer"),
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, the text, and how much of it."""
    add_model(parser)
    parser.add_argument("--text", metavar="FILE", help="what is read (this program's own memory/)")
    for name, (default, what) in _COUNTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="N", help=f"{what} ({default:,})")


def _plan(invocation: Invocation) -> "KeysPlan":
    given = {name: count_of(invocation.options, name) for name in _COUNTS}
    counts = {name: _COUNTS[name][0] if count is None else count for name, count in given.items()}
    model, file = invocation.settings.model_directory(), invocation.options.get("text")
    from engine.bench.keys import KeysPlan, own_text

    try:
        text = own_text() if file is None else Path(str(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--text: cannot read {file}: {error}") from error
    return KeysPlan(model, invocation.settings.engine, text, **counts)


def run(invocation: Invocation) -> int:
    """Returns 0. Raises ForebayError."""
    target, plan = json_target(invocation.options), _plan(invocation)
    from engine.bench import keys

    found = uvloop.run(
        measured(
            lambda bars: keys.run(plan, bars), lambda found, machine: keys.as_json(plan, found, dict(machine)), target,
            probe=plan.engine.device != "cpu",
        )
    )  # fmt: skip
    results().print(keys.table(plan, found))
    return 0


COMMAND = Command("keys", "what narrower index keys change: selections and greedy answers", configure, run)
