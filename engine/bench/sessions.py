"""Many sessions that decode at once: step times against their floor, and that nobody's tokens depend on the company.

Fills the histories once, lets each session generate alone, then runs companies of them over the same rows. Prints and writes nothing.

1. A session's first tokens in every company must be those it gave alone, and what it gave in one company those of another: else nothing
   is said of speed.
2. Before what is measured every batch size has stepped, so that kernels are compiled and steps recorded.
3. What is held is looked at when the largest company has ended and its sessions still have all their rows.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog
from rich.table import Table

from engine.bench.arm import Watch, forget_engines
from engine.bench.company import STALL_S, Company, Fleet, fill
from engine.bench.floor import copy_bandwidth
from engine.bench.holdings import BlockProof, Parts, blocks_of_sessions, facts, parts_of
from engine.bench.host import percentile
from engine.bench.many import Piece, Work, absolute
from engine.device import device_of
from engine.engine import Engine
from engine.errors import ForebayError

__all__ = ["Decoded", "company_fields", "differs", "run_decode", "sha_of"]

_log = structlog.get_logger("bench")


@dataclass(slots=True)
class Decoded:
    """Turns alone and together, and what was held at the end."""

    work: Work
    complete: bool = False
    open_s: float = 0.0  # weights, arena, warming up
    fill_s: tuple[float, ...] = ()
    alone: list[Company] = field(default_factory=list)  # by session
    together: list[Company] = field(default_factory=list)
    proof: BlockProof | None = None
    parts: tuple[Parts, ...] = ()  # by session
    held: dict[str, Any] = field(default_factory=dict)
    failed: str = ""  # what ended the run before its end; what was measured before stands
    bandwidths: tuple[float, ...] = ()  # bytes a second of a copy in the device, read plus written; before the run and behind it

    @property
    def trouble(self) -> str:
        """See Found."""
        alone = [one.token_ids[0] for one in self.alone]
        for company in self.together:
            found = differs(alone, company.token_ids, ("alone", f"among {company.sessions}"))
            if found:
                return found
        for one in self.together[:-1]:
            found = differs(one.token_ids, self.together[-1].token_ids, (f"among {one.sessions}", f"among {self.together[-1].sessions}"))
            if found:
                return found
        if self.proof is not None and not self.proof.apart:
            return f"{self.proof.shared} blocks are shared: the sessions have no histories of their own"
        return ""

    @property
    def bandwidth(self) -> float:
        """The larger one: a card that has just worked for minutes gives less, and a floor is not lower for that. 0 before any."""
        return max(self.bandwidths, default=0.0)

    def over_floor(self, company: Company) -> float | None:
        """A mean step over its floor; None before the bandwidth is known."""
        if not self.bandwidth or company.floor is None:
            return None
        return company.step_s * self.bandwidth / company.floor.total

    def gain(self, company: Company) -> dict[str, float] | None:
        """Tokens a second of all over those of one session, and the same of floors; None without a company of one."""
        one = next((each for each in self.together if each.sessions == 1), None)
        if one is None or one.floor is None or company.floor is None:
            return None
        floors = company.sessions * one.floor.total / company.floor.total
        speed = company.tokens_per_second / one.tokens_per_second
        return {"aggregate_over_one": speed, "floors": floors, "aggregate_of_floors": speed / floors}

    def fields(self) -> dict[str, Any]:
        """See Found."""
        shown, times = not self.trouble, absolute(self.work.engine)
        found: dict[str, Any] = {
            "companies": [
                company_fields(each, times=times, shown=shown)
                | ({"step_over_floor": self.over_floor(each), "gain": self.gain(each)} if shown else {})
                for each in self.together
            ],
            "blocks": None if self.proof is None else asdict(self.proof) | {"apart": self.proof.apart},
            "session_device_bytes": [asdict(each) for each in self.parts], "held": self.held, "failed": self.failed or None,
        }  # fmt: skip
        if shown and times:
            first = [one.first_token_s[0] for one in self.alone]
            found |= {
                "open_s": self.open_s, "fill_s": list(self.fill_s), "first_token_alone_s": first, "copy_bytes_per_second": self.bandwidth,
                "copies_bytes_per_second": list(self.bandwidths),
            }  # fmt: skip
        return found

    def table(self) -> Table:
        """See Found."""
        lengths, times = self.work.lengths[0], absolute(self.work.engine)
        drawn = Table(title=f"decoding at once, {lengths.history + lengths.prompt:,} rows and {lengths.new:,} new", title_justify="left")
        titles = ["sessions", "misses", "output"]
        if not self.trouble:
            titles += ["step us p50", "p90", "p99", "tok/s each", "tok/s", "first token s", "longest ms"] if times else []
            titles += ["stalls", "step/floor", "of one's tok/s", "of floors"]
        for title in titles:
            drawn.add_column(title, justify="right", overflow="fold")
        for each in self.together:
            rate = each.miss_rate
            drawn.add_row(str(each.sessions), "-" if rate is None else f"{rate:.2%}", sha_of(each)[:12], *self._cells(each, times))
        return drawn

    def _cells(self, each: Company, times: bool) -> list[str]:
        if self.trouble:
            return []
        cells, gain, over = [], self.gain(each), self.over_floor(each)
        if times:
            cells += [f"{1e6 * percentile(each.steps_s, percent):.0f}" for percent in (50, 90, 99)]
            cells += [f"{each.slowest_tokens_per_second:.1f}", f"{each.tokens_per_second:.1f}"]
            cells += [f"{max(each.first_token_s):.2f}", f"{1e3 * each.longest_s:.1f}"]
        cells += [str(each.stalls), "-" if over is None else f"{over:.3f}"]
        return cells + (["-", "-"] if gain is None else [f"{gain['aggregate_over_one']:.3f}", f"{gain['aggregate_of_floors']:.3f}"])

    def said(self) -> str:
        """See Found."""
        proof = self.proof
        blocks = "" if proof is None else f"; {len(proof.blocks)} x {max(proof.blocks):,} blocks, {proof.shared} shared"
        tokens = min((len(one.token_ids[0]) for one in self.alone), default=0)
        failed = f"; {self.failed}" if self.failed else ""
        return f"first {tokens} tokens of {len(self.alone)} sessions as when alone{blocks}{failed}"


def differs(some: Any, others: Any, names: tuple[str, str]) -> str:
    """Where sessions' tokens first differ, as far as both go; empty: nowhere."""
    for session, (one, other) in enumerate(zip(some, others, strict=False)):
        for place, (token, instead) in enumerate(zip(one, other, strict=False)):
            if token != instead:
                return f"token {place} of session {session} is {token} {names[0]} and {instead} {names[1]}"
    return ""


