"""What was simulated, as tables and as JSON.

Knows no simulation but its results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from engine.simulation.pipeline import Load, Outcome
from engine.simulation.sweeps import Check, Doubt, Nodes, Picture

__all__ = ["as_json", "check_table", "doubt_table", "load_table"]

VERSION = 1


def check_table(checks: Sequence[Check]) -> Table:
    """Measured beside simulated."""
    table = Table(title="the published two nodes, tokens a second of all sessions", title_justify="left")
    for column in ("row", "role", "measured", "simulated", "error", "with seconds outside"):
        table.add_column(column, justify="left" if column in ("row", "role") else "right")
    for each in checks:
        outside = "" if each.with_outside is None else f"{each.with_outside:.2f}"
        table.add_row(
            each.row.name, each.row.role, f"{each.row.tokens_per_second:.2f}", f"{each.outcome.tokens_per_second:.2f}",
            f"{each.error:+.1%}", outside,
        )  # fmt: skip
    return table


def doubt_table(checks: Sequence[Check], found: Sequence[Doubt]) -> Table:
    """The rows of ten sessions, taken otherwise."""
    table = Table(title="what is not published, taken otherwise", title_justify="left")
    table.add_column("")
    rows = [each for each in checks if each.row.sessions > 1]
    for each in rows:
        table.add_column(each.row.name, justify="right")
    table.add_row("measured", *(f"{each.row.tokens_per_second:.2f}" for each in rows))
    table.add_row("simulated", *(f"{each.outcome.tokens_per_second:.2f}" for each in rows))
    for doubt in found:
        table.add_row(doubt.name, *(f"{rate:.2f}" for rate in doubt.simulated))
    return table


def load_table(load: Load, outcome: Outcome) -> Table:
    """One load."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("sessions, drafts, sessions a stage", f"{load.sessions}, {load.depth}, {load.limit}")
    table.add_row("history of each", f"{load.history:,} rows")
    table.add_row("tokens a second while all decode", f"{outcome.steady:.2f}")
    table.add_row("of each session", f"{outcome.steady / load.sessions:.2f}")
    table.add_row("a step of one session", f"{outcome.step_ms:.1f} ms")
    table.add_row("members of a pass, mean", f"{outcome.batch:.2f}")
    table.add_row("stages busy", ", ".join(f"{share:.0%}" for share in outcome.busy))
    return table


def as_json(nodes: Nodes, checks: Sequence[Check], found: Sequence[Doubt], pictures: Sequence[Picture]) -> dict[str, Any]:
    """Parameters, check, doubts and curves."""
    return {
        "version": VERSION,
        "kind": "simulation",
        "machine": dataclasses.asdict(nodes.machine),
        "stages": [dataclasses.asdict(stage) for stage in nodes.stages],
        "acceptance": nodes.acceptance,
        "check": [
            {**dataclasses.asdict(each.row), "simulated": each.outcome.tokens_per_second, "error": each.error,
             "with_outside": each.with_outside, "outcome": dataclasses.asdict(each.outcome)}
            for each in checks
        ],
        "doubts": [dataclasses.asdict(doubt) for doubt in found],
        "pictures": [dataclasses.asdict(picture) for picture in pictures],
    }  # fmt: skip
