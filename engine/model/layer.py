"""One decoder layer's weights, main or MTP.

Holds `LayerWeights`: norms, attention, indexer when the layer is full, MLP. Knows no order of operations across rows;
the steps in `engine/` call these seams and keep the residual sum.

Invariants:
1. `indexer` is there exactly when the layer is full; a shared layer reuses its group's selection.
2. Both norms use the main eps.
Source: model.md, sections 2.1 and 2.2.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.indexer import IndexerWeights
from engine.model.mla import MlaWeights
from engine.model.moe import DenseWeights, MoeWeights
from engine.model.weights import Weight, WeightReader
from kernels.linear import linear
from kernels.norm import rms_norm

__all__ = ["LayerInput", "LayerWeights"]


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What one product makes of a layer's normed input, cut up; rows lie apart.

    latent        [T, Rq]          the query latent before its norm
    row           [T, R + Dr]      what a row is made of
    key           [T, Di] or None  what an index key is made of; full layers
    head_weights  [T, I] or None   the indexer's, unscaled; full layers
    """

    latent: Tensor
    row: Tensor
    key: Tensor | None
    head_weights: Tensor | None

    @property
    def full_key(self) -> Tensor:
        """The key of a layer known to be full."""
        assert self.key is not None, "a shared layer has no index key"
        return self.key

    @property
    def full_head_weights(self) -> Tensor:
        """The head weights of a layer known to be full."""
        assert self.head_weights is not None, "a shared layer has no indexer"
        return self.head_weights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; `layer` is its id in the whole model (the MTP block's is the model's layer count)."""

    layer: int
    input_norm: Tensor  # [H]
    output_norm: Tensor  # [H], before the MLP
    mla: MlaWeights
    indexer: IndexerWeights | None
    mlp: DenseWeights | MoeWeights
    norm_eps: float
    down: Tensor | None = None  # [Rq + R + Dr (+ Di + I), H]: all products of the layer's input, of which the parts' weights are views

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, layer: int, *, latent_norm_eps: float) -> Self:
        """Take layer `layer`'s weights; `config.layers` is the MTP block, always full and sparse. Raises BadModel naming the tensor."""
        prefix = f"model.layers.{layer}."
        main = layer < config.layers
        full = not main or config.full_layers[layer]
        dense = main and config.dense_layers[layer]
        mlp: DenseWeights | MoeWeights
        if dense:
            mlp = DenseWeights.read(reader, f"{prefix}mlp.", config.hidden, config.dense_width)
        else:
            mlp = MoeWeights.read(reader, f"{prefix}mlp.", config)
        mla = MlaWeights.read(reader, f"{prefix}self_attn.", config, latent_norm_eps)
        indexer = IndexerWeights.read(reader, f"{prefix}self_attn.indexer.", config) if full else None
        mla, indexer, down = _joined(mla, indexer)
        return cls(
            layer=layer,
            input_norm=reader.take(f"{prefix}input_layernorm.weight", config.hidden),
            output_norm=reader.take(f"{prefix}post_attention_layernorm.weight", config.hidden),
            mla=mla,
            indexer=indexer,
            mlp=mlp,
            norm_eps=config.norm_eps,
            down=down,
        )

    @property
    def full(self) -> bool:
        """Whether the layer makes its group's selection."""
        return self.indexer is not None

    @property
    def full_indexer(self) -> IndexerWeights:
        """The indexer of a layer known to be full."""
        assert self.indexer is not None, f"layer {self.layer} is shared: it has no indexer"
        return self.indexer

    def attention_input(self, x: Tensor) -> Tensor:
        """Normed state u [T, H] that attention and indexer read, of the residual state x [T, H]."""
        return rms_norm(x, self.input_norm, self.norm_eps)

    def project_input(self, u: Tensor) -> LayerInput:
        """Everything that products make of the layer's normed input u [T, H]. Its bits may differ from those of the parts' own products."""
        if self.down is None:
            key = None if self.indexer is None else self.indexer.key_source(u)
            head_weights = None if self.indexer is None else linear(u, self.indexer.head_weights)
            return LayerInput(linear(u, self.mla.query_down), self.mla.row_source(u), key, head_weights)
        sizes = [weight.shape[0] for weight in _input_weights(self.mla, self.indexer)]
        parts = linear(u, self.down).split(sizes, dim=1)
        return LayerInput(parts[0], parts[1], parts[2] if self.full else None, parts[3] if self.full else None)

    def mlp_input(self, x: Tensor) -> Tensor:
        """Normed state y [T, H] that the MLP reads, of the residual state x [T, H] behind attention."""
        return rms_norm(x, self.output_norm, self.norm_eps)

    @property
    def shared_expert(self) -> DenseWeights | None:
        """The shared expert, which no router chooses; None in a dense layer."""
        return self.mlp.shared if isinstance(self.mlp, MoeWeights) else None

    def feed_forward(self, y: Tensor) -> Tensor:
        """What the MLP, dense or experts, adds to the residual state, of its normed input y [T, H]. [T, H]"""
        return self.mlp.feed(y)


def _input_weights(mla: MlaWeights, indexer: IndexerWeights | None) -> list[Weight]:
    """Weights that a layer's input is multiplied with, in the order of `LayerInput`."""
    weights = [mla.query_down, mla.row_down]
    return weights if indexer is None else [*weights, indexer.key_down, indexer.head_weights]


def _joined(mla: MlaWeights, indexer: IndexerWeights | None) -> tuple[MlaWeights, IndexerWeights | None, Tensor | None]:
    """The weights as views of one, where none is block-FP8: its blocks of 128 rows need not end where a part ends. One launch for four."""
    weights = [weight for weight in _input_weights(mla, indexer) if isinstance(weight, Tensor)]
    if len(weights) < len(_input_weights(mla, indexer)):
        return mla, indexer, None
    down = torch.cat(weights)
    views = down.split([weight.shape[0] for weight in weights])
    mla = replace(mla, query_down=views[0], row_down=views[1])
    return mla, None if indexer is None else replace(indexer, key_down=views[2], head_weights=views[3]), down