def sha_of(company: Company) -> str:
    """Of all tokens of all sessions."""
    return hashlib.sha256(json.dumps(company.token_ids).encode()).hexdigest()


def company_fields(company: Company, *, times: bool, shown: bool) -> dict[str, Any]:
    """A company as JSON values; times only where they mean anything, and speed only where outputs are equal.

    `first_token_s`: of each session, from the common begin. `stalls`: waits of more than 200 ms between two tokens of a session.
    """
    found: dict[str, Any] = {
        "sessions": company.sessions, "tokens": [len(ids) for ids in company.token_ids], "sha256": sha_of(company),
        "hits": company.hits, "misses": company.misses, "miss_rate": company.miss_rate,
        "floor_bytes": None if company.floor is None else asdict(company.floor),
    }  # fmt: skip
    if shown and times and company.steps_s:
        micro = [1e6 * step for step in company.steps_s]
        found |= {
            "step_us": {
                "mean": sum(micro) / len(micro), "p50": percentile(micro, 50), "p90": percentile(micro, 90), "p99": percentile(micro, 99),
                "max": max(micro),
            },
            "tokens_per_second": company.tokens_per_second, "slowest_tokens_per_second": company.slowest_tokens_per_second,
            "window_s": company.window_s, "window_tokens": list(company.window_tokens), "first_token_s": list(company.first_token_s),
            "longest_wait_ms": 1e3 * company.longest_s, "stalls": company.stalls, "stall_ms": 1e3 * STALL_S,
        }  # fmt: skip
    return found


async def run_decode(work: Work, watch: Watch, piece: Piece) -> Decoded:
    """All of it in one engine. Raises ForebayError."""
    found, began_s = Decoded(work, bandwidths=(copy_bandwidth(device_of(work.engine)),)), time.monotonic()
    await forget_engines(work.engine)  # the copies' buffers
    try:
        async with Engine.open(work.plan.model, work.engine, progress=lambda done, total: watch("loading", done, total)) as engine:
            found.open_s = time.monotonic() - began_s
            _log.info("engine.opened", seconds=round(found.open_s, 1))
            await _run(engine, found, began_s, watch, piece)
    finally:
        await forget_engines(work.engine)
    found.bandwidths += (copy_bandwidth(device_of(work.engine)),)
    return found


async def _run(engine: Engine, found: Decoded, began_s: float, watch: Watch, piece: Piece) -> None:
    work, most = found.work, max(found.work.plan.counts)
    fleet = await fill(engine, work.lengths[0], most, watch)
    found.fill_s = fleet.fill_s
    for number in range(most):
        found.alone.append(await fleet.turn((number,), work.plan.alone_tokens, "alone", watch))
    _log.info("sessions.alone", sessions=most, seconds=round(time.monotonic() - began_s, 1))
    if most > 1:
        await fleet.turn(range(most), work.plan.new_tokens, "rehearsal", watch, rehearsal=True)
    for count in work.plan.counts:
        if time.monotonic() - began_s > work.plan.limit_s:
            _log.warning("sessions.cut_short", before=count, seconds=round(time.monotonic() - began_s, 1))
            break
        try:
            found.together.append(await fleet.turn(range(count), work.plan.new_tokens, f"{count} at once", watch))
        except ForebayError as error:  # minutes of filling and measuring lie behind it
            found.failed = str(error)
            _log.error("sessions.failed", sessions=count, error=found.failed)
            break
        _log.info("sessions.together", sessions=count, seconds=round(time.monotonic() - began_s, 1))
        if count == most:
            _look(engine, fleet, found)
        piece(found)
    if found.proof is None:
        _look(engine, fleet, found)
    found.complete = len(found.together) == len(work.plan.counts)


def _look(engine: Engine, fleet: Fleet, found: Decoded) -> None:
    """What is held now."""
    found.proof = blocks_of_sessions(engine, fleet.ids)
    found.parts = tuple(parts_of(engine, session) for session in fleet.ids)
    found.held = facts(engine)
