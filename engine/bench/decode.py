"""Decode steps in one placement and the other: equal outputs first, then times against the floor and against each other.

Runs arms in the order given and says what they show; prints nothing and writes nothing.

1. Arms whose outputs differ have no speed: neither the table nor the JSON shows one.
2. The floor is of the arm's own steps, at their mean history; a ratio of 1 cannot be beaten.
3. On a CPU times of a shared machine mean little: only ratios are shown.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from engine.bench.arm import Arm, Kept, Load, Watch, run_arm
from engine.bench.floor import copy_bandwidth
from engine.bench.host import percentile
from engine.bench.probe import Window
from engine.config import EngineConfig
from engine.device import device_of
from engine.errors import BadSetting

__all__ = ["Comparison", "DecodePlan", "added_us", "as_json", "check_placements", "compare", "first_difference", "table"]

_PLACEMENTS = ("resident", "offload")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to run. `placements` in the order of the arms; one may come more than once. Raises BadSetting."""

    load: Load
    engine: EngineConfig  # its placement is set by each arm
    placements: tuple[str, ...] = _PLACEMENTS

    def __post_init__(self) -> None:
        check_placements(self.placements)
        if self.engine.draft_depth != 0:
            raise BadSetting("bench decode measures steps of one row and their floor: leave --draft-depth at 0; the gate measures drafts")


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms. `bandwidth`: bytes a second of a copy in the device, read plus written."""

    arms: tuple[Arm, ...]
    bandwidth: float
    device: torch.device

    @property
    def equal(self) -> bool:
        """Whether all arms gave the same tokens."""
        return len({arm.token_ids for arm in self.arms}) == 1

    @property
    def absolute(self) -> bool:
        """Whether times mean anything by themselves."""
        return self.device.type != "cpu"

    def floor_s(self, arm: Arm) -> float:
        """Seconds that reading a step's bytes takes at the measured bandwidth."""
        return arm.floor.total / self.bandwidth

    def over_floor(self, arm: Arm) -> float:
        """A mean step over its floor."""
        return statistics.fmean(arm.steps_s) / self.floor_s(arm)

    def over_resident(self, arm: Arm) -> float | None:
        """The arm's mean step over the mean of all resident ones; None without any."""
        steps = [step for one in self.arms if one.placement == "resident" for step in one.steps_s]
        return statistics.fmean(arm.steps_s) / statistics.fmean(steps) if steps else None


def check_placements(placements: Sequence[str]) -> None:
    """Raises BadSetting unless there are some and all are known."""
    unknown = [name for name in placements if name not in _PLACEMENTS]
    if unknown or not placements:
        named = repr(unknown[0]) if unknown else "nothing"
        raise BadSetting(f"--placements must be a list of {' and '.join(_PLACEMENTS)} with commas between, not {named}")


async def compare(plan: DecodePlan, watch: Watch) -> Comparison:
    """Run the arms, one after another. Raises ForebayError."""
    kept, arms = Kept(), []
    for name in plan.placements:
        config = dataclasses.replace(plan.engine, placement=name)  # type: ignore[arg-type]  # checked by the plan
        arms.append(await run_arm(plan.load, config, watch, kept))
    device = device_of(plan.engine)
    return Comparison(tuple(arms), copy_bandwidth(device), device)


def first_difference(arms: Sequence[Arm]) -> str:
    """Where the first arm that differs from the first one does so, in words; "" if none does."""
    for arm in arms[1:]:
        for place, (one, other) in enumerate(zip(arms[0].token_ids, arm.token_ids, strict=False)):
            if one != other:
                return f"token {place} is {one} with {arms[0].placement} and {other} with {arm.placement}"
        if len(arm.token_ids) != len(arms[0].token_ids):
            return f"{arms[0].placement} gave {len(arms[0].token_ids)} tokens and {arm.placement} {len(arm.token_ids)}"
    return ""


def added_us(arms: Sequence[Arm]) -> float | None:
    """Microseconds a mean step of the offload arms takes longer than one of the resident arms; None without both."""
    steps = {name: [step for arm in arms if arm.placement == name for step in arm.steps_s] for name in _PLACEMENTS}
    if not all(steps.values()):
        return None
    return 1e6 * (statistics.fmean(steps["offload"]) - statistics.fmean(steps["resident"]))


