"""`forebay doctor`: what of this host stalls decoding; with `cluster`, or nodes named, the same of all nodes (doctor_nodes.py).

Looks, says, and changes nothing. A table for people, JSON for programs. The exit code is 0 whatever was found: a bad setting is advice, not
a failure.
"""

import argparse
import json
import sys
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.commands.command import Command, Invocation
from engine.commands.doctor_nodes import answer_others, examine_nodes
from engine.doctor import Finding, Tree, examine, rows
from engine.doctor.finding import NOTHING_TO_RESTORE, NOTHING_TO_SET
from engine.settings import add_flags

__all__ = ["COMMAND", "report"]

_STYLE_OF = {"good": "green", "bad": "bold red", "unknown": "yellow"}
_PLAIN_WIDTH = 160  # where there is no terminal to ask


def configure(parser: argparse.ArgumentParser) -> None:
    """Whom to look at, and how to print."""
    parser.add_argument("whom", nargs="?", choices=("cluster",), metavar="cluster", help="look at all nodes, those of --nodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_flags(parser, ("nodes", "listen", "key_file", "peer_timeout"))


def _table(findings: list[Finding]) -> Table:
    table = Table(title="settings of this host that matter to decoding", title_justify="left", show_lines=True)
    for title in ("setting", "now", "", "why, and what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        advice = Text(f"{finding.why}\nsee: {finding.see}")
        if finding.set_it != NOTHING_TO_SET:
            advice.append(f"\nset: {finding.set_it}")
        if finding.restore != NOTHING_TO_RESTORE:
            advice.append(f"\nrestore: {finding.restore}")
        table.add_row(Text(finding.name), Text(finding.now), Text(finding.state, style=_STYLE_OF[finding.state]), advice)
    return table


def report(findings: list[Finding], console: Console, *, as_json: bool) -> None:
    """Print the findings."""
    counts = Counter(finding.state for finding in findings)
    if as_json:
        print(json.dumps({"version": 1, "bad": counts["bad"], "findings": rows(findings)}, indent=1), file=console.file)
        return
    console.print(_table(findings))
    bad = ", ".join(finding.name for finding in findings if finding.state == "bad")
    console.print(Text(f"{counts['good']} good, {counts['bad']} bad, {counts['unknown']} unknown" + (f"; bad: {bad}" if bad else "")))


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting, Unreachable: of nodes."""
    options = invocation.options
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    if options.get("listen") is not None:
        return answer_others(invocation, console)
    if options.get("whom") is not None or options.get("nodes") is not None:
        return examine_nodes(invocation, console)
    report(examine(Tree()), console, as_json=bool(options.get("json")))
    return 0


COMMAND = Command("doctor", "settings of this host, or of all nodes, that stall decoding; and the network between nodes", configure, run)
