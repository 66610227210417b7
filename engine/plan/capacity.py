"""How much fits on some machines, and what binds first.

Holds `make_plan`. Knows no output format.
1. A card binds by weights, append ring and sessions against its bytes less what the engine keeps for activations; a node by the blocks of
   its stages against its arena.
2. Sessions are counted as admission counts them: everything each can need is reserved before it starts.
3. Stages are cut for the most sessions that fit with any cut, so that how many fit does not depend on how many are asked for.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.model.config import ModelConfig
from engine.plan.boxes import Boxes
from engine.plan.stages import Cuts, KeyForm, Rules, StagePlan
from engine.plan.weights import WeightForm, checkpoint_bytes

__all__ = ["Ask", "Bind", "NodePlan", "Plan", "make_plan"]

_SESSIONS_MAX = 1 << 20  # where nothing binds

Binds: TypeAlias = Literal["weights", "VRAM", "RAM"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What shall fit."""

    tokens: int  # rows a session may reach: prompt and new tokens
    sessions: int
    form: WeightForm
    mtp: bool
    keys: KeyForm = "auto"
    replicas: int = 1
    arena_bytes: int = 0  # of a node; 0: all that the machine may give

    def __post_init__(self) -> None:
        for flag, value in (("--context", self.tokens), ("--sessions", self.sessions)):
            if value < 1:
                raise BadSetting(f"{flag} must be at least 1, not {value}")
        if self.replicas not in (1, 2):
            raise BadSetting(f"--mirror-replicas must be 1 or 2, not {self.replicas}")


@dataclass(frozen=True, slots=True)
class Bind:
    """What is exhausted first: where, and how many sessions that leaves."""

    what: Binds
    where: str
    sessions: int
    room_bytes: int  # for sessions, on the card or in the node's RAM; negative: the weights alone are too many
    session_bytes: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node's RAM."""

    node: int
    session_rows: int  # bytes of packed rows a session
    session_keys: int  # bytes of mirrored index keys a session
    arena_bytes: int

    @property
    def session_bytes(self) -> int:
        """All of one session's."""
        return self.session_rows + self.session_keys


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked, the machines, and what fits."""

    model: str
    ask: Ask
    boxes: Boxes
    placement: str
    hot_rows: int
    row_bytes: int
    key_bytes: int
    checkpoint_bytes: int
    history_bytes: int  # packed rows of one session of `ask.tokens`, all layers, once, not rounded to blocks
    stages: tuple[StagePlan, ...]
    nodes: tuple[NodePlan, ...]
    binds: tuple[Bind, ...]  # cards, then nodes; each with the sessions it leaves
    resident_sessions: int  # that would fit with all rows on the cards
    tokens_max: int  # the longest history that `ask.sessions` sessions may have; 0: not even a token
    notes: tuple[str, ...]

    @property
    def first(self) -> Bind:
        """What binds first."""
        return min(self.binds, key=lambda bind: (bind.sessions, bind.room_bytes))

    @property
    def sessions_max(self) -> int:
        """Sessions of `ask.tokens` that fit together with the best cut."""
        return self.first.sessions

    @property
    def fits(self) -> bool:
        """Whether what was asked fits."""
        return self.sessions_max >= self.ask.sessions


def make_plan(model: str, config: ModelConfig, engine: EngineConfig, boxes: Boxes, ask: Ask) -> Plan:
    """Plan `ask` on `boxes`.

    Args: model: what to call it. engine: placement, hot rows, append chunk, row format and draft depth count.
    Raises: BadSetting: more tokens than the model's context, or more RAM for histories than a node has.
    """
    if ask.arena_bytes > boxes.ram_bytes:
        gib = 1 << 30
        raise BadSetting(f"--host-memory is {ask.arena_bytes / gib:,.2f} GiB and a node's --ram {boxes.ram_bytes / gib:,.2f}; ask for less")
    if ask.tokens > config.context_max:
        raise BadSetting(f"--context {ask.tokens} is more than the model's {config.context_max} tokens")
    rules = Rules(config, engine, ask.form, ask.mtp, boxes.cards_per_stage, ask.keys, ask.replicas)
    stages = _cut(boxes, ask, rules)
    nodes, binds = _against(boxes, ask, stages)
    resident = replace(rules, engine=replace(engine, placement="resident"))
    layout = stages[0].layout
    return Plan(
        model=model,
        ask=ask,
        boxes=boxes,
        placement=engine.placement,
        hot_rows=stages[0].session.hot_rows // (layout.layers * layout.row.row_bytes),
        row_bytes=layout.row.row_bytes,
        key_bytes=layout.key.key_bytes,
        checkpoint_bytes=checkpoint_bytes(config, ask.form, mtp=ask.mtp),
        history_bytes=ask.tokens * layout.row.row_bytes * sum(stage.layout.layers for stage in stages),
        stages=stages,
        nodes=nodes,
        binds=binds,
        resident_sessions=_sessions(boxes, ask, _cut(boxes, ask, resident)),
        tokens_max=_longest(boxes, ask, rules, stages),
        notes=_notes(engine, boxes),
    )


def _reach(tokens: int, engine: EngineConfig) -> int:
    """Positions that admission reserves: drafts reach past a session's end (`engine/loop.py`). `auto` may draft as deep as any."""
    return tokens + 3 * (7 if engine.draft_depth is None else engine.draft_depth)


