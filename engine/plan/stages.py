"""The layers of each stage, and what weights and sessions take of its cards and of its node's RAM.

Knows no capacity: `capacity.py` compares with what there is.

1. Stages are cut where the fullest card is least full, with the sessions that were asked for; a cut may go through a selection group, whose
   second part then has a slot map and, as the engine's layout has it, index keys of its own.
2. The first stage has the embedding, the last the final norm, head and MTP block, and the embedding again if there is such a block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

__all__ = ["KeyForm", "Rules", "SessionBytes", "StagePlan", "divide"]

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


def divide(rules: Rules, stages: int, stages_a_node: int, tokens: int, sessions: int) -> tuple[StagePlan, ...]:
    """Cut the layers into `stages` stages (fewer if there are fewer layers), for `sessions` sessions of `tokens` rows."""
    whole = rules.config.layers
    stages = min(stages, whole)

    def stage(number: int, layers: range) -> StagePlan:
        layout = rules.layout(layers)
        mtp = rules.mtp and layers.stop == whole
        session = rules.session(layout, tokens)
        return StagePlan(
            number // stages_a_node, layers, mtp, layout, rules.stage_weights(layers), rules.append_ring(layout), session
        )  # fmt: skip

    def load(first: int, stop: int) -> int:
        each = stage(0, range(first, stop))
        return each.fixed + sessions * each.session.card

    cuts = _cuts(whole, stages, load) if stages > 1 else [(0, whole)]
    return tuple(stage(number, range(first, stop)) for number, (first, stop) in enumerate(cuts))


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
