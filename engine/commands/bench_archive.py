"""`forebay bench archive`: exports and imports against plain files of as many bytes, and against reading the tokens anew.

The table goes to standard output, all else to standard error. Exit code: 0, 2 a bad command line.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.text import Text

from engine.commands.bench_decode import add_model
from engine.commands.command import Command, Invocation
from engine.commands.measuring import count_of, json_target, measured, results

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.bench.archive import Archived, ArchivePlan

__all__ = ["COMMAND"]

_COUNTS = ("rows", "appended", "rounds")


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, how much, and on which disk."""
    add_model(parser)
    parser.add_argument("--rows", metavar="N", help="made-up rows that are archived (100000)")
    parser.add_argument("--appended", metavar="N", help="tokens that are really read, archived, and read anew (2000)")
    parser.add_argument("--rounds", metavar="N", help="rounds of each; medians are shown (3)")
    parser.add_argument("--directory", metavar="DIR", default=".", help="a directory on the disk to measure (default: here)")


async def _measure(plan: "ArchivePlan", target: Path | None) -> "Archived":
    from engine.bench.archive import as_json, run_archives

    return await measured(partial(run_archives, plan), partial(as_json, plan), target, probe=plan.engine.device != "cpu")


def run(invocation: Invocation) -> int:
    """Returns 0. Raises ForebayError."""
    options, target = invocation.options, json_target(invocation.options)
    counts = {name: count for name in _COUNTS if (count := count_of(options, name)) is not None}
    model = invocation.settings.model_directory()
    from engine.bench.archive import ArchivePlan, table

    plan = ArchivePlan(model, invocation.settings.engine, Path(str(options["directory"])), **counts)
    found = uvloop.run(_measure(plan, target))
    console, ratios = results(), found.ratios()
    console.print(table(plan, found))
    console.print(
        Text(
            f"export at {ratios['export_of_plain_write']:.0%} of a plain write, import at {ratios['import_of_plain_read']:.0%} of a plain "
            f"read; an import takes {ratios['import_of_append']:.1%} of reading the tokens anew, a fork {ratios['fork_of_append']:.3%}, "
            f"resuming in RAM {ratios['resume_of_append']:.3%}"
        )
    )
    return 0


COMMAND = Command("archive", "exports and imports of sessions against plain files, and against reading the tokens anew", configure, run)
