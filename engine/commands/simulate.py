"""`forebay simulate`: throughput of the published two nodes in virtual time.

Without a load it runs the published rows and says how near it comes; with `--out` it also draws the curves; with a load it runs that alone.
Exit code: 0.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from engine.commands.command import Command, Invocation
from engine.commands.display import Bar
from engine.commands.measuring import count_of, results
from engine.commands.plan import tokens_of
from engine.errors import BadSetting
from engine.gate import write_json

__all__ = ["COMMAND"]

_LOAD = ("sessions", "drafts", "limit", "context")


def configure(parser: argparse.ArgumentParser) -> None:
    """A load, or where curves go."""
    parser.add_argument("--sessions", metavar="N", help="sessions that decode (10)")
    parser.add_argument("--drafts", metavar="N", help="drafts a step (1)")
    parser.add_argument("--limit", metavar="N", help="sessions that a stage decodes together (1)")
    parser.add_argument("--context", metavar="N", help="rows of each history, like 50000, 128K or 1M (1M)")
    parser.add_argument("--out", metavar="DIR", help="write simulation.json and an SVG a picture there")


def _folder(options: Mapping[str, object]) -> Path | None:
    name = options.get("out")
    if name is None:
        return None
    folder = Path(str(name))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadSetting(f"--out: {folder} is no directory that can be written to")
    return folder


def _count(options: Mapping[str, object], name: str, otherwise: int, least: int) -> int:
    count = count_of(options, name)
    if count is not None and count < least:
        raise BadSetting(f"--{name} must be at least {least}, not {count}")
    return otherwise if count is None else count


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting."""
    options = invocation.options
    folder = _folder(options)
    asked = any(options.get(name) is not None for name in _LOAD)
    if asked and folder is not None:
        raise BadSetting("--out is for the curves and --sessions, --drafts, --limit and --context for one load; give one of the two")
    sessions, limit = _count(options, "sessions", 10, 1), _count(options, "limit", 1, 1)
    drafts = _count(options, "drafts", 1, 0)
    history = tokens_of(str(options["context"])) if options.get("context") is not None else 1 << 20
    if history < 1:
        raise BadSetting(f"--context must be at least 1, not {history}")
    from engine.simulation import report, sweeps
    from engine.simulation.article import NEW_TOKENS
    from engine.simulation.chart import chart
    from engine.simulation.pipeline import Load

    nodes = sweeps.two_nodes()
    if asked:
        load = Load(sessions, drafts, limit, history, NEW_TOKENS, nodes.acceptance)
        results().print(report.load_table(load, sweeps.run_load(nodes, load)))
        return 0
    checks = sweeps.check(nodes)
    results().print(report.check_table(checks))
    if folder is None:
        return 0
    found = sweeps.doubts(nodes)
    results().print(report.doubt_table(checks, found))
    pictures = []
    with Bar("drawing", "simulation.running", "pictures", Console(file=sys.stderr)) as bar:
        for make in sweeps.PICTURES:
            pictures.append(make(nodes))
            (folder / f"simulation_{pictures[-1].name}.svg").write_bytes(chart(pictures[-1]))
            bar.update(len(pictures), len(sweeps.PICTURES))
    write_json(folder / "simulation.json", report.as_json(nodes, checks, found, pictures))
    return 0


COMMAND = Command("simulate", "throughput of the published two nodes in virtual time, and how near that comes", configure, run)
