"""One decoder layer's weights, main or MTP.

Holds `LayerWeights`: norms, attention, indexer when the layer is full, MLP. Knows no order of operations across rows;
the steps in `engine/` call these seams and keep the residual sum.

Invariants:
1. `indexer` is there exactly when the layer is full; a shared layer reuses its group's selection.
2. Both norms use the main eps.
Source: model.md, sections 2.1 and 2.2.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.indexer import IndexerWeights
from engine.model.mla import MlaWeights
from engine.model.moe import DenseWeights, MoeWeights
from engine.model.weights import WeightReader
from kernels.norm import rms_norm

__all__ = ["LayerWeights"]


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
        return cls(
            layer=layer,
            input_norm=reader.take(f"{prefix}input_layernorm.weight", config.hidden),
            output_norm=reader.take(f"{prefix}post_attention_layernorm.weight", config.hidden),
            mla=MlaWeights.read(reader, f"{prefix}self_attn.", config, latent_norm_eps),
            indexer=IndexerWeights.read(reader, f"{prefix}self_attn.indexer.", config) if full else None,
            mlp=mlp,
            norm_eps=config.norm_eps,
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

    def mlp_input(self, x: Tensor) -> Tensor:
        """Normed state y [T, H] that the MLP reads, of the residual state x [T, H] behind attention."""
        return rms_norm(x, self.output_norm, self.norm_eps)

    def feed_forward(self, y: Tensor) -> Tensor:
        """What the MLP, dense or experts, adds to the residual state, of its normed input y [T, H]. [T, H]"""
        return self.mlp.feed(y)
