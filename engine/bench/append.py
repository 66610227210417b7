"""A large append in one placement and the other: the time to its first token, and the decoding behind it.

Runs arms in the order given and says what they show; prints nothing and writes nothing.

1. Every arm runs the whole load once before it is measured, in the same engine: kernels are compiled and steps recorded by then.
2. The time to the first token is of the append alone: it begins where the rows in front of it are all in place.
3. Arms whose outputs differ have no times; on a CPU only ratios are shown.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from engine.bench.arm import Arm, Kept, Load, Watch, forget_engines, measure, seeded_prompt, watched_engine
from engine.bench.decode import check_placements, first_difference
from engine.config import EngineConfig
from engine.device import device_of
from engine.engine import Engine
from engine.errors import BadSetting
from engine.sampling import Sampling

__all__ = ["AppendPlan", "Appends", "as_json", "run_appends", "table"]

_VERSION = 1
_HISTORY_SEED = 20_240_102  # a real history's ids are not the append's


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """What to run: `load.prompt_tokens` are appended behind the load's made-up history, or behind real rows. Raises BadSetting."""

    load: Load
    engine: EngineConfig  # its placement is set by each arm
    history_tokens: int = 0  # real tokens of a first turn; 0: none
    placements: tuple[str, ...] = ("resident", "offload", "offload", "resident")
    rehearsals: int = 1  # of the whole load, before the measured one

    def __post_init__(self) -> None:
        check_placements(self.placements)
        if self.history_tokens < 0:
            raise BadSetting(f"--history must be a number of rows or synthetic:SEED:ROWS, not {self.history_tokens}")
        if self.rehearsals < 0:
            raise BadSetting(f"--rehearsals must be at least 0, not {self.rehearsals}")
        assert self.load.history is None or not self.history_tokens, "rows in front are made up or real, not both"


@dataclass(frozen=True, slots=True)
class Appends:
    """All arms."""

    arms: tuple[Arm, ...]
    device: torch.device

    @property
    def equal(self) -> bool:
        """Whether all arms gave the same tokens."""
        return len({arm.token_ids for arm in self.arms}) == 1

    @property
    def absolute(self) -> bool:
        """Whether times mean anything by themselves."""
        return self.device.type != "cpu"

    def first_token_ratio(self) -> float | None:
        """Mean time to the first token, offload over resident; None without both."""
        return _ratio([arm.append_s for arm in self._of("offload")], [arm.append_s for arm in self._of("resident")])

    def decode_loss(self) -> float | None:
        """Share of the resident decode speed that offload loses behind the append; None without both."""
        resident, offload = ([step for arm in self._of(name) for step in arm.steps_s] for name in ("resident", "offload"))
        ratio = _ratio(resident, offload)
        return None if ratio is None else 1.0 - ratio

    def _of(self, placement: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.placement == placement]


def _ratio(over: list[float], under: list[float]) -> float | None:
    return statistics.fmean(over) / statistics.fmean(under) if over and under else None


async def run_appends(plan: AppendPlan, watch: Watch) -> Appends:
    """Run the arms, one after another. Raises ForebayError."""
    kept, arms = Kept(), []
    for name in plan.placements:
        config = dataclasses.replace(plan.engine, placement=name)  # type: ignore[arg-type]  # checked by the plan
        try:
            arms.append(await _arm(plan, config, watch, kept))
        finally:
            await forget_engines(config)
    return Appends(tuple(arms), device_of(plan.engine))


async def _arm(plan: AppendPlan, config: EngineConfig, watch: Watch, kept: Kept) -> Arm:
    """An engine of its own; every answer's ids count, only the last one's times."""
    ids: list[int] = []
    async with watched_engine(plan.load, config, watch, kept) as (engine, probe):
        for _ in range(plan.rehearsals + 1):
            arm = await _append(plan, engine, watch) if plan.history_tokens else await _measured(plan, engine, watch)
            ids.extend(arm.token_ids)
    assert probe is None, "an append's load has no probe tokens"
    return dataclasses.replace(arm, token_ids=tuple(ids))


async def _measured(plan: AppendPlan, engine: Engine, watch: Watch) -> Arm:
    prompt = seeded_prompt(engine.stage.model.config.vocabulary, plan.load.prompt_tokens)
    return await measure(engine, plan.load, prompt, None, watch)


async def _append(plan: AppendPlan, engine: Engine, watch: Watch) -> Arm:
    """Behind real rows: a first turn of a session, then the append as its second one."""
    vocabulary = engine.stage.model.config.vocabulary
    session = await engine.create_session()
    try:
        sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
        history = seeded_prompt(vocabulary, plan.history_tokens, _HISTORY_SEED)
        turn = await engine.generate(history, sampling, session=session).complete()
        prompt = seeded_prompt(vocabulary, plan.load.prompt_tokens)
        arm = await measure(engine, plan.load, prompt, None, watch, session)
    finally:
        await engine.close_session(session)
    return dataclasses.replace(arm, token_ids=(*turn.token_ids, *arm.token_ids))


def _arm_fields(plan: AppendPlan, found: Appends, arm: Arm) -> dict[str, Any]:
    """An arm as JSON values, without its times unless all outputs are equal and there is a device."""
    fields: dict[str, Any] = {
        "placement": arm.placement, "sha256": arm.sha256, "tokens": len(arm.token_ids), "context_rows": arm.context_rows,
        "device_bytes": arm.device_bytes, "transient_bytes": arm.transient_bytes,
    }  # fmt: skip
    if found.equal and found.absolute:
        fields |= {
            "first_token_s": arm.append_s, "append_tokens_per_second": plan.load.prompt_tokens / arm.append_s,
            "tokens_per_second": arm.tokens_per_second,
        }  # fmt: skip
    return fields


def as_json(plan: AppendPlan, found: Appends, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything. Times in seconds."""
    given = dataclasses.asdict(plan)
    given["load"]["model"] = plan.load.model.name
    return {
        "version": _VERSION, "kind": "append", "outputs_equal": found.equal, "first_difference": first_difference(found.arms) or None,
        "arms": [_arm_fields(plan, found, arm) for arm in found.arms],
        "first_token_ratio": found.first_token_ratio() if found.equal else None,
        "decode_loss": found.decode_loss() if found.equal else None,
        "plan": given, "machine": machine,
    }  # fmt: skip


def table(plan: AppendPlan, found: Appends) -> Table:
    """A row an arm; no time when outputs differ."""
    drawn = Table(title=f"append of {plan.load.prompt_tokens:,} tokens", title_justify="left")
    times = found.equal and found.absolute
    for title in ("arm", "rows after", "transient", *(("first token s", "append tok/s", "decode tok/s") if times else ()), "output"):
        drawn.add_column(title, justify="left" if title in ("arm", "output") else "right", overflow="fold")
    for arm in found.arms:
        cells = [arm.placement, f"{arm.context_rows:,}", "-" if arm.transient_bytes is None else f"{arm.transient_bytes / 2**20:,.0f} MiB"]
        if times:
            cells += [f"{arm.append_s:.3f}", f"{plan.load.prompt_tokens / arm.append_s:,.0f}", f"{arm.tokens_per_second:.2f}"]
        same = arm.token_ids == found.arms[0].token_ids
        output = Text(arm.sha256[:12]) if same else Text(f"{arm.sha256[:12]} DIFFERS", style="bold red")
        drawn.add_row(*map(Text, cells), output)
    return drawn
