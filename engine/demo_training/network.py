"""The training network: `glm_moe_dsa` with its MTP block chained to three depths, as one module.

Holds: `Layer`, `MtpBlock`, `Network`, `Pass` (what one pass yields). Does not know: losses' weights, data, phases.

1. Row i of MTP depth s joins m (or the final state, s = 1) of row i at depth s - 1 with token i + s, sits at position i + s - 1, and
   sees the depth-1 keys and values of rows up to i under row i's selection: draft rows see no draft rows.
2. The embedding half comes first in eh_proj's input. The final state is taken after `model.norm`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.demo_training.attend import Block, Scorer, Target, attend
from engine.demo_training.parts import Attention, Linear, Mlp, MlpSparse, Norm, rotation
from engine.demo_training.shape import Shape

__all__ = ["Layer", "MtpBlock", "Network", "Pass"]

DEPTHS = 3


@dataclass(slots=True)
class Pass:
    """What one pass over [rows, tokens + 3] token ids yields.

    state: final hidden state after the norm, [rows, tokens, hidden]; drafts: m of each MTP depth, the same shape;
    divergences: the indexer's KL of each selection group, scalars; covered: selection mass shares [rows, queries], when asked;
    loads: rows taken by each expert, of each sparse layer in order, MTP block last.
    """

    state: Tensor
    drafts: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    covered: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)


class Layer(nn.Module):
    """One decoder layer, split where attention happens so that both sides can be compiled."""

    def __init__(self, shape: Shape, *, full: bool, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, full=full)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp: nn.Module = Mlp(shape.hidden, shape.dense_width, (2 * shape.layers) ** -0.5) if dense else MlpSparse(shape)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """x [rows, tokens, hidden] float32 -> query, key, value [rows, heads, tokens, width], then the indexer's three if full."""
        u = self.input_layernorm(x, dtype)
        query, latent_query = self.self_attn.query(u, cos, sin)
        key, value = self.self_attn.keys_values(u, cos, sin)
        if self.self_attn.indexer is None:
            return query, key, value
        return query, key, value, *self.self_attn.indexer(u, latent_query, cos, sin)

    def query_only(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """The query path alone: what a draft row past the first depth computes."""
        query, _ = self.self_attn.query(self.input_layernorm(x, dtype), cos, sin)
        return query

    def after(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor | None]:
        """Residual sums and the MLP: x float32 -> x float32 and the expert load."""
        x = x + self.self_attn.output(attended).float()
        y, load = self.mlp(self.post_attention_layernorm(x, attended.dtype))
        return x + y.float(), load


class MtpBlock(Layer):
    """The MTP block: a full sparse layer with the joint of embedding and state in front."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, full=True, dense=False)
        self.enorm = Norm(shape.hidden, shape.norm_eps)
        self.hnorm = Norm(shape.hidden, shape.norm_eps)
        self.eh_proj = Linear(2 * shape.hidden, shape.hidden)
        self.shared_head = nn.ModuleDict({"norm": Norm(shape.hidden, shape.norm_eps)})

    def join(self, embedded: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
        """embedded, state [rows, tokens, hidden] -> the block's input, float32."""
        joined: Tensor = self.eh_proj(torch.cat((self.enorm(embedded, dtype), self.hnorm(state, dtype)), -1))
        return joined.float()


class Trunk(nn.Module):
    """Embedding, layers (the MTP block last), final norm; exists to give parameters the checkpoint's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        layers = [Layer(shape, full=i in shape.full_layers, dense=i < shape.dense_layers) for i in range(shape.layers)]
        self.layers = nn.ModuleList([*layers, MtpBlock(shape)])
        self.norm = Norm(shape.hidden, shape.norm_eps)

    def trunk_layers(self) -> list[Layer]:
        """Every layer but the MTP block, in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer) and not isinstance(layer, MtpBlock)]

    def mtp_block(self) -> MtpBlock:
        """The MTP block."""
        block = self.layers[-1]
        assert isinstance(block, MtpBlock), "the last layer is the MTP block"
        return block


