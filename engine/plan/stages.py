"""The layers of each stage, and what weights and sessions take of its cards and of its node's RAM.

Knows no capacity: `capacity.py` compares with what there is.

1. Stages are cut where the fullest card is least full with some number of sessions, or where a node's RAM takes them; a cut
   may go through a selection group, whose second part then has a slot map and, as the engine lays it out, index keys of its own.
2. The first stage has the embedding, the last the final norm, head and MTP block, and the embedding again if there is such a block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from engine.config import HOT_ROWS, EngineConfig
from engine.model.config import ModelConfig
from engine.plan.weights import LayerBytes, WeightForm, layer_bytes
from kernels.layout import BlockLayout
from memory.append import blocks_of, pages_of
from memory.needs import hot_bytes, hot_slots, offload_needs, page_bytes, resident_needs, ring_bytes
from memory.pool import allocated
from memory.ring import AppendRing
from memory.row import key_format, key_layout, row_layout

__all__ = ["Cuts", "KeyForm", "Rules", "SessionBytes", "StagePlan"]

KeyForm: TypeAlias = Literal["auto", "bf16", "f32", "e4m3"]


@dataclass(frozen=True, slots=True)
class SessionBytes:
    """Of one session on one card, by what it is for; `host` in RAM, by stage."""

    keys: int = 0  # index-key pages
    hot_rows: int = 0  # slots of the hot caches
    maps: int = 0  # slot maps and pins of the hot caches
    ring: int = 0
    rows: int = 0  # blocks of a resident history
    tables: int = 0  # block and page tables, state, hidden states
    host_rows: int = 0  # packed rows in RAM, all replicas
    host_keys: int = 0  # mirrored index keys in RAM, all replicas

    @property
    def card(self) -> int:
        """All of a card."""
        return self.keys + self.hot_rows + self.maps + self.ring + self.rows + self.tables

    @property
    def host(self) -> int:
        """All of the node's RAM."""
        return self.host_rows + self.host_keys


