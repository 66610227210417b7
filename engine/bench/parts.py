"""The parts of `forebay bench sessions` by name, and their JSON."""

import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from engine.bench.arm import Watch
from engine.bench.footprint import run_footprint
from engine.bench.gap import run_gap
from engine.bench.many import Found, Part, Piece, Work
from engine.bench.placements import run_resident
from engine.bench.sessions import run_decode

__all__ = ["as_json", "run_part"]

_VERSION = 1
_RUN: Mapping[Part, Callable[[Work, Watch, Piece], Coroutine[Any, Any, Found]]] = {
    "decode": run_decode, "resident": run_resident, "footprint": run_footprint, "gap": run_gap,
}  # fmt: skip


async def run_part(work: Work, watch: Watch, piece: Piece) -> Found:
    """The plan's part. Raises ForebayError."""
    return await _RUN[work.plan.part](work, watch, piece)


def as_json(work: Work, found: Found, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything. Bytes, and times in the unit of their names; a model by its name alone."""
    plan = dataclasses.asdict(work.plan) | {"model": work.plan.model.name, "engine": dataclasses.asdict(work.engine)}
    return {
        "version": _VERSION, "kind": "sessions", "part": work.plan.part, "complete": found.complete, "trouble": found.trouble or None,
        **found.fields(), "planned": work.fields(), "plan": plan, "lengths": [dataclasses.asdict(each) for each in work.lengths],
        "append_tokens": work.append_tokens, "machine": dict(machine),
    }  # fmt: skip
