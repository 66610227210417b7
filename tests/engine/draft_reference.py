"""Drafting in plain torch, from a checkpoint's tensors and model.md section 3: no kernel, no cache, no shift of rows.

Row i of the MTP block joins the state at position i with the token at i + 1, at RoPE position i, as the page writes it. The engine keeps
the same row one slot later; that both draft the same tokens is what is compared. Float32 throughout.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig

__all__ = ["DraftReference"]

Pick = Callable[[Tensor, int], int]  # (logits [V], position of the token) -> token id


class _Rows:
    """Latents, rotated keys and index keys of one layer, a row a position."""

    def __init__(self, latent: Tensor, rope: Tensor, key: Tensor | None) -> None:
        self.latent, self.rope, self.key = latent, rope, key

    def with_row(self, other: "_Rows") -> "_Rows":
        assert self.key is not None
        assert other.key is not None
        return _Rows(torch.cat([self.latent, other.latent]), torch.cat([self.rope, other.rope]), torch.cat([self.key, other.key]))


class DraftReference:
    """One model. `states` and `drafts` recompute everything from the tokens."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.tensors, self.config = tensors, ModelConfig.read(config)
        self.mtp = f"model.layers.{self.config.layers}."

    def states(self, ids: Sequence[int]) -> Tensor:
        """States after the final norm of every position, [T, H]."""
        x = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        allowed = torch.empty(0)
        for layer in range(self.config.layers):
            prefix = f"model.layers.{layer}."
            x, allowed, _ = self._layer(prefix, x, 0, None, allowed if not self.config.full_layers[layer] else None, layer)
        return self._norm(x, "model.norm.weight")

    def drafts(self, ids: Sequence[int], states: Tensor, depth: int, pick: Pick) -> list[int]:
        """Drafts behind committed tokens `ids` = t_0..t_n; `states` holds at least h_0..h_{n-1}.

        Args: pick: chooses a token of its logits; it may note how close the choice was.
        """
        n = len(ids) - 1
        x = self._join(ids[1:], states[:n])
        y, allowed, rows = self._layer(self.mtp, x, 0, None, None, self.config.layers)
        state, kept = self._norm(y[-1:], f"{self.mtp}shared_head.norm.weight"), allowed[-1:]
        found = [pick(self._logits(state), n + 1)]
        for step in range(1, depth):
            x = self._join([found[-1]], state)
            position = n - 1 + step
            if self.config.share_mtp_selection:
                y, _, _ = self._layer(self.mtp, x, position, rows, kept, self.config.layers, keeps=False)
            else:
                y, _, rows = self._layer(self.mtp, x, position, rows, None, self.config.layers)
            state = self._norm(y, f"{self.mtp}shared_head.norm.weight")
            found.append(pick(self._logits(state), n + 1 + step))
        return found

    def _logits(self, state: Tensor) -> Tensor:
        return (state @ self.tensors["lm_head.weight"].T)[0]

    def _join(self, ids: Sequence[int], states: Tensor) -> Tensor:
        embedded = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        both = torch.cat([self._norm(embedded, f"{self.mtp}enorm.weight"), self._norm(states, f"{self.mtp}hnorm.weight")], -1)
        return both @ self.tensors[f"{self.mtp}eh_proj.weight"].T

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return self.tensors[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (eps or self.config.norm_eps)))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, ..., Dr] in interleaved pairs."""
        half = self.config.rope // 2
        angles = positions[:, None] * (1.0 / self.config.rope_theta ** (torch.arange(half).float() * 2 / self.config.rope))
        shape = (x.shape[0], *[1] * (x.dim() - 2), half)
        cos, sin = angles.cos().view(shape), angles.sin().view(shape)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    def _layer(
        self, prefix: str, x: Tensor, first: int, before: _Rows | None, allowed: Tensor | None, layer: int, *, keeps: bool = True
    ) -> tuple[Tensor, Tensor, _Rows]:  # fmt: skip
        """Rows x [T, H] at positions first.. behind `before`. allowed [T, S]: what they attend to; None: their own selection.

        keeps: whether the rows themselves join the history that is attended to.
        """
        c, get = self.config, lambda name: self.tensors[f"{prefix}self_attn.{name}.weight"]
        positions = torch.arange(first, first + x.shape[0])
        u = self._norm(x, f"{prefix}input_layernorm.weight")
        qr = self._norm(u @ get("q_a_proj").T, f"{prefix}self_attn.q_a_layernorm.weight", 1e-6)
        query = (qr @ get("q_b_proj").T).view(x.shape[0], c.heads, c.nope + c.rope)
        down = u @ get("kv_a_proj_with_mqa").T
        latent = self._norm(down[:, : c.latent], f"{prefix}self_attn.kv_a_layernorm.weight", 1e-6)
        full = f"{prefix}self_attn.indexer.wk.weight" in self.tensors
        rows = _Rows(latent, self._rotated(down[:, c.latent :], positions), self._index_key(prefix, u, positions) if full else None)
        if before is not None:
            rows = before.with_row(rows) if keeps else before
        if allowed is None:
            allowed = self._selection(prefix, u, qr, positions, rows)
        both = get("kv_b_proj").view(c.heads, c.nope + c.value, c.latent)
        keys = torch.einsum("ndr,sr->snd", both[:, : c.nope], rows.latent)
        values = torch.einsum("ndr,sr->snd", both[:, c.nope :], rows.latent)
        rotated = self._rotated(query[..., c.nope :], positions)
        logits = torch.einsum("tnd,snd->nts", query[..., : c.nope], keys) + torch.einsum("tnd,sd->nts", rotated, rows.rope)
        logits = (logits / math.sqrt(c.nope + c.rope)).masked_fill(~allowed[None, :, : rows.latent.shape[0]], float("-inf"))
        attended = torch.einsum("nts,snd->tnd", logits.softmax(-1), values).flatten(1)
        x = x + attended @ get("o_proj").T
        y = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        dense = layer < c.layers and c.dense_layers[layer]
        return x + (self._mlp(f"{prefix}mlp.", y) if dense else self._moe(f"{prefix}mlp.", y)), allowed, rows

    def _index_key(self, prefix: str, u: Tensor, positions: Tensor) -> Tensor:
        part = f"{prefix}self_attn.indexer."
        key = u @ self.tensors[f"{part}wk.weight"].T
        weight, bias = self.tensors[f"{part}k_norm.weight"], self.tensors[f"{part}k_norm.bias"]
        key = torch.nn.functional.layer_norm(key, key.shape[-1:], weight, bias, 1e-6)
        rope = self.config.rope
        return torch.cat([self._rotated(key[:, :rope], positions), key[:, rope:]], -1)

    def _selection(self, prefix: str, u: Tensor, qr: Tensor, positions: Tensor, rows: _Rows) -> Tensor:
        """What each row selects among all rows so far, bool [T, S]."""
        c, part = self.config, f"{prefix}self_attn.indexer."
        assert rows.key is not None
        query = (qr @ self.tensors[f"{part}wq_b.weight"].T).view(u.shape[0], c.index_heads, c.index_width)
        query = torch.cat([self._rotated(query[..., : c.rope], positions), query[..., c.rope :]], -1)
        weights = u @ self.tensors[f"{part}weights_proj.weight"].T / math.sqrt(c.index_heads)
        products = torch.einsum("thd,sd->ths", query, rows.key) / math.sqrt(c.index_width)
        scores = torch.einsum("th,ths->ts", weights, products.relu())
        causal = torch.arange(rows.key.shape[0])[None] <= positions[:, None]
        chosen = scores.masked_fill(~causal, float("-inf")).topk(min(c.top_k, scores.shape[1]), -1).indices
        return torch.zeros_like(causal).scatter(1, chosen, True) & causal

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _moe(self, prefix: str, x: Tensor) -> Tensor:
        c = self.config
        chance = torch.sigmoid(x @ self.tensors[f"{prefix}gate.weight"].T)
        choice = chance + self.tensors[f"{prefix}gate.e_score_correction_bias"]
        if c.expert_groups > 1:
            grouped = choice.view(x.shape[0], c.expert_groups, -1)
            kept = grouped.topk(2).values.sum(-1).topk(c.expert_groups_kept).indices
            dropped = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, kept, False)
            choice = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)
        experts = choice.topk(c.experts_per_token).indices
        weights = chance.gather(1, experts)
        if c.normalise_experts:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = self._mlp(f"{prefix}shared_experts.", x)
        for row in range(x.shape[0]):
            for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
                out[row] += c.expert_factor * weight * self._mlp(f"{prefix}experts.{expert}.", x[row : row + 1])[0]
        return out
