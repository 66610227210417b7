"""What is simulated of the published two nodes: the check against their measured rows, and curves for what nobody has measured.

Knows the published rows (`article.py`), the model and how `forebay plan` cuts its stages. Draws nothing.

1. `check` runs every published row to its end, 1,024 tokens a session, as the rows were measured.
2. Curves run 96 tokens a session, more where sessions are few, and count while all decode.
3. A point is `sound` when no pass can have more than ROWS_HELD query rows: up to that the held-out rows agree, above it the one that
   there is does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.convert import Recipe
from engine.model.config import ModelConfig
from engine.model.named import NAMED
from engine.plan import Ask, Boxes, WeightForm, make_plan
from engine.simulation.article import MEASURED, NEW_TOKENS, Measured, acceptance, fitted, slowest_keys_share
from engine.simulation.costs import Machine, StageShape
from engine.simulation.pipeline import Load, Outcome, simulate

__all__ = [
    "ROWS_HELD",
    "Check",
    "Curve",
    "Doubt",
    "Nodes",
    "Picture",
    "Point",
    "PICTURES",
    "check",
    "doubts",
    "run_load",
    "slower",
    "two_nodes",
]

ROWS_HELD = 8
_M = 1 << 20
_NEW_TOKENS = 96
_TOKENS = 4000  # of all sessions together at least, so that drawn acceptance averages out
_SESSIONS = (1, 2, 3, 4, 6, 8, 10, 12, 15, 20, 25, 30)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The published two nodes, fitted."""

    machine: Machine
    stages: tuple[StageShape, ...]
    acceptance: float


@dataclass(frozen=True, slots=True)
class Check:
    """One published row beside its simulation. `with_outside`: by the second fit, for rows of ten sessions."""

    row: Measured
    outcome: Outcome
    with_outside: float | None

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.outcome.tokens_per_second / self.row.tokens_per_second - 1


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something that is not published, taken otherwise: what the rows of ten sessions then come to, in their order."""

    name: str
    simulated: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated load. `sound`: see above."""

    x: float
    tokens_per_second: float
    sound: bool
    step_ms: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a picture."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Curves over one quantity. `ticks`: values of x and what they are called."""

    name: str
    title: str
    x_label: str
    ticks: tuple[tuple[float, str], ...]
    curves: tuple[Curve, ...]
    logarithmic: bool = False


def two_nodes() -> Nodes:
    """Eight stages of two cards on two nodes, fitted to the rows that may be; cut for four-bit experts and the rest in block-FP8."""
    config = ModelConfig.read(NAMED["glm-5.3"])
    form = WeightForm("fp8", quantisation=Recipe({"experts": "int4"}, mtp=True).quantisation(config.layers))
    plan = make_plan("glm-5.3", config, EngineConfig(), Boxes(), Ask(_M, 15, form, mtp=True))
    stages = tuple(
        StageShape(stage.node, len(stage.layers), sum(config.full_layers[layer] for layer in stage.layers), stage.mtp)
        for stage in plan.stages
    )
    bf16 = 2
    machine = Machine(
        0.0, 0.0, head_bytes=bf16 * config.vocabulary * config.hidden, join_bytes=bf16 * 2 * config.hidden**2,
        key_bytes=plan.key_bytes, cards=plan.boxes.cards_per_stage, draft_reselects=not config.share_mtp_selection,
    )  # fmt: skip
    return Nodes(fitted(machine, stages), stages, acceptance())


def run_load(nodes: Nodes, load: Load) -> Outcome:
    """One load on the nodes."""
    return simulate(nodes.machine, nodes.stages, load)


def check(nodes: Nodes) -> tuple[Check, ...]:
    """Every published row and its simulation."""
    loads = [Load(row.sessions, row.depth, row.limit, row.history, NEW_TOKENS, nodes.acceptance) for row in MEASURED]
    outcomes = [run_load(nodes, load) for load in loads]
    [outside] = (
        outcome.tokens / row.tokens_per_second - outcome.seconds
        for row, outcome in zip(MEASURED, outcomes, strict=True)
        if row.role == "fit or held out"
    )
    return tuple(
        Check(row, outcome, outcome.tokens / (outcome.seconds + outside) if row.sessions > 1 else None)
        for row, outcome in zip(MEASURED, outcomes, strict=True)
    )


