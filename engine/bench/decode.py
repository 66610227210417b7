"""Decode steps in one placement and the other: equal outputs first, then times against the floor and against each other.

Runs arms in the order given and says what they show; prints nothing and writes nothing.

1. Arms whose outputs differ have no speed: neither the table nor the JSON shows one.
2. The floor is of the arm's own steps, at their mean history and with their number of rows; a ratio of 1 cannot be beaten.
3. On a CPU times of a shared machine mean little: only ratios are shown.
"""

import dataclasses
import hashlib
import itertools
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
    """What to run: every depth of drafts in every placement, in this order; one may come twice. Raises BadSetting."""

    load: Load
    engine: EngineConfig  # placement and draft depth are set by each arm
    placements: tuple[str, ...] = _PLACEMENTS
    depths: tuple[int | None, ...] = (0,)

    def __post_init__(self) -> None:
        check_placements(self.placements)
        if not self.depths or None in self.depths:
            raise BadSetting("bench decode knows the floor of steps of a fixed number of rows: give --draft-depth 0 to 7, not auto")
        if len(set(self.depths)) > 1 and self.engine.force_accept_rate:
            raise BadSetting("--force-accept-rate makes the text depend on the depth: measure one depth of --draft-depths at a time")


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
        """The arm's mean step over the mean of all resident ones of its depth; None without any."""
        steps = [step for one in self.arms if one.placement == "resident" and one.depth == arm.depth for step in one.steps_s]
        return statistics.fmean(arm.steps_s) / statistics.fmean(steps) if steps else None

    def over_undrafted(self, arm: Arm) -> float | None:
        """The arm's tokens a second over those of the arms of its placement that draft nothing; None without any."""
        rates = [one.tokens_per_second for one in self.arms if one.placement == arm.placement and one.depth == 0]
        return arm.tokens_per_second / statistics.fmean(rates) if rates else None


def check_placements(placements: Sequence[str]) -> None:
    """Raises BadSetting unless there are some and all are known."""
    unknown = [name for name in placements if name not in _PLACEMENTS]
    if unknown or not placements:
        named = repr(unknown[0]) if unknown else "nothing"
        raise BadSetting(f"--placements must be a list of {' and '.join(_PLACEMENTS)} with commas between, not {named}")


async def compare(plan: DecodePlan, watch: Watch) -> Comparison:
    """Run the arms, one after another. Raises ForebayError."""
    kept, arms = Kept(), []
    for depth, name in itertools.product(plan.depths, plan.placements):
        config = dataclasses.replace(plan.engine, placement=name, draft_depth=depth)  # type: ignore[arg-type]  # checked by the plan
        arms.append(await run_arm(plan.load, config, watch, kept))
    device = device_of(plan.engine)
    return Comparison(tuple(arms), copy_bandwidth(device), device)


def first_difference(arms: Sequence[Arm]) -> str:
    """Where the first arm that differs from the first one does so, in words; "" if none does."""
    for arm in arms[1:]:
        for place, (one, other) in enumerate(zip(arms[0].token_ids, arm.token_ids, strict=False)):
            if one != other:
                return f"token {place} is {one} with {_name(arms[0])} and {other} with {_name(arm)}"
        if len(arm.token_ids) != len(arms[0].token_ids):
            return f"{_name(arms[0])} gave {len(arms[0].token_ids)} tokens and {_name(arm)} {len(arm.token_ids)}"
    return ""


def _name(arm: Arm) -> str:
    return arm.placement + (f" and {arm.depth} drafts" if arm.depth else "")


def added_us(arms: Sequence[Arm]) -> float | None:
    """Microseconds a mean step of the offload arms takes longer than one of the resident arms; None without both, or of several depths."""
    if len({arm.depth for arm in arms}) > 1:
        return None
    steps = {name: [step for arm in arms if arm.placement == name for step in arm.steps_s] for name in _PLACEMENTS}
    if not all(steps.values()):
        return None
    return 1e6 * (statistics.fmean(steps["offload"]) - statistics.fmean(steps["resident"]))


def _arm_fields(found: Comparison, arm: Arm) -> dict[str, Any]:
    """An arm as JSON values, without its speed unless all outputs are equal; without absolute times on a CPU."""
    fields: dict[str, Any] = {
        "placement": arm.placement, "draft_depth": arm.depth, "sha256": arm.sha256,
        "tokens": len(arm.token_ids), "context_rows": arm.context_rows,
        "hits": arm.hits, "misses": arm.misses, "ring_reads": arm.ring_reads, "miss_rate": arm.miss_rate,
        "host_bytes": arm.host_bytes, "peer_device_bytes": arm.peer_device_bytes,
        "device_bytes": arm.device_bytes, "transient_bytes": arm.transient_bytes, "floor_bytes": dataclasses.asdict(arm.floor),
    }  # fmt: skip
    if not found.equal:
        return fields
    fields |= {"step_over_floor": found.over_floor(arm), "step_over_resident": found.over_resident(arm)}
    fields |= {"tokens_per_step": arm.tokens_per_step, "rate_over_undrafted": found.over_undrafted(arm)}
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
    if plan.load.prompt_text is not None:
        fields["load"]["prompt_text"] = hashlib.sha256(plan.load.prompt_text.encode()).hexdigest()
    return fields


def table(found: Comparison) -> Table:
    """A row an arm; nothing of speed when outputs differ."""
    drawn = Table(title="decode steps, one session", title_justify="left")
    titles = ["arm", "rows", "misses", "output"]
    drafted = any(arm.depth for arm in found.arms)
    if found.equal:
        titles += ["tok/step", "rate/no drafts"] if drafted else []
        titles += ["step us p50", "p90", "mean", "tok/s", "floor us"] if found.absolute else []
        titles += ["step/floor", "step/resident", "device idle", "between steps"]
        titles += ["loop us", "launching"] if found.absolute else []
    for title in titles:
        drawn.add_column(title, justify="left" if title in ("arm", "output") else "right", overflow="fold")
    for arm in found.arms:
        same = arm.token_ids == found.arms[0].token_ids
        output = Text(arm.sha256[:12]) if same else Text(f"{arm.sha256[:12]} DIFFERS", style="bold red")
        cells = [
            Text(f"{arm.placement}, {arm.depth} drafts" if drafted else arm.placement),
            Text(f"{arm.context_rows:,}"),
            Text(_share(arm.miss_rate)),
            output,
        ]
        drawn.add_row(*cells, *(map(Text, _speed_cells(found, arm, drafted)) if found.equal else ()))
    return drawn


def _speed_cells(found: Comparison, arm: Arm, drafted: bool) -> list[str]:
    fields = _arm_fields(found, arm)
    over = fields["rate_over_undrafted"]
    cells = [f"{arm.tokens_per_step:.2f}", "-" if over is None else f"{over:.3f}"] if drafted else []
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
