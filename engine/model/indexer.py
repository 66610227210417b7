"""The lightning indexer's projections: what a full layer stores as index keys and asks with.

Holds `IndexerWeights`. Scoring and selecting are kernels; a shared layer has none of this.

Invariants:
1. The query comes from the *normed* query latent; keys and head weights from the layer's normed input.
2. The FIRST `rope` dims are rotated (interleaved, the attention's own table), the others stay.
3. k_norm is a true LayerNorm with bias.
4. Head weights leave in float32 without the two constant factors, which the scoring kernel applies.
Source: model.md, section 2.5.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.weights import Weight, WeightReader
from kernels.index_query import index_query, one_launch
from kernels.linear import GroupInt, linear
from kernels.norm import layer_norm
from kernels.rope import rotate_first

__all__ = ["KEY_NORM_EPS", "IndexerWeights"]

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """One full layer's indexer. I index heads of width Di; the rest as in `MlaWeights`."""

    query_up: Weight  # [I * Di, Rq]
    key_down: Weight  # [Di, H]
    key_norm: Tensor  # [Di]
    key_bias: Tensor  # [Di]
    head_weights: Tensor  # [I, H]

    @classmethod
    def read(cls, reader: WeightReader, prefix: str, config: ModelConfig) -> Self:
        """Take the weights under `prefix` (ends in `indexer.`). Raises BadModel naming the tensor."""
        width, heads = config.index_width, config.index_heads
        return cls(
            query_up=reader.take_weight(f"{prefix}wq_b.weight", heads * width, config.query_latent),
            key_down=reader.take_weight(f"{prefix}wk.weight", width, config.hidden),
            key_norm=reader.take(f"{prefix}k_norm.weight", width),
            key_bias=reader.take(f"{prefix}k_norm.bias", width),
            head_weights=reader.take(f"{prefix}weights_proj.weight", heads, config.hidden),
        )

    def key_source(self, u: Tensor) -> Tensor:
        """What an index key is made of, before norm and rotation: [T, Di] of rows u [T, H]."""
        return linear(u, self.key_down)

    def index_key(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Index keys [T, Di] of rows u [T, H], with their RoPE table [T, Dr / 2]: the values that `kernels.row_write` stores."""
        return rotate_first(layer_norm(self.key_source(u), self.key_norm, self.key_bias, KEY_NORM_EPS), cos, sin)

    def index_query(self, u: Tensor, qr: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Index query [T, I, Di] and unscaled head weights, float32 [T, I], of u [T, H] and its normed query latent qr [T, Rq]."""
        return self.project_query(qr, cos, sin), linear(u, self.head_weights).to(torch.float32)

    def project_query(self, qr: Tensor, cos: Tensor, sin: Tensor, cleared: Tensor | None = None) -> Tensor:
        """Index query [T, I, Di] alone. Args: cleared: scratch that comes out zero as well, int32."""
        width = self.key_norm.shape[0]
        if not isinstance(self.query_up, GroupInt) and one_launch(qr, self.query_up, width):
            return index_query(qr, self.query_up, width, cos, sin, cleared)
        if cleared is not None:
            cleared.zero_()
        return rotate_first(linear(qr, self.query_up).view(qr.shape[0], -1, width), cos, sin)