def _arm_fields(found: Comparison, arm: Arm) -> dict[str, Any]:
    """An arm as JSON values, without its speed unless all outputs are equal; without absolute times on a CPU."""
    fields: dict[str, Any] = {
        "placement": arm.placement, "sha256": arm.sha256, "tokens": len(arm.token_ids), "context_rows": arm.context_rows,
        "hits": arm.hits, "misses": arm.misses, "ring_reads": arm.ring_reads, "miss_rate": arm.miss_rate,
        "device_bytes": arm.device_bytes, "transient_bytes": arm.transient_bytes, "floor_bytes": dataclasses.asdict(arm.floor),
    }  # fmt: skip
    if not found.equal:
        return fields
    fields |= {"step_over_floor": found.over_floor(arm), "step_over_resident": found.over_resident(arm)}
    fields["idle_share"] = None if arm.window is None else arm.window.idle_share
    fields["between_steps_share"] = None if arm.window is None else arm.window.between_steps
    if found.absolute:
        micro = [1e6 * step for step in arm.steps_s]
        fields |= {
            "tokens_per_second": arm.tokens_per_second, "first_token_s": arm.first_token_s, "floor_us": 1e6 * found.floor_s(arm),
            "step_us": {"mean": statistics.fmean(micro), "p50": percentile(micro, 50), "p90": percentile(micro, 90), "max": max(micro)},
            "loop_thread_us": 1e6 * arm.loop_cpu_s / len(arm.steps_s),
            "loop_work_us": None if arm.window is None else _a_step(arm, arm.window, arm.window.loop_work_ns),
            "launch_us": None if arm.window is None else _a_step(arm, arm.window, arm.window.launch_ns),
            "between_steps_us": percentile(arm.window.gaps_us, 50) if arm.window is not None and arm.window.gaps_us else None,
        }  # fmt: skip
    return fields


def _a_step(arm: Arm, window: Window, spent_ns: int) -> float:
    """Microseconds a step of what a window counted. It saw as many steps as fit in it."""
    return spent_ns / 1e3 / (window.window_ns / 1e9 / statistics.fmean(arm.steps_s))


def as_json(plan: DecodePlan, found: Comparison, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything. Bytes a second for the bandwidth, only from a device."""
    shown = found.equal and found.absolute
    return {
        "version": _VERSION, "kind": "decode", "outputs_equal": found.equal,
        "first_difference": first_difference(found.arms) or None,
        "arms": [_arm_fields(found, arm) for arm in found.arms],
        "added_us_a_step": added_us(found.arms) if shown else None,
        "copy_bytes_per_second": found.bandwidth if shown else None,
        "plan": _plan_fields(plan), "machine": machine,
    }  # fmt: skip


def _plan_fields(plan: DecodePlan) -> dict[str, Any]:
    """What was asked for; a model by its name alone."""
    fields = dataclasses.asdict(plan)
    fields["load"]["model"] = plan.load.model.name
    return fields


def table(found: Comparison) -> Table:
    """A row an arm; nothing of speed when outputs differ."""
    drawn = Table(title="decode steps, one session", title_justify="left")
    titles = ["arm", "rows", "misses", "output"]
    if found.equal:
        titles += ["step us p50", "p90", "mean", "tok/s", "floor us"] if found.absolute else []
        titles += ["step/floor", "step/resident", "device idle", "between steps"]
        titles += ["loop us", "launching"] if found.absolute else []
    for title in titles:
        drawn.add_column(title, justify="left" if title in ("arm", "output") else "right", overflow="fold")
    for arm in found.arms:
        same = arm.token_ids == found.arms[0].token_ids
        output = Text(arm.sha256[:12]) if same else Text(f"{arm.sha256[:12]} DIFFERS", style="bold red")
        cells = [Text(arm.placement), Text(f"{arm.context_rows:,}"), Text(_share(arm.miss_rate)), output]
        drawn.add_row(*cells, *(map(Text, _speed_cells(found, arm)) if found.equal else ()))
    return drawn


def _speed_cells(found: Comparison, arm: Arm) -> list[str]:
    cells: list[str] = []
    fields = _arm_fields(found, arm)
    if found.absolute:
        times = fields["step_us"]
        cells += [f"{times['p50']:.1f}", f"{times['p90']:.1f}", f"{times['mean']:.1f}"]
        cells += [f"{fields['tokens_per_second']:.2f}", f"{fields['floor_us']:.1f}"]
    resident = fields["step_over_resident"]
    cells += [f"{fields['step_over_floor']:.3f}", "-" if resident is None else f"{resident:.4f}", _share(fields["idle_share"])]
    cells.append(_share(fields["between_steps_share"]))
    if found.absolute:
        cells += ["-" if fields[name] is None else f"{fields[name]:.0f}" for name in ("loop_work_us", "launch_us")]
    return cells


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