def _arena(boxes: Boxes, ask: Ask) -> int:
    """Bytes of a node's RAM for histories."""
    return ask.arena_bytes or boxes.arena_bytes_max


def _against(boxes: Boxes, ask: Ask, stages: tuple[StagePlan, ...]) -> tuple[tuple[NodePlan, ...], tuple[Bind, ...]]:
    """What each node's RAM holds, and how many sessions each card and node leaves."""
    binds = []
    for number, stage in enumerate(stages):
        room = boxes.usable_card_bytes - stage.fixed
        sessions = max(0, room // stage.session.card)
        what: Binds = "weights" if room < 0 else "VRAM"
        binds.append(Bind(what, f"a card of stage {number}", sessions, room, stage.session.card))
    nodes = []
    arena = _arena(boxes, ask)
    for node in sorted({stage.node for stage in stages}):
        held = [stage.session for stage in stages if stage.node == node]
        plan = NodePlan(node, sum(each.host_rows for each in held), sum(each.host_keys for each in held), arena)
        nodes.append(plan)
        fits = arena // plan.session_bytes if plan.session_bytes else _SESSIONS_MAX
        binds.append(Bind("RAM", f"node {node}", fits, arena, plan.session_bytes))
    return tuple(nodes), tuple(binds)


def _sessions(boxes: Boxes, ask: Ask, stages: tuple[StagePlan, ...]) -> int:
    """Sessions of `ask.tokens` that fit with these stages."""
    return min(bind.sessions for bind in _against(boxes, ask, stages)[1])


def _cut(boxes: Boxes, ask: Ask, rules: Rules) -> tuple[StagePlan, ...]:
    """Stages with which as many sessions of `ask.tokens` fit as with any, cut for that number; how many are asked for plays no part."""
    cuts = Cuts(rules, boxes.stages, boxes.stages_a_node, _reach(ask.tokens, rules.engine))
    card, ram = boxes.usable_card_bytes, _arena(boxes, ask)
    most, step = 0, 1
    while most < _SESSIONS_MAX and (found := cuts.within(most + step, card, ram)) is not None:
        most, step = max(most + step, _sessions(boxes, ask, found)), 2 * step
    over = most + step
    while most + 1 < over:
        middle = (most + over) // 2
        most, over = (middle, over) if cuts.within(middle, card, ram) is not None else (most, middle)
    if most:
        return cuts.within(most, card, ram) or cuts.even(most)
    one = cuts.even(1)  # even one session is too many; where the weights alone are, the cut with the least of them
    return one if max(stage.fixed for stage in one) <= card else cuts.even(0)


def _longest(boxes: Boxes, ask: Ask, rules: Rules, stages: tuple[StagePlan, ...]) -> int:
    """Rows that each of the asked sessions may have, in whole blocks, with the stages as they are cut."""
    least, most = 0, rules.config.context_max // 64

    def fits(blocks: int) -> bool:
        grown = tuple(replace(stage, session=rules.session(stage.layout, _reach(64 * blocks, rules.engine))) for stage in stages)
        return min(bind.sessions for bind in _against(boxes, ask, grown)[1]) >= ask.sessions

    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return 64 * least


def _notes(engine: EngineConfig, boxes: Boxes) -> tuple[str, ...]:
    """What this engine does otherwise than planned, and what the plan leaves out."""
    notes = []
    if boxes.cards_per_stage > 1:
        notes.append("of two cards this engine keeps embedding, head and MTP block on the first; the plan halves them")
    if engine.placement == "resident":
        notes.append("resident sessions take RAM only while a barrier runs; none is counted")
    return tuple(notes)