class Network(nn.Module):
    """The whole model. `dtype` is the precision of products: bfloat16 on a device, float32 for comparisons."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.scale = shape.query**-0.5
        self.scorer = Scorer()
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden, shape.vocabulary, gain=0.3)

    def compile_parts(self, wrap: Callable[..., Callable[..., Any]], wrap_scorer: Callable[..., Callable[..., Tensor]]) -> None:
        """Replace each layer's parts by `wrap(part)` and the scorer's by `wrap_scorer(part)`; attention between them stays as it is."""
        self.scorer.compile(wrap_scorer)
        for layer in self.model.layers:
            for name in ("before", "query_only", "after"):
                setattr(layer, name, wrap(getattr(layer, name)))

    def logits(self, state: Tensor) -> Tensor:
        """state [rows, tokens, hidden] -> [rows, tokens, vocabulary] in the network's dtype."""
        result: Tensor = self.lm_head(state)
        return result

    def forward(
        self, tokens: Tensor, positions: Tensor, *, sparse: bool, sampled: Tensor | None = None, depths: int = DEPTHS, cover: bool = False
    ) -> Pass:
        """One pass.

        tokens     int64 [rows, tokens + depths]      the last `depths` are seen by MTP alone
        positions  int64 [rows, tokens + depths - 1]  at least `tokens` of them; gaps allowed
        sampled    int64 [rows, queries]              where the indexer's loss is taken; None: no such loss
        """
        length = tokens.shape[1] - depths
        cos, sin = rotation(positions, self.shape.rope, self.shape.theta)
        embedded = self.model.embed_tokens(tokens).float()
        x, here = embedded[:, :length], (cos[:, :length], sin[:, :length])
        out = Pass(state=x)
        group = _Group(self, out, sparse, sampled, length, cover)
        for layer in self.model.trunk_layers():
            x, _ = group.run(layer, x, here)
        group.close()
        out.state = self.model.norm(x, self.dtype)
        mtp = self.model.mtp_block()
        state, kept = out.state, None
        for depth in range(1, depths + 1):
            joined = mtp.join(embedded[:, depth : depth + length], state, self.dtype)
            if kept is None:
                y, kept = group.run(mtp, joined, here)
                group.close()
            else:
                shift = slice(depth - 1, depth - 1 + length)
                query = mtp.query_only(joined, cos[:, shift], sin[:, shift], self.dtype)
                y, _ = mtp.after(joined, attend(query, *kept, group.selection, self.scale))
            state = mtp.shared_head["norm"](y, self.dtype)
            out.drafts.append(state)
        return out


class _Group:
    """Runs layers one after another and keeps what a selection group shares: the selection, the indexer's rows, its target."""

    def __init__(self, network: Network, out: Pass, sparse: bool, sampled: Tensor | None, length: int, cover: bool) -> None:
        self.network, self.out, self.sparse, self.sampled, self.length, self.cover = network, out, sparse, sampled, length, cover
        self.selection: list[Block] | None = None
        self.index: tuple[Tensor, Tensor, Tensor] | None = None
        self.target: Target | None = None

    def run(self, layer: Layer, x: Tensor, here: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x through one layer; also its keys and values."""
        network = self.network
        query, key, value, *index = layer.before(x, *here, network.dtype)
        if index:
            self.close()
            self.index = (index[0], index[1], index[2])
            self.selection = network.scorer.select(*self.index, network.shape.picks) if self.sparse else None
            self.target = None if self.sampled is None else Target(self.sampled, self.length)
        if self.target is not None:
            self.target.add(query, key, network.scale)
        x, load = layer.after(x, attend(query, key, value, self.selection, network.scale))
        if load is not None:
            self.out.loads.append(load)
        return x, (key, value)

    def close(self) -> None:
        """End the group: its divergence, and its covered mass if asked. The selection stays for later MTP depths."""
        if self.target is None or self.index is None:
            return
        self.out.divergences.append(self.target.divergence(self.network.scorer, *self.index))
        if self.cover:
            self.out.covered.append(self.target.covered(self.network.scorer, *self.index, self.network.shape.picks))
        self.target = None
