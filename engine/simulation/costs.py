"""How long a stage works on a batch: a cost model of few parameters, each with a physical meaning.

Holds `Machine` (the parameters) and `StageShape` (what a stage has). Knows no sessions, no order of events and no measured throughput.

    pass of a stage  = layers x (layer_us + row_us x (rows - 1)) + full layers x keys of all members' histories / key rate
    last stage       = that + head + drafts x (one layer for a row a session + join + head), and the MTP block's keys once
    between stages   = hop_us on a node, link_us between nodes and back to the first stage

1. `layer_us` and `row_us` are fitted (`article.py`): everything a layer does for one query row (launches, weights, the exchange between
   owner and peer, attention over the selected rows, the hot cache's round), and what each further row adds, whosever it is.
2. Key rate: bytes of index keys a second, each card reading half. `keys_share` of the copy rate is what scoring 1,048,576 keys and the part
   of selecting that grows with them reach on an H200: 268.4 MB in 69.6 + 10.1 us where copying moves 4.25 TB/s
   (docs/benchmarks/h200_kernels.json).
3. `copy_share`: a copy reaches 4.25 of the H200's 4.8 TB/s by data sheet; the W7900's data sheet says 864 GB/s.
4. The nodes' links are not published; their delays are guesses, small against a step, and delay without occupying a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Machine", "StageShape"]


@dataclass(frozen=True, slots=True)
class StageShape:
    """One stage: how many layers it has and how many of those have an indexer; `last` has the head and the MTP block."""

    node: int
    layers: int
    full: int
    last: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """Parameters of the nodes and the model. Times in microseconds."""

    layer_us: float
    row_us: float
    head_bytes: int
    join_bytes: int
    key_bytes: int = 256  # bf16
    cards: int = 2  # of a stage
    card_bytes_per_us: float = 864e3
    copy_share: float = 0.885
    keys_share: float = 0.79
    hop_us: float = 20.0
    link_us: float = 200.0
    draft_reselects: bool = False  # whether every draft scores the block's keys, or the first one alone

    def keys_us(self, keys: int) -> float:
        """Scoring `keys` index keys of one layer and selecting among them."""
        return keys * self.key_bytes / (self.cards * self.card_bytes_per_us * self.copy_share * self.keys_share)

    def product_us(self, weight_bytes: int) -> float:
        """A product that is bound by its weight, halved over the cards."""
        return weight_bytes / (self.cards * self.card_bytes_per_us * self.copy_share)

    def layers_us(self, layers: int, rows: int) -> float:
        """`layers` layers of `rows` query rows, without scoring."""
        assert rows >= 1, f"a pass of {rows} rows"
        return layers * (self.layer_us + self.row_us * (rows - 1))

    def pass_us(self, stage: StageShape, rows: Sequence[int], histories: Sequence[int]) -> float:
        """One pass of a stage over a batch: query rows and history of each member; on the last stage with head and drafts."""
        assert len(rows) == len(histories), f"{len(rows)} members, {len(histories)} histories"
        total = self.layers_us(stage.layers, sum(rows)) + stage.full * self.keys_us(sum(histories))
        if not stage.last:
            return total
        depth = max(rows) - 1
        return total + self.product_us(self.head_bytes) + self._drafts_us(depth, len(rows), sum(histories))

    def _drafts_us(self, depth: int, members: int, keys: int) -> float:
        """`depth` drafts a member, one after another, all members together."""
        if depth == 0:
            return 0.0
        each = self.layers_us(1, members) + self.product_us(self.join_bytes) + self.product_us(self.head_bytes)
        return depth * each + (depth if self.draft_reselects else 1) * self.keys_us(keys)

    def between_us(self, one: StageShape, other: StageShape) -> float:
        """From the end of a pass on one stage to its arrival at another."""
        return self.hop_us if one.node == other.node else self.link_us

    def step_us(self, stages: Sequence[StageShape], depth: int, history: int) -> float:
        """One step of one session alone, from its first stage back to it."""
        ways = zip(stages, [*stages[1:], stages[0]], strict=True)
        return sum(self.pass_us(one, [depth + 1], [history]) + self.between_us(one, other) for one, other in ways)
