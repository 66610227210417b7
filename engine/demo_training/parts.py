"""The layers of the training network: norms, latent attention's projections, indexer, experts. Differentiable, whole rows at a time.

Holds the modules; their state-dict names are the checkpoint's, except that experts are stacked (`export.py` takes them apart).
Does not know: losses, phases, data, which attention is used (`attend.py`).

1. Parameters are float32; a product casts its weight to the dtype of its input, so the caller's dtype decides the precision.
2. The residual stream is float32; the router works in float32 throughout.
3. The indexer reads detached inputs: its loss trains the indexer alone, and the selection trains nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo_training.shape import Shape

__all__ = ["Attention", "Experts", "Gate", "Indexer", "Linear", "Mlp", "MlpSparse", "Norm", "rotate", "rotation"]


class Linear(nn.Linear):
    """A product without bias in the dtype of its input. weight [out, in] float32."""

    def __init__(self, inputs: int, outputs: int, *, gain: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=gain * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], same dtype."""
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm: float32 inside, the result cast to `dtype` before the weight multiplies it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [..., width] -> the same shape in `dtype`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(dtype) * wide.to(dtype)


def rotation(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, tokens, width / 2] float32 for int64 positions [rows, tokens]."""
    frequency = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width))
    angle = positions.float()[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [rows, tokens, heads, width]; cos, sin [rows, tokens, width / 2]. Evens come out first."""
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


class Indexer(nn.Module):
    """The lightning indexer of a full layer: index queries, one index key a token, head weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.width, self.rope = shape.index_heads, shape.index_width, shape.rope
        self.wq_b = Linear(shape.query_latent, self.heads * self.width)
        self.wk = Linear(shape.hidden, self.width)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = Linear(shape.hidden, self.heads)

    def forward(self, u: Tensor, latent_query: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [rows, tokens, hidden], latent_query [rows, tokens, query_latent] -> queries [rows, heads, tokens, width],
        keys [rows, tokens, width] (both the dtype of u), weights [rows, heads, tokens] float32 with both constant factors in."""
        u, latent_query = u.detach(), latent_query.detach()
        rows, tokens, _ = u.shape
        query = self.wq_b(latent_query).view(rows, tokens, self.heads, self.width)
        query = torch.cat((rotate(query[..., : self.rope], cos, sin), query[..., self.rope :]), -1)
        norm = self.k_norm
        key = F.layer_norm(self.wk(u).float(), (self.width,), norm.weight, norm.bias, norm.eps).to(u.dtype)[:, :, None]
        key = torch.cat((rotate(key[..., : self.rope], cos, sin), key[..., self.rope :]), -1)[:, :, 0]
        weight = self.weights_proj(u).float() * (self.heads * self.width) ** -0.5
        return query.transpose(1, 2), key, weight.transpose(1, 2)


class Attention(nn.Module):
    """Projections of multi-head latent attention in the plain (unabsorbed) form."""

    def __init__(self, shape: Shape, *, full: bool) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = Linear(shape.hidden, shape.query_latent)
        self.q_a_layernorm = Norm(shape.query_latent, shape.latent_norm_eps)
        self.q_b_proj = Linear(shape.query_latent, shape.heads * shape.query)
        self.kv_a_proj_with_mqa = Linear(shape.hidden, shape.latent + shape.rope)
        self.kv_a_layernorm = Norm(shape.latent, shape.latent_norm_eps)
        self.kv_b_proj = Linear(shape.latent, shape.heads * (shape.nope + shape.value))
        self.o_proj = Linear(shape.heads * shape.value, shape.hidden, gain=(2 * shape.layers) ** -0.5)
        self.indexer = Indexer(shape) if full else None

    def query(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """u [rows, tokens, hidden] -> rotated queries [rows, heads, tokens, query] and the normalised query latent."""
        shape = self.shape
        latent_query = self.q_a_layernorm(self.q_a_proj(u), u.dtype)
        query = self.q_b_proj(latent_query).view(*u.shape[:2], shape.heads, shape.query)
        query = torch.cat((query[..., : shape.nope], rotate(query[..., shape.nope :], cos, sin)), -1)
        return query.transpose(1, 2), latent_query

    def keys_values(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """u [rows, tokens, hidden] -> keys and values [rows, heads, tokens, query]; values are zero beyond their width."""
        shape = self.shape
        z = self.kv_a_proj_with_mqa(u)
        latent = self.kv_a_layernorm(z[..., : shape.latent], u.dtype)
        key_rope = rotate(z[..., None, shape.latent :], cos, sin).expand(-1, -1, shape.heads, -1)
        both = self.kv_b_proj(latent).view(*u.shape[:2], shape.heads, shape.nope + shape.value)
        key = torch.cat((both[..., : shape.nope], key_rope), -1)
        value = F.pad(both[..., shape.nope :], (0, shape.query - shape.value))
        return key.transpose(1, 2), value.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """attended [rows, heads, tokens, query] -> [rows, tokens, hidden]; the padding of the values is cut."""
        rows, _, tokens, _ = attended.shape
        value = attended[..., : self.shape.value].transpose(1, 2).reshape(rows, tokens, -1)
        result: Tensor = self.o_proj(value)
        return result


class Mlp(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, hidden: int, width: int, gain: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden, gain=gain)

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """y [rows, tokens, hidden] -> the same shape, and no expert load."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return result, None


class Gate(nn.Module):
    """The router's weight [experts, hidden] and its correction bias [experts], which the training loop moves by hand."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Experts(nn.Module):
    """Routed experts, stacked: gate_proj and up_proj [experts, width, hidden], down_proj [experts, hidden, width]."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        experts, width, hidden = shape.experts, shape.expert_width, shape.hidden
        self.gate_proj = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.up_proj = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) * gain * width**-0.5)


class MlpSparse(nn.Module):
    """Experts and one shared expert. All experts are computed and weighted (zero when not chosen): few and small, so products stay big."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        gain = (2 * shape.layers) ** -0.5
        self.chosen, self.factor, self.width = shape.experts_a_token, shape.routed_factor, shape.expert_width
        self.gate = Gate(shape.hidden, shape.experts)
        self.experts = Experts(shape, gain / shape.routed_factor)
        self.shared_experts = Mlp(shape.hidden, shape.expert_width, gain)

    def route(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """y [rows, tokens, hidden] -> expert weights [rows, tokens, experts] float32 (zero when not chosen), load [experts]."""
        score = torch.sigmoid(F.linear(y.float(), self.gate.weight.float()))
        chosen = torch.topk(score + self.gate.e_score_correction_bias, self.chosen, sorted=False).indices
        taken = torch.zeros_like(score).scatter(-1, chosen, 1.0)
        weight = score * taken
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.factor
        return weight, taken.sum((0, 1))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """y [rows, tokens, hidden] -> the same shape, and how many rows each expert took [experts] float32."""
        weight, load = self.route(y)
        gate = F.linear(y, self.experts.gate_proj.flatten(0, 1).to(y.dtype))
        up = F.linear(y, self.experts.up_proj.flatten(0, 1).to(y.dtype))
        inner = F.silu(gate) * up * weight.to(y.dtype).repeat_interleave(self.width, -1)
        down = F.linear(inner, self.experts.down_proj.transpose(0, 1).flatten(1).to(y.dtype))
        shared, _ = self.shared_experts(y)
        return down + shared, load.detach()