@dataclass(frozen=True, slots=True)
class Rules:
    """What every stage of a plan has in common."""

    config: ModelConfig
    engine: EngineConfig
    form: WeightForm
    mtp: bool
    cards: int  # of a stage
    keys: KeyForm = "auto"
    replicas: int = 1  # of the mirror

    @property
    def weights(self) -> Mapping[str, LayerBytes]:
        """Bytes of weights by layer, and of embedding, norm and head."""
        return layer_bytes(self.config, self.form, mtp=self.mtp, cards=self.cards)

    def layout(self, layers: range) -> BlockLayout:
        """A stage's block, as `open_stage` lays it out."""
        config, engine = self.config, self.engine
        key = key_layout(key_format(self.keys, engine.row_format), config.index_width)
        groups = config.local_groups(layers, mtp=self.mtp and layers.stop == config.layers)
        return BlockLayout(row_layout(engine.row_format, config.latent, config.rope), key, groups)

    def stage_weights(self, layers: range) -> LayerBytes:
        """Weights of a stage's cards."""
        first, last = layers.start == 0, layers.stop == self.config.layers
        parts = [str(layer) for layer in layers] + ["embed"] * (first or (last and self.mtp)) + ["norm", "head"] * last
        parts += [str(self.config.layers)] * (last and self.mtp)
        weights = self.weights
        return sum((weights[part] for part in parts), LayerBytes())

    def append_ring(self, layout: BlockLayout) -> int:
        """Device bytes of a stage's append ring, on each card; a resident stage has none."""
        if self.engine.placement == "resident":
            return 0
        return allocated(AppendRing.blocks_for(self.engine.append_chunk_rows) * layout.block_bytes)

    def session(self, layout: BlockLayout, tokens: int) -> SessionBytes:
        """What a session that may reach `tokens` rows takes of each card and of RAM."""
        config, blocks = self.config, blocks_of(tokens)
        whole_keys = page_bytes(layout, tokens)
        keys = -(-pages_of(tokens) // self.cards) * (whole_keys // pages_of(tokens))
        if self.engine.placement == "resident":
            rows = blocks * allocated(layout.block_bytes)
            needs = resident_needs(layout, config.hidden, tokens)
            return SessionBytes(keys=keys, rows=rows, tables=needs.device_bytes - whole_keys - rows)
        hot_max = self.engine.hot_rows or HOT_ROWS
        needs = offload_needs(layout, config.hidden, hot_max, config.top_k, tokens)
        hot = hot_bytes(layout, hot_max, config.top_k, tokens)
        slots = layout.layers * hot_slots(hot_max, config.top_k, 64 * blocks) * layout.row.row_bytes
        ring = ring_bytes(layout)
        return SessionBytes(
            keys=keys, hot_rows=slots, maps=hot - slots, ring=ring, tables=needs.device_bytes - whole_keys - hot - ring,
            host_rows=self.replicas * blocks * layout.keys_offset,
            host_keys=self.replicas * (needs.host_bytes - blocks * layout.keys_offset),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage. Bytes are of each of its cards, but for `weights.whole` and the session's host bytes."""

    node: int
    layers: range
    mtp: bool
    layout: BlockLayout
    weights: LayerBytes
    append_ring: int
    session: SessionBytes

    @property
    def fixed(self) -> int:
        """What a card holds without any session."""
        return self.weights.card + self.append_ring

    def load(self, sessions: int) -> int:
        """What a card holds with `sessions` sessions."""
        return self.fixed + sessions * self.session.card


class Cuts:
    """Ways to cut a model's layers into `stages` stages (fewer if there are fewer layers), for sessions of `tokens` rows."""

    def __init__(self, rules: Rules, stages: int, stages_a_node: int, tokens: int) -> None:
        self._rules, self._tokens = rules, tokens
        self._layers = rules.config.layers
        self._stages, self._stages_a_node = min(stages, self._layers), stages_a_node
        self._parts: dict[tuple[int, int], StagePlan] = {}

    def even(self, sessions: int) -> tuple[StagePlan, ...]:
        """The cut whose fullest card is least full with `sessions` sessions."""

        def load(first: int, stop: int) -> int:
            return self._part(first, stop).load(sessions)

        return self._placed(_cuts(self._layers, self._stages, load) if self._stages > 1 else [(0, self._layers)])

    def within(self, sessions: int, card_bytes: int, ram_bytes: int) -> tuple[StagePlan, ...] | None:
        """A cut with which every card and every node's RAM holds `sessions` sessions, the even one if it does; None: no cut does."""
        even = self.even(sessions)
        if max(stage.load(sessions) for stage in even) > card_bytes:
            return None  # nor does any other: the fullest card of this one is least full
        held = [sum(stage.session.host for stage in even if stage.node == node) for node in range(even[-1].node + 1)]
        if sessions * max(held) <= ram_bytes:
            return even
        if sessions * self._part(0, self._layers).session.host > ram_bytes * len(held):
            return None  # a cut never takes less RAM than no cut
        return self._by_nodes(sessions, card_bytes, ram_bytes, len(held))

    def _by_nodes(self, sessions: int, card_bytes: int, ram_bytes: int, nodes: int) -> tuple[StagePlan, ...] | None:
        """Any cut within, node after node: up to each layer the stages of one node with the least RAM."""
        reached: dict[int, list[tuple[int, int]]] = {0: []}
        for node in range(nodes):
            stages = min(self._stages_a_node, self._stages - node * self._stages_a_node)
            grown: dict[int, list[tuple[int, int]]] = {}
            for start, before in reached.items():
                held = {start: (0, before)}
                for _ in range(stages):
                    more: dict[int, tuple[int, list[tuple[int, int]]]] = {}
                    for first, (host, parts) in held.items():
                        for stop in range(first + 1, self._layers + 1):
                            part = self._part(first, stop)
                            total = host + part.session.host
                            if part.load(sessions) > card_bytes or sessions * total > ram_bytes:
                                break  # more layers take more
                            if stop not in more or total < more[stop][0]:
                                more[stop] = (total, [*parts, (first, stop)])
                    held = more
                for stop, (_, parts) in held.items():
                    grown.setdefault(stop, parts)
            reached = grown
        found = reached.get(self._layers)
        return None if found is None else self._placed(found)

    def _part(self, first: int, stop: int) -> StagePlan:
        part = self._parts.get((first, stop))
        if part is None:
            rules, layers = self._rules, range(first, stop)
            layout = rules.layout(layers)
            part = self._parts[first, stop] = StagePlan(
                0, layers, rules.mtp and stop == self._layers, layout, rules.stage_weights(layers), rules.append_ring(layout),
                rules.session(layout, self._tokens),
            )  # fmt: skip
        return part

    def _placed(self, cuts: list[tuple[int, int]]) -> tuple[StagePlan, ...]:
        return tuple(replace(self._part(*cut), node=number // self._stages_a_node) for number, cut in enumerate(cuts))


def _cuts(layers: int, stages: int, load: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """Consecutive parts, none empty, whose largest load is least, and among such the most even ones."""
    of = {(first, stop): load(first, stop) for stop in range(1, layers + 1) for first in range(stop)}
    best = {stop: ((of[0, stop], of[0, stop] ** 2), 0) for stop in range(1, layers + 1)}  # (largest, squares), the last part's begin
    kept = [best]
    for part in range(2, stages + 1):
        grown: dict[int, tuple[tuple[int, int], int]] = {}
        for stop in range(part, layers + 1):
            grown[stop] = min(
                ((max(best[first][0][0], of[first, stop]), best[first][0][1] + of[first, stop] ** 2), first)
                for first in range(part - 1, stop)
            )
        best = grown
        kept.append(best)
    stop, parts = layers, []
    for each in reversed(kept):
        first = each[stop][1]
        parts.append((first, stop))
        stop = first
    return parts[::-1]
