"""Sessions that decode in several stages beside the same in one: in virtual time, where each stage has its own device, and on this CPU.

In virtual time an operation of a layer takes the same whatever its rows, others a tenth, and the host nothing: what is lost is the
pipeline's own, bubbles and what passes between stages. On the CPU all stages share one machine and take a step whole: what is lost is what
the parts cost. Tokens a second of CPU time say that on a machine that others use, too. Tokens are compared before rates.

Rates are of the window in which all sessions decode: from the last one's second token to the first one's last. The bubble of a stage is the
share of the window in which its compute stream has nothing to run.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting
from engine.sampling import Sampling
from streams import Backend, CpuBackend, SeededOrder, Tape, TapeRecorder, VirtualBackend, picture
from streams.queued import Operation
from streams.tape import Completed, Header, Record, Submitted

__all__ = ["Found", "Plan", "as_json", "measure", "table"]

_LAYER_NS, _OTHER_NS = 10_000, 1_000
_HOST_ROUNDS = 16  # of the loop between two completions: the host is never what is waited for


@dataclass(slots=True)
class _InTime(SeededOrder):
    """Whatever is over first completes first; the host has done all that it can by then."""

    _left: int = field(init=False, default=_HOST_ROUNDS)

    def ready(self) -> bool:
        """Every so many rounds one completion."""
        self._left = _HOST_ROUNDS if self._left == 0 else self._left - 1
        return self._left == 0

    def choose(self, runnable: Sequence[Operation[Any]]) -> Operation[Any] | None:
        """The one that is over first."""
        return min(runnable, key=lambda one: (one.started_ns + self.duration_ns(one), one.number))

    def duration_ns(self, operation: Operation[Any]) -> int:
        """Layers cost, what is around them hardly."""
        return _LAYER_NS if operation.label.startswith(("layer.", "group.")) else _OTHER_NS


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs: `stages` as the setting has it, beside one; `micro_batches` likewise, for the run in virtual time."""

    model: Path
    stages: str
    sessions: int
    tokens: int  # of each
    pairs: int  # on the CPU


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one run. `busy`: of each stage's compute stream, a share of the window; in virtual time alone."""

    stages: str
    tokens_per_s: float
    tokens_per_cpu_s: float
    busy: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Runs by pairs, one stage first in the first, last in the second, and so on; and two steps of the pipeline drawn."""

    virtual: tuple[Rate, Rate]
    cpu: tuple[tuple[Rate, Rate], ...]
    drawn: bytes

    @property
    def virtual_ratio(self) -> float:
        """Of the rate of one stage on one device, by stages on one each."""
        return self.virtual[1].tokens_per_s / self.virtual[0].tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        """Of tokens a second of CPU time; the middle one of the pairs."""
        ratios = sorted(cut.tokens_per_cpu_s / one.tokens_per_cpu_s for one, cut in self.cpu)
        return ratios[len(ratios) // 2]


@dataclass(slots=True)
class _Heard:
    """Of one session: its tokens, and the times at which they came."""

    tokens: list[int] = field(default_factory=list)
    at_ns: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


async def _talk(engine: Engine, backend: Backend, number: int, tokens: int) -> _Heard:
    heard = _Heard()
    async for chunk in engine.generate([1 + number], Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)):
        for token in chunk.token_ids:
            heard.tokens.append(token)
            heard.at_ns.append(backend.clock.now_ns())
            heard.cpu_s.append(time.process_time())
    return heard


async def _run(plan: Plan, config: EngineConfig, backend: Backend) -> tuple[list[_Heard], tuple[int, int]]:
    """All sessions at once. Returns: what each heard, and the window in the backend's time."""
    async with Engine.open(plan.model, config, backend=backend) as engine:
        heard = await asyncio.gather(*(_talk(engine, backend, number, plan.tokens) for number in range(plan.sessions)))
    await backend.close()
    return heard, (max(one.at_ns[1] for one in heard), min(one.at_ns[-1] for one in heard))


