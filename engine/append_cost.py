"""What a unit of an append takes beside a decode step: one number for each, in bytes that a step could read meanwhile.

Holds arithmetic over sizes. It need not be right, only right enough that units between two steps take about as long as they are meant to:
the same numbers in every run, where times would make a run depend on the machine's mood and no tape could be replayed.

1. Reading a byte counts 1. A device multiplies or adds about 80 times while it reads one: on an H200 whose steps read 3.5 TB/s the
   experts of 1,024 rows were multiplied at 280 TFLOP/s, and rows scored about as fast. Attention over rows that each query row picks
   unpacks every one that it multiplies: 25 times (1 December 2026, by a tape of `b979f95` that was not kept). A core of a CPU about 4
   times, either.
2. A product takes the longer of reading its weight and multiplying.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engine.model.bytes import held_bytes, step_weights
from engine.model.config import ModelConfig
from engine.model.layer import LayerWeights
from engine.model.moe import MoeWeights
from engine.stage import Stage
from kernels.layout import BlockLayout

__all__ = ["AppendCost", "LayerSizes", "StepCost"]

_OPERATIONS_A_BYTE = {"cpu": 4}
# Times what bf16 keys take a byte, keys of e4m3: 1.37 for one row, 1.32 for 16 sessions (docs/benchmarks/h200_keys_and_integers.json).
_SCALED_READ = 1.34
_OPERATIONS_A_BYTE_DEVICE = 80
_ATTEND_OPERATIONS_A_BYTE_DEVICE = 25
_PASSES = 10  # over a row's scores: 64 rows over 491,520 keys are scored and chosen in 1.29 ms, 32 over 1,048,576 in 1.40, likewise


def _operations_a_byte(device: str) -> tuple[int, int]:
    """Of products and scores, and of attention."""
    operations = _OPERATIONS_A_BYTE.get(device)
    return (_OPERATIONS_A_BYTE_DEVICE, _ATTEND_OPERATIONS_A_BYTE_DEVICE) if operations is None else (operations, operations)


def _values(part: object) -> int:
    """Of every tensor of a weight."""
    if isinstance(part, Tensor):
        return part.numel()
    if isinstance(part, list | tuple):
        return sum(map(_values, part))
    fields = getattr(part, "__dataclass_fields__", {})
    return sum(_values(getattr(part, name)) for name in fields)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """(bytes, values) of the parts of a layer's weights: all that its costs depend on, so that another machine can count them.

    experts: all routed ones, `experts_count` of them; (0, 0) and 0 in a dense layer. mlp: a dense layer's, else shared expert and router.
    """

    full: bool
    input: tuple[int, int]
    attention: tuple[int, int]
    mlp: tuple[int, int]
    experts: tuple[int, int]
    experts_count: int

    @classmethod
    def of(cls, layer: LayerWeights) -> Self:
        """Of a layer that is loaded."""
        moe = layer.mlp
        mlp, experts, count = _size(moe), (0, 0), 0
        if isinstance(moe, MoeWeights):
            mlp, experts, count = _size(moe.shared, moe.router), _size(moe.gate_up, moe.down), moe.bias.shape[0]
        return cls(layer.full, _size(layer.down, layer.indexer), _size(layer.mla), mlp, experts, count)


def _size(*weights: object) -> tuple[int, int]:
    return held_bytes(weights), _values(weights)


class AppendCost:
    """Units of one stage's appends. Costs are counts of bytes."""

    def __init__(self, stage: Stage) -> None:
        self._config = stage.model.config
        self._head_bytes = held_bytes(stage.model.head)
        self._layout = stage.layout
        self._ratio, self._attend_ratio = _operations_a_byte(stage.device.type)
        self._sizes_of: dict[int, LayerSizes] = {}

    @classmethod
    def elsewhere(cls, config: ModelConfig, layout: BlockLayout, device: str) -> Self:
        """Of a stage without an output head on another machine, whose layers are given as `LayerSizes`."""
        cost = cls.__new__(cls)
        cost._config, cost._head_bytes, cost._layout = config, 0, layout
        cost._ratio, cost._attend_ratio = _operations_a_byte(device)
        cost._sizes_of = {}
        return cost

    def _sizes(self, layer: LayerWeights | LayerSizes) -> LayerSizes:
        if isinstance(layer, LayerSizes):
            return layer
        found = self._sizes_of.get(layer.layer)
        if found is None:
            found = self._sizes_of[layer.layer] = LayerSizes.of(layer)
        return found

    def _product(self, size: tuple[int, int], rows: int) -> int:
        return max(size[0], 2 * size[1] * rows // self._ratio)

    def begin(self, rows: int) -> int:
        """Embedding and tables."""
        return 16 * self._config.hidden * rows

    def write(self, layer: LayerWeights | LayerSizes, rows: int) -> int:
        """What a layer's input is multiplied to, rows and keys stored."""
        return self._product(self._sizes(layer).input, rows)

    def select(self, rows: int, keys: int) -> int:
        """Scores of `rows` rows over `keys` keys, and the choice among them."""
        operations = 2 * rows * keys * self._config.index_heads * self._config.index_width
        read = keys * self._layout.key.key_bytes
        return max(read, operations // self._ratio) + _PASSES * 4 * rows * keys

    def attend(self, layer: LayerWeights | LayerSizes, rows: int, keys: int) -> int:
        """Query, attention over the picks, output."""
        facts, row = self._config, self._layout.row
        picks = min(facts.top_k, keys)
        operations = 2 * rows * picks * facts.heads * (2 * row.latent + row.rope)
        return self._product(self._sizes(layer).attention, rows) + max(rows * picks * row.row_bytes // 8, operations // self._attend_ratio)

    def forward(self, layer: LayerWeights | LayerSizes, rows: int) -> int:
        """The MLP, or the experts that rows choose and the shared one."""
        sizes = self._sizes(layer)
        if not sizes.experts_count:
            return self._product(sizes.mlp, rows)
        experts, chosen = sizes.experts_count, rows * self._config.experts_per_token
        held, values = sizes.experts
        routed = max(held // experts * min(experts, chosen), 2 * (values // experts) * chosen // self._ratio)
        return routed + self._product(sizes.mlp, rows)

    def finish(self, rows: int, last: bool) -> int:
        """Copies of the chunk's blocks, and behind the last one the first token."""
        copied = rows * (self._layout.block_bytes // 64)
        return copied + (self._head_bytes if last else 0)


class StepCost:
    """Decode steps of one stage, beside which appends run. Costs are counts of bytes."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._weights_of: dict[int, int] = {}  # by the number of rows

    def step(self, positions: Iterable[int], drafts: int) -> int:
        """A step of sessions with so many rows each, and one more row a draft."""
        lengths = list(positions)
        rows = max(1, len(lengths) * (1 + drafts))
        weights = self._weights_of.get(rows)
        if weights is None:
            weights = self._weights_of[rows] = step_weights(self._stage.model, rows).total
        layout, picks = self._stage.layout, self._stage.model.config.top_k
        a_key = layout.key.key_bytes if not layout.key.scale_bytes else int(_SCALED_READ * layout.key.key_bytes)
        a_row = layout.layers * layout.row.row_bytes * (1 + drafts)
        return weights + sum(length * layout.key_layers * a_key + min(picks, length) * a_row for length in lengths)
