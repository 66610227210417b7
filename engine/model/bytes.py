"""Bytes of weights that a step must read: what its time cannot go below, whatever the kernels do.

Holds `WeightBytes`, `step_weights` and `draft_weights`. Knows rows of a step by their number only; keys and rows of histories are the
memory layer's to count.

1. Counted once a step, however many rows: attention, indexers, dense and shared MLPs, routers, the head. An embedding counts its row.
2. Routed experts count as far as rows choose them. Which they are is known to the device alone: without a number from the caller no two
   rows share an expert while there are others.
3. Sizes are those of the tensors held, so a block-FP8 weight counts its values and its scales.
"""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from engine.model.glm import Model
from engine.model.layer import LayerWeights
from engine.model.moe import MoeWeights

__all__ = ["WeightBytes", "draft_weights", "held_bytes", "step_weights"]


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes read of each part of the model."""

    attention: int = 0  # with the norms before attention and MLP
    indexers: int = 0
    dense: int = 0
    shared: int = 0  # shared experts and routers
    experts: int = 0  # routed, as far as they are chosen
    outer: int = 0  # embedding rows, final norm, head
    mtp: int = 0  # making MTP rows

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def step_weights(model: Model, rows: int, *, experts: int | None = None) -> WeightBytes:
    """Of a step of `rows` query rows in all layers of a stage, which also makes the MTP row of each; without drafts.

    Args: experts: distinct routed experts a layer, 1 to all; None: what `rows` rows choose when no two share one.
    """
    parts = [_layer(layer, _touched(model, rows, experts)) for layer in model.layers]
    outer = held_bytes(model.norm) + held_bytes(model.head)
    if model.embedding is not None:
        outer += rows * held_bytes(model.embedding[0])
    mtp = 0
    if model.mtp is not None:
        # A committed row's MTP row is projected and stored; the block's attention and MLP are not run for it.
        block = model.mtp.layer
        mtp = held_bytes(
            [
                model.mtp.embedding_norm, model.mtp.hidden_norm, model.mtp.join, block.input_norm, block.mla.row_down, block.mla.row_norm,
                block.full_indexer.key_down, block.full_indexer.key_norm, block.full_indexer.key_bias,
            ]
        )  # fmt: skip
    return dataclasses.replace(_sum(parts), outer=outer, mtp=mtp)


def draft_weights(model: Model, rows: int, *, experts: int | None = None) -> WeightBytes:
    """Of one draft step of `rows` rows: the whole MTP block, embedding rows and the head."""
    assert model.mtp is not None, "no MTP block is loaded"
    block = model.mtp
    outer = held_bytes(model.head) + (rows * held_bytes(model.embedding[0]) if model.embedding is not None else 0)
    mtp = held_bytes([block.embedding_norm, block.hidden_norm, block.join, block.head_norm])
    return dataclasses.replace(_layer(block.layer, _touched(model, rows, experts)), outer=outer, mtp=mtp)


def held_bytes(part: object) -> int:
    """Bytes of a tensor, of every tensor of a dataclass or list, or 0 for anything else."""
    if isinstance(part, Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, list | tuple):
        return sum(map(held_bytes, part))
    if dataclasses.is_dataclass(part):
        return sum(held_bytes(getattr(part, field.name)) for field in dataclasses.fields(part))
    return 0


def _touched(model: Model, rows: int, experts: int | None) -> int:
    assert rows >= 1, f"a step of {rows} rows"
    assert experts is None or 1 <= experts <= model.config.experts, f"{experts} experts of {model.config.experts}"
    return min(model.config.experts, rows * model.config.experts_per_token) if experts is None else experts


def _layer(layer: LayerWeights, touched: int) -> WeightBytes:
    attention = held_bytes([layer.mla, layer.input_norm, layer.output_norm])
    indexers = held_bytes(layer.indexer)
    moe = layer.mlp
    if not isinstance(moe, MoeWeights):
        return WeightBytes(attention=attention, indexers=indexers, dense=held_bytes(moe))
    routed = held_bytes([moe.gate_up, moe.down])
    return WeightBytes(
        attention=attention, indexers=indexers, shared=held_bytes(moe) - routed, experts=routed // moe.bias.shape[0] * touched
    )


def _sum(parts: list[WeightBytes]) -> WeightBytes:
    return WeightBytes(*(sum(column) for column in zip(*map(dataclasses.astuple, parts), strict=True)))
