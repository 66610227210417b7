"""A gate's outcome: whether it passes, its JSON, its table.

Pure functions of pairs; writes nothing but the file it is told to.

1. The gate passes when every run of every pair gave one and the same output and every pair is within its limit.
2. Every pair is in the JSON and in the table, failed ones with their reason.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from engine.gate.plan import Plan
from engine.gate.prompt import PromptIds
from engine.gate.verdict import Pair, Verdict, all_equal, judge, null_spread, tokens_a_step

__all__ = ["Outcome", "all_pass", "as_json", "depth_of", "modes_as_json", "outcome", "same_text", "table", "write_json"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all pairs together say. `null_spread`: None when no null pair was measured."""

    verdicts: tuple[Verdict, ...]
    nulls: tuple[Pair, ...]
    null_spread: float | None
    outputs_equal: bool
    passes: bool


def outcome(plan: Plan, pairs: list[Pair]) -> Outcome:
    """Judge every pair."""
    nulls = tuple(pair for pair in pairs if pair.null)
    measured = any(not pair.failed for pair in nulls)
    spread = null_spread(nulls)
    verdicts = tuple(judge(pair, plan.limit, spread) for pair in pairs if not pair.null)
    equal = bool(verdicts) and all_equal(pairs)
    return Outcome(verdicts, nulls, spread if measured else None, equal, equal and all(verdict.passes for verdict in verdicts))


def _pair_fields(pair: Pair) -> dict[str, Any]:
    return {
        "number": pair.number,
        "outputs_equal": pair.equal,
        "error": pair.failed or None,
        "runs": [dataclasses.asdict(run) for run in pair.runs],
    }


def as_json(plan: Plan, prompt: PromptIds | None, found: Outcome, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON values; speeds in tokens/s, shares of 1."""
    given = dataclasses.asdict(plan) | {"prompt_file": None if plan.prompt_file is None else plan.prompt_file.name}
    ids = None if prompt is None else hashlib.sha256(json.dumps(prompt.ids).encode()).hexdigest()
    return {
        "version": _VERSION,
        "passes": found.passes,
        "outputs_equal": found.outputs_equal,
        "limit": plan.limit,
        "null_spread": found.null_spread,
        "pairs": [
            _pair_fields(verdict.pair)
            | {
                "passes": verdict.passes, "reason": verdict.reason, "loss": verdict.loss, "added_us_a_step": verdict.added_us_a_step,
                "miss_rate": verdict.miss_rate, "counts": verdict.counts,
            }
            for verdict in found.verdicts
        ],
        "null_pairs": [_pair_fields(pair) for pair in found.nulls],
        "plan": given,
        "prompt": None if prompt is None else {"tokens": len(prompt.ids), "source": prompt.source, "sha256": ids},
        "machine": machine,
    }  # fmt: skip


def modes_as_json(modes: Sequence[tuple[Plan, PromptIds | None, Outcome]], machine: dict[str, Any]) -> dict[str, Any]:
    """One plan's JSON as it is; of several, each under its depth of drafts."""
    if len(modes) == 1:
        return as_json(*modes[0], machine)
    return {
        "version": _VERSION,
        "passes": all_pass([(plan, found) for plan, _, found in modes]),
        "modes": [{"draft_depth": depth_of(plan)} | as_json(plan, prompt, found, machine) for plan, prompt, found in modes],
        "machine": machine,
    }


def depth_of(plan: Plan) -> int | str:
    """The depth of drafts a plan measures."""
    return "auto" if plan.engine.draft_depth is None else plan.engine.draft_depth


def same_text(modes: Sequence[tuple[Plan, Outcome]]) -> bool:
    """Whether every mode said the same: drafts change no token. Where acceptance is forced they do, and nothing is compared."""
    free = [found for plan, found in modes if not plan.engine.force_accept_rate]
    runs = [run for found in free for pair in (*(verdict.pair for verdict in found.verdicts), *found.nulls) for run in pair.runs]
    return len({run.sha256 for run in runs if not run.error}) <= 1


def all_pass(modes: Sequence[tuple[Plan, Outcome]]) -> bool:
    """Whether every mode passes and all said the same."""
    return same_text(modes) and all(found.passes for _, found in modes)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all. Raises OSError."""
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def table(found: Outcome, plan: Plan) -> Table:
    """A row a pair, null pairs below."""
    title = f"offload against resident, draft depth {depth_of(plan)}"
    if plan.engine.force_accept_rate:
        title += f" (acceptance forced to {plan.engine.force_accept_rate:g}: the text means nothing)"
    drawn = Table(title=title, title_justify="left")
    for title in ("pair", "resident tok/s", "offload tok/s", "loss", "added us/step", "misses", "tokens/step", "output", "verdict"):
        drawn.add_column(title, justify="left" if title in ("pair", "output", "verdict") else "right", overflow="fold")
    for verdict in found.verdicts:
        pair = verdict.pair
        order = " ".join("A" if run.arm == "resident" else "B" for run in pair.runs)
        added = "-" if verdict.added_us_a_step is None else f"{verdict.added_us_a_step:+.1f}"
        note = "" if verdict.counts or verdict.miss_rate is None else "; does not count: misses outside 0.5-5%"
        drawn.add_row(
            f"{pair.number} ({order})", f"{pair.reference.tokens_per_second:.3f}", f"{pair.measured.tokens_per_second:.3f}",
            _share(verdict.loss), added, _share(verdict.miss_rate), f"{tokens_a_step(pair.measured):.2f}",
            "equal" if pair.equal else "DIFFERS",
            Text(("pass: " if verdict.passes else "FAIL: ") + verdict.reason + note, style="green" if verdict.passes else "bold red"),
        )  # fmt: skip
    for pair in found.nulls:
        first, second = (f"{run.tokens_per_second:.3f}" for run in pair.runs)
        spread = "-" if pair.failed else _share(null_spread([pair]))
        said = Text(pair.failed or "both resident", style="bold red" if pair.failed else "")
        drawn.add_row(f"null {pair.number}", first, second, spread, "", "", "", "equal" if pair.equal else "DIFFERS", said)
    return drawn