def doubts(nodes: Nodes) -> tuple[Doubt, ...]:
    """The rows of ten sessions with other draws, another cut of the stages, other acceptance and other links."""

    def rows(on: Nodes, seed: int = 0) -> tuple[float, ...]:
        loads = [Load(row.sessions, row.depth, row.limit, row.history, NEW_TOKENS, on.acceptance, seed) for row in MEASURED]
        return tuple(run_load(on, load).tokens_per_second for load in loads if load.sessions > 1)

    def refitted(stages: tuple[StageShape, ...], machine: Machine = nodes.machine) -> Nodes:
        return replace(nodes, stages=stages, machine=fitted(machine, stages))

    last = nodes.stages[-1].layers
    found = [Doubt(f"other draws of acceptance, {seed}", rows(nodes, seed)) for seed in range(1, 5)]
    for more in (1, -1):
        found.append(Doubt(f"{last + more} layers on the last stage", rows(refitted(_moved(nodes.stages, more)))))
    found += [Doubt(f"acceptance {share}, not fitted", rows(replace(nodes, acceptance=share))) for share in (0.70, 0.85)]
    for link_us in (0.0, 1000.0):
        found.append(Doubt(f"{link_us:.0f} us between nodes", rows(refitted(nodes.stages, replace(nodes.machine, link_us=link_us)))))
    return tuple(found)


def _moved(stages: tuple[StageShape, ...], more: int) -> tuple[StageShape, ...]:
    """The stages with `more` layers moved from the last but one to the last; indexers stay counted where they were."""
    *first, one, last = stages
    return (*first, replace(one, layers=one.layers - more), replace(last, layers=last.layers + more))


def slower(nodes: Nodes, share: float) -> Nodes:
    """Nodes that score keys at `share` of the copy rate, fitted anew: the fitted rows have histories too."""
    return replace(nodes, machine=fitted(replace(nodes.machine, keys_share=share), nodes.stages))


def _point(nodes: Nodes, x: float, *, sessions: int = 15, depth: int = 1, limit: int = 1, history: int = _M) -> Point:
    new_tokens = max(_NEW_TOKENS, _TOKENS // sessions)
    outcome = run_load(nodes, Load(sessions, depth, limit, history, new_tokens, nodes.acceptance))
    return Point(x, outcome.steady, min(sessions, limit) * (depth + 1) <= ROWS_HELD, outcome.step_ms)


def over_sessions(nodes: Nodes) -> Picture:
    """One to thirty sessions of 1M."""
    found = []
    for depth, limit in ((0, 1), (1, 1), (3, 1), (1, 4), (3, 4)):
        points = tuple(_point(nodes, count, sessions=count, depth=depth, limit=limit) for count in _SESSIONS)
        found.append(Curve(f"{_drafts(depth)}, {limit} a stage", points))
    share = slowest_keys_share(nodes.machine, nodes.stages)
    points = tuple(_point(slower(nodes, share), count, sessions=count) for count in _SESSIONS)
    found.append(Curve(f"1 draft, 1 a stage, keys scored at {100 * share:.2g}% of the copy rate", points))
    ticks = tuple((float(count), str(count)) for count in _SESSIONS)
    return Picture("sessions", "Tokens a second of all sessions, each with a history of 1M", "sessions", ticks, tuple(found))


def over_depth(nodes: Nodes) -> Picture:
    """No draft to seven."""
    found = []
    for count in (1, 4, 15, 30):
        found.append(Curve(_sessions(count), tuple(_point(nodes, depth, sessions=count, depth=depth) for depth in range(8))))
    ticks = tuple((float(depth), str(depth)) for depth in range(8))
    return Picture("depth", "Tokens a second over drafts a step, 1M a session, 1 session a stage", "drafts a step", ticks, tuple(found))


def over_limit(nodes: Nodes) -> Picture:
    """One session a stage to eight."""
    found, limits = [], (1, 2, 3, 4, 6, 8)
    for count, depth in ((10, 0), (10, 1), (30, 0), (30, 1)):
        points = tuple(_point(nodes, limit, sessions=count, depth=depth, limit=limit) for limit in limits)
        found.append(Curve(f"{_sessions(count)}, {_drafts(depth)}", points))
    ticks = tuple((float(limit), str(limit)) for limit in limits)
    title = "Tokens a second over the decode batch limit, 1M a session"
    return Picture("limit", title, "sessions that a stage decodes together", ticks, tuple(found))


def over_history(nodes: Nodes) -> Picture:
    """32K to 1M a session, and what slower scoring would do."""
    found, powers = [], range(15, 21)
    for share in (nodes.machine.keys_share, 0.1, slowest_keys_share(nodes.machine, nodes.stages)):
        on = slower(nodes, share)
        points = tuple(_point(on, 1 << power, history=1 << power) for power in powers)
        found.append(Curve(f"keys scored at {100 * share:.2g}% of the copy rate", points))
    ticks = tuple((float(1 << power), f"{1 << (power - 10)}K" if power < 20 else "1M") for power in powers)
    title = "Tokens a second of 15 sessions over their history, 1 draft, 1 session a stage"
    return Picture("history", title, "history of each session", ticks, tuple(found), logarithmic=True)


PICTURES: tuple[Callable[[Nodes], Picture], ...] = (over_sessions, over_depth, over_limit, over_history)


def _drafts(depth: int) -> str:
    return "no drafts" if depth == 0 else f"{depth} draft{'s' * (depth > 1)}"


def _sessions(count: int) -> str:
    return f"{count} session{'s' * (count > 1)}"