def _rate(stages: str, heard: Sequence[_Heard], window: tuple[int, int], busy: tuple[float, ...] = ()) -> Rate:
    first, last = window
    if first >= last:
        raise BadSetting(f"{stages} stages: the sessions never decoded all at once; ask for more --tokens")
    inside = [(at, cpu) for one in heard for at, cpu in zip(one.at_ns, one.cpu_s, strict=True) if first < at <= last]
    cpu_s = [cpu for _, cpu in inside]
    spent = max(cpu_s) - min(cpu_s)
    return Rate(stages, 1e9 * len(inside) / (last - first), len(inside) / spent if spent else 0.0, busy)


def _busy(records: Sequence[Record], stages: int, window: tuple[int, int]) -> tuple[float, ...]:
    streams = {record.number: record.stream for record in records if isinstance(record, Submitted)}
    spent = dict.fromkeys((f"stage{number}.compute" for number in range(stages)), 0)
    for record in records:
        if isinstance(record, Completed) and record.started_ns >= 0 and streams.get(record.number) in spent:
            spent[streams[record.number]] += max(0, min(record.at_ns, window[1]) - max(record.started_ns, window[0]))
    return tuple(each / (window[1] - window[0]) for each in spent.values())


async def _virtually(plan: Plan, config: EngineConfig, lanes: int) -> tuple[Rate, list[list[int]], bytes]:
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    backend = VirtualBackend(_InTime(0), observer=recorder)
    heard, window = await _run(plan, replace(config, micro_batches=lanes), backend)
    recorder.flush()
    rate = _rate(config.stages, heard, window, _busy(records, lanes, window))
    shown = [record for record in records if not isinstance(record, Submitted) or record.stream.endswith((".compute", ".carry"))]
    middle = (window[0] + window[1]) // 2
    step = 2 * plan.sessions * 10**9 / rate.tokens_per_s
    return rate, [one.tokens for one in heard], picture(Tape(Header(), tuple(shown)), middle, middle + int(step))


async def measure(plan: Plan, config: EngineConfig) -> Found | None:
    """Run everything; None where tokens differ. Raises ForebayError."""
    config = replace(config, device="cpu", append_gap=1000.0, graphs="off", prefix_cache="off", peer="")
    one, cut = replace(config, stages="1"), replace(config, stages=plan.stages)
    lanes = int(plan.stages) if plan.stages.isdigit() else 1 + plan.stages.count(",")
    whole, wanted, _ = await _virtually(plan, one, 1)
    parts, got, drawn = await _virtually(plan, cut, lanes)
    if got != wanted:
        return None
    pairs = []
    for number in range(plan.pairs):
        rates = {}
        for each in (one, cut) if number % 2 == 0 else (cut, one):
            heard, window = await _run(plan, each, CpuBackend())
            if [talk.tokens for talk in heard] != wanted:
                return None
            rates[each.stages] = _rate(each.stages, heard, window)
        pairs.append((rates["1"], rates[plan.stages]))
    return Found((whole, parts), tuple(pairs), drawn)


def as_json(plan: Plan, found: Found, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, raw."""
    return {
        "plan": {**asdict(plan), "model": plan.model.name}, "machine": machine, "virtual": [asdict(rate) for rate in found.virtual],
        "virtual_ratio": found.virtual_ratio, "bubbles": [1 - busy for busy in found.virtual[1].busy],
        "cpu": [[asdict(rate) for rate in pair] for pair in found.cpu], "cpu_ratio": found.cpu_ratio,
    }  # fmt: skip


def table(found: Found) -> Table:
    """Ratios: times of a shared machine say nothing by themselves."""
    made = Table("", "of one stage's tokens/s", "of its tokens a CPU second", "stages busy")
    busy = " ".join(f"{share:.0%}" for share in found.virtual[1].busy)
    made.add_row("virtual time", f"{found.virtual_ratio:.1%}", "", busy)
    for number, (one, cut) in enumerate(found.cpu, 1):
        spent = cut.tokens_per_cpu_s / one.tokens_per_cpu_s
        made.add_row(f"CPU, pair {number}", f"{cut.tokens_per_s / one.tokens_per_s:.1%}", f"{spent:.1%}", "")
    return made
