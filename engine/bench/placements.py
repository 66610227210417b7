"""The same sessions at once in one placement and the other: equal tokens first, then tokens a second of all together.

An engine for each arm over weights that are read once. Prints and writes nothing.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import structlog
from rich.table import Table

from engine.bench.arm import Kept, Watch, forget_engines
from engine.bench.company import Company, fill
from engine.bench.holdings import device_bytes
from engine.bench.many import Piece, Work, absolute
from engine.bench.sessions import company_fields, differs, sha_of
from engine.config import EngineConfig
from engine.engine import Engine

__all__ = ["Arms", "run_resident"]

_log = structlog.get_logger("bench")


@dataclass(frozen=True, slots=True)
class _Arm:
    """One engine's sessions."""

    placement: str
    company: Company
    fill_s: tuple[float, ...]
    device: dict[str, int]  # bytes by owner when the company had ended


@dataclass(slots=True)
class Arms:
    """Every arm so far."""

    work: Work
    complete: bool = False
    arms: list[_Arm] = field(default_factory=list)

    @property
    def trouble(self) -> str:
        """See Found."""
        for number, arm in enumerate(self.arms[1:], 1):
            names = (f"with {self.arms[0].placement}", f"with {arm.placement} (arm {number})")
            found = differs(self.arms[0].company.token_ids, arm.company.token_ids, names)
            if found:
                return found
        return ""

    @property
    def offload_over_resident(self) -> float | None:
        """Mean tokens a second of all sessions, offload over resident; None without both."""
        speeds = {
            name: [arm.company.tokens_per_second for arm in self.arms if arm.placement == name] for name in ("offload", "resident")
        }  # fmt: skip
        return statistics.fmean(speeds["offload"]) / statistics.fmean(speeds["resident"]) if all(speeds.values()) else None

    def fields(self) -> dict[str, Any]:
        """See Found."""
        shown, times = not self.trouble, absolute(self.work.engine)
        return {
            "arms": [
                {"placement": arm.placement, "device_bytes": arm.device} | company_fields(arm.company, times=times, shown=shown)
                | ({"fill_s": list(arm.fill_s)} if shown and times else {})
                for arm in self.arms
            ],
            "offload_over_resident": self.offload_over_resident if shown else None,
        }  # fmt: skip

    def table(self) -> Table:
        """See Found."""
        lengths, times = self.work.lengths[0], not self.trouble and absolute(self.work.engine)
        title = f"{self.work.plan.counts[0]} sessions of {lengths.history + lengths.prompt:,} rows at once"
        drawn = Table(title=title, title_justify="left")
        for column in ("arm", "misses", "output", *(("tok/s each", "tok/s", "step us", "longest ms", "stalls") if times else ())):
            drawn.add_column(column, justify="right", overflow="fold")
        for arm in self.arms:
            each, rate = arm.company, arm.company.miss_rate
            cells = [arm.placement, "-" if rate is None else f"{rate:.2%}", sha_of(each)[:12]]
            if times:
                cells += [f"{each.slowest_tokens_per_second:.1f}", f"{each.tokens_per_second:.1f}", f"{1e6 * each.step_s:.0f}"]
                cells += [f"{1e3 * each.longest_s:.1f}", str(each.stalls)]
            drawn.add_row(*cells)
        return drawn

    def said(self) -> str:
        """See Found."""
        ratio = self.offload_over_resident
        return "all outputs equal" + ("" if ratio is None else f"; tokens a second of all, offload over resident: {ratio:.4f}")


async def run_resident(work: Work, watch: Watch, piece: Piece) -> Arms:
    """The arms in order. Raises ForebayError."""
    found, kept, began_s = Arms(work), Kept(), time.monotonic()
    for name in work.plan.placements:
        if time.monotonic() - began_s > work.plan.limit_s:
            _log.warning("sessions.cut_short", before=name, seconds=round(time.monotonic() - began_s, 1))
            return found
        config = dataclasses.replace(work.engine, placement=name)  # type: ignore[arg-type]  # checked by the plan
        try:
            found.arms.append(await _arm(work, config, watch, kept))
        finally:
            await forget_engines(config)
        _log.info("sessions.together", placement=name, seconds=round(time.monotonic() - began_s, 1))
        piece(found)
    found.complete = True
    return found


async def _arm(work: Work, config: EngineConfig, watch: Watch, kept: Kept) -> _Arm:
    name, numbers = config.placement, range(work.plan.counts[0])
    loading = f"{name}: loading"
    async with Engine.open(
        work.plan.model, config, progress=lambda done, total: watch(loading, done, total), weights=kept.model
    ) as engine:  # fmt: skip
        kept.model = engine.stage.model
        fleet = await fill(engine, work.lengths[0], len(numbers), watch)
        if len(numbers) > 1:
            await fleet.turn(numbers, work.plan.new_tokens, f"{name}: rehearsal", watch, rehearsal=True)
        company = await fleet.turn(numbers, work.plan.new_tokens, f"{name}: decoding", watch)
        return _Arm(name, company, fleet.fill_s, device_bytes(engine))
