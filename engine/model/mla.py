"""Multi-head latent attention's projections, absorbed form: everything around the attention over rows.

Holds `MlaWeights` and `Heads`, the part of it that belongs to some heads alone. Knows no history, selection or cache: rows go out, attended
latents come in.

Invariants:
1. Only the first `latent` outputs of kv_a are normalised; the RoPE key is not.
2. The query's RoPE dims are its last; queries and keys are rotated in interleaved pairs, in place order.
3. UK is applied to the query and UV after attention, so nothing is ever expanded a key.
Source: model.md, section 2.4.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.weights import Weight, WeightReader
from kernels.linear import heads_linear, linear
from kernels.norm import rms_norm
from kernels.rope import rotate

__all__ = ["Heads", "MlaWeights"]


@dataclass(frozen=True, slots=True)
class Heads:
    """What some of a layer's heads ask with and make of what they attended to; N of them here. Shapes as in `MlaWeights`."""

    query_up: Weight
    key_up: Tensor
    value_up: Tensor
    output: Weight

    def project_query(self, qr: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Absorbed query [T, N, R] and rotated query [T, N, Dr] of the normed query latent qr [T, Rq]."""
        heads, _, nope = self.key_up.shape
        query = linear(qr, self.query_up).view(qr.shape[0], heads, -1)
        return heads_linear(query[..., :nope], self.key_up), rotate(query[..., nope:], cos, sin)

    def project_output(self, attended: Tensor) -> Tensor:
        """Attention output [T, H], the heads' part of it, from attended latents [T, N, R]."""
        values = heads_linear(attended, self.value_up)
        return linear(torch.flatten(values, 1), self.output)


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """One layer's attention weights. T rows, H hidden, N heads, Dn/Dr/Dv widths, Rq/R latents; all in the model's dtype."""

    query_down: Weight  # [Rq, H]
    query_norm: Tensor  # [Rq]
    query_up: Weight  # [N * (Dn + Dr), Rq]
    row_down: Weight  # [R + Dr, H]
    row_norm: Tensor  # [R]
    key_up: Tensor  # [N, R, Dn]: UK transposed, as the absorbed query needs it
    value_up: Tensor  # [N, Dv, R]: UV
    output: Weight  # [H, N * Dv]
    norm_eps: float  # of the two latent norms

    @classmethod
    def read(cls, reader: WeightReader, prefix: str, config: ModelConfig, norm_eps: float) -> Self:
        """Take the weights under `prefix` (ends in `self_attn.`). Raises BadModel naming the tensor."""
        heads, query = config.heads, config.nope + config.rope
        # Cut after dequantising: a head's rows straddle scale blocks.
        both = reader.take(f"{prefix}kv_b_proj.weight", heads * (config.nope + config.value), config.latent)
        per_head = both.view(heads, config.nope + config.value, config.latent)
        return cls(
            query_down=reader.take_weight(f"{prefix}q_a_proj.weight", config.query_latent, config.hidden),
            query_norm=reader.take(f"{prefix}q_a_layernorm.weight", config.query_latent),
            query_up=reader.take_weight(f"{prefix}q_b_proj.weight", heads * query, config.query_latent),
            row_down=reader.take_weight(f"{prefix}kv_a_proj_with_mqa.weight", config.latent + config.rope, config.hidden),
            row_norm=reader.take(f"{prefix}kv_a_layernorm.weight", config.latent),
            key_up=per_head[:, : config.nope].transpose(1, 2).contiguous(),
            value_up=per_head[:, config.nope :].contiguous(),
            output=reader.take_weight(f"{prefix}o_proj.weight", config.hidden, heads * config.value),
            norm_eps=norm_eps,
        )

    def project_latent(self, u: Tensor) -> Tensor:
        """Normed query latent `qr` [T, Rq] of the layer's input u [T, H]; also what the indexer's query reads."""
        return self.norm_latent(linear(u, self.query_down))

    def norm_latent(self, latent: Tensor) -> Tensor:
        """The query latent `qr` [T, Rq] of what the product made, [T, Rq]."""
        return rms_norm(latent, self.query_norm, self.norm_eps)

    def row_source(self, u: Tensor) -> Tensor:
        """What a row is made of, before norm and rotation: latent and RoPE key [T, R + Dr] of u [T, H]."""
        return linear(u, self.row_down)

    def project_row(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normed latent [T, R] and rotated key [T, Dr] of u [T, H], with the rows' RoPE table [T, Dr / 2]: the values that
        `kernels.row_write` stores."""
        latents = self.row_norm.shape[0]
        both = self.row_source(u)
        return rms_norm(both[:, :latents], self.row_norm, self.norm_eps), rotate(both[:, latents:], cos, sin)

    @property
    def heads(self) -> Heads:
        """All of them."""
        return Heads(self.query_up, self.key_up, self.value_up, self.output)

    def project_query(self, qr: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Heads`."""
        return self.heads.project_query(qr, cos, sin)

    def project_output(self, attended: Tensor) -> Tensor:
        """See `Heads`."""
        return self.heads.project_output(attended)
