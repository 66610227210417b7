"""The multi-token-prediction block: what joins a hidden state to the next token, and one more decoder layer.

Holds `MtpWeights`. Knows no chaining of drafts. Embedding and output head are the main model's.

Invariants:
1. The hidden state that comes in is the one AFTER the final norm (or after `head_norm`, when drafts are chained).
2. The embedding is the first half of the joined input.
3. The block's layer is full and a selection group of its own.
Source: model.md, section 3.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.layer import LayerWeights
from engine.model.weights import WeightReader
from kernels.linear import linear
from kernels.norm import join_norms, rms_norm

__all__ = ["MtpWeights"]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """Weights of the MTP block."""

    embedding_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    join: Tensor  # [H, 2H]
    head_norm: Tensor  # [H]
    layer: LayerWeights
    norm_eps: float

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, *, latent_norm_eps: float) -> Self:
        """Take the block's weights, stored as layer `config.layers`. Raises BadModel naming the tensor."""
        prefix = f"model.layers.{config.layers}."
        return cls(
            embedding_norm=reader.take(f"{prefix}enorm.weight", config.hidden),
            hidden_norm=reader.take(f"{prefix}hnorm.weight", config.hidden),
            join=reader.take(f"{prefix}eh_proj.weight", config.hidden, 2 * config.hidden),
            head_norm=reader.take(f"{prefix}shared_head.norm.weight", config.hidden),
            layer=LayerWeights.read(reader, config, config.layers, latent_norm_eps=latent_norm_eps),
            norm_eps=config.norm_eps,
        )

    def join_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The block's residual input [T, H] of the next tokens' embeddings [T, H] and the final hidden states [T, H].

        Hidden states may come in float32, as they are kept: they are values of the model's dtype, so the cast is exact.
        """
        return linear(join_norms(embedded, self.embedding_norm, hidden, self.hidden_norm, self.norm_eps), self.join)

    def final_norm(self, y: Tensor) -> Tensor:
        """What the main head reads for a draft, and the hidden state of the next chained row. [T, H]"""
        return rms_norm(y, self.head_norm, self.norm_eps)
