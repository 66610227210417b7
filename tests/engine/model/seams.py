"""Every function of a model on inputs of its own, and the same written out plainly in torch, for comparing dtypes, devices and row counts.

Inputs are drawn, not handed from one function to the next, so that what differs in one does not show in another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model import LayerWeights, Model, MoeWeights
from engine.model.weights import Weight
from kernels.linear import BlockFp8

__all__ = ["COUNTS", "Inputs", "assert_near", "assert_rows_alone", "functions", "plain", "relative_error"]

COUNTS = (1, 2, 3, 4, 8, 16, 64)
Function = Callable[["Inputs"], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Inputs:
    """Drawn inputs of T rows, in the model's dtype on its device."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    x: Tensor  # [T, H], a residual state
    u: Tensor  # [T, H], normed
    qr: Tensor  # [T, Rq], normed
    attended: Tensor  # [T, N, R]

    @classmethod
    def drawn(cls, model: Model, rows: int, seed: int = 1) -> "Inputs":
        """The same values for every model of one config: drawn in float32 on the CPU, rounded to bfloat16 and so exact in either dtype."""
        config, generator = model.config, torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(model.device, model.dtype)

        return cls(
            torch.randint(0, config.vocabulary, (rows,), generator=generator).to(model.device),
            torch.randint(0, config.context_max, (rows,), generator=generator).to(model.device),
            3 * draw(rows, config.hidden), draw(rows, config.hidden), draw(rows, config.query_latent),
            draw(rows, config.heads, config.latent),
        )  # fmt: skip

    def rows(self, picked: slice | Tensor) -> "Inputs":
        """Some of the rows."""
        return Inputs(*(getattr(self, name)[picked] for name in self.__dataclass_fields__))


def functions(model: Model) -> dict[str, Function]:
    """Every function of the model, by name."""
    found: dict[str, Function] = {}
    if model.embedding is not None:
        found["embed"] = lambda given: (model.embed(given.ids),)
    if model.head is not None:
        found |= {"final norm": lambda given: (model.final_norm(given.x),), "logits": lambda given: (model.logits(given.u),)}
    if model.mtp is not None:
        mtp = model.mtp
        found |= {"mtp input": lambda given: (model.mtp_input(given.ids, given.x),), "mtp norm": lambda given: (mtp.final_norm(given.x),)}
    for layer in model.row_layers:
        found |= {f"layer {layer.layer}, {name}": each for name, each in _of_layer(model, layer).items()}
    return found


def _of_layer(model: Model, layer: LayerWeights) -> dict[str, Function]:
    mla, indexer = layer.mla, layer.indexer
    found: dict[str, Function] = {
        "attention input": lambda given: (layer.attention_input(given.x),),
        "latent": lambda given: (mla.project_latent(given.u),),
        "row": lambda given: mla.project_row(given.u, *model.rope(given.positions)),
        "query": lambda given: mla.project_query(given.qr, *model.rope(given.positions)),
        "output": lambda given: (mla.project_output(given.attended),),
        "mlp input": lambda given: (layer.mlp_input(given.x),),
        "feed forward": lambda given: (layer.feed_forward(given.u),),
    }
    if indexer is not None:
        found["index key"] = lambda given: (indexer.index_key(given.u, *model.rope(given.positions)),)
        found["index query"] = lambda given: indexer.index_query(given.u, given.qr, *model.rope(given.positions))
    return found


def plain(model: Model, given: Inputs) -> dict[str, tuple[Tensor, ...]]:
    """What `functions` must give, in float32 from the same weights and inputs, on the same device.

    Rows whose experts are nearly tied are NaN in `feed forward`: there a rounding of the router's float32 sum chooses.
    """
    wide = Inputs(*(value.float() if value.is_floating_point() else value for value in vars(given).values()))
    eps, found = model.config.norm_eps, {}
    angle = given.positions.float()[:, None] * model.frequencies
    turn = angle.cos().to(model.dtype).float(), angle.sin().to(model.dtype).float()
    if model.embedding is not None:
        found["embed"] = (model.embedding[given.ids].float(),)
    if model.norm is not None and model.head is not None:
        found |= {"final norm": (_rms(wide.x, model.norm, eps),), "logits": (wide.u @ _f32(model.head).T,)}
    if model.mtp is not None and model.embedding is not None:
        mtp = model.mtp
        both = _rms(model.embedding[given.ids].float(), mtp.embedding_norm, eps), _rms(wide.x, mtp.hidden_norm, eps)
        found["mtp input"] = (torch.cat(both, -1) @ _f32(mtp.join).T,)
        found["mtp norm"] = (_rms(wide.x, mtp.head_norm, eps),)
    for layer in model.row_layers:
        found |= {f"layer {layer.layer}, {name}": each for name, each in _plain_layer(model, layer, wide, turn).items()}
    return found


def _plain_layer(model: Model, layer: LayerWeights, given: Inputs, turn: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    config, mla, indexer = model.config, layer.mla, layer.indexer
    row = given.u @ _f32(mla.row_down).T
    query = (given.qr @ _f32(mla.query_up).T).view(len(given.qr), config.heads, -1)
    values = torch.einsum("tnr,nvr->tnv", given.attended, _f32(mla.value_up))
    found = {
        "attention input": (_rms(given.x, layer.input_norm, layer.norm_eps),),
        "latent": (_rms(given.u @ _f32(mla.query_down).T, mla.query_norm, mla.norm_eps),),
        "row": (_rms(row[:, : config.latent], mla.row_norm, mla.norm_eps), _turned(row[:, config.latent :], turn)),
        "query": (torch.einsum("tnd,nrd->tnr", query[..., : config.nope], _f32(mla.key_up)), _turned(query[..., config.nope :], turn)),
        "output": (values.flatten(1) @ _f32(mla.output).T,),
        "mlp input": (_rms(given.x, layer.output_norm, layer.norm_eps),),
        "feed forward": (_fed(model, layer, given.u),),
    }
    if indexer is not None:
        key = given.u @ _f32(indexer.key_down).T
        key = torch.nn.functional.layer_norm(key, key.shape[-1:], indexer.key_norm.float(), indexer.key_bias.float(), 1e-6)
        asked = (given.qr @ _f32(indexer.query_up).T).view(len(key), config.index_heads, -1)
        turned = [torch.cat((_turned(each[..., : config.rope], turn), each[..., config.rope :]), -1) for each in (key, asked)]
        found |= {"index key": (turned[0],), "index query": (turned[1], given.u @ _f32(indexer.head_weights).T)}
    return found


def _fed(model: Model, layer: LayerWeights, y: Tensor) -> Tensor:
    mlp, config = layer.mlp, model.config
    if not isinstance(mlp, MoeWeights):
        return _mlp(y, _f32(mlp.gate), _f32(mlp.up), _f32(mlp.down))
    assert config.expert_groups == 1, "groups are not written out here"
    score = torch.sigmoid(y @ mlp.router.T)
    ranked, order = (score + mlp.bias).sort(descending=True)
    chosen = order[:, : config.experts_per_token]
    weight = score.gather(1, chosen)
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) if config.normalise_experts else weight
    out = _mlp(y, _f32(mlp.shared.gate), _f32(mlp.shared.up), _f32(mlp.shared.down))
    for place in range(len(y)):
        for slot, expert in enumerate(chosen[place].tolist()):
            gate, up = _f32(_one(mlp.gate_up, expert)).chunk(2)
            out[place] += config.expert_factor * weight[place, slot] * _mlp(y[place], gate, up, _f32(_one(mlp.down, expert)))
    if config.experts > config.experts_per_token:
        gap = ranked[:, config.experts_per_token - 1] - ranked[:, config.experts_per_token]
        out[gap < 1e-6] = float("nan")
    return out


def _mlp(y: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T


def _one(weight: Weight, expert: int) -> Weight:
    return BlockFp8(weight.values[expert], weight.scales[expert]) if isinstance(weight, BlockFp8) else weight[expert]


def _f32(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantised(torch.float32)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (each.view(len(x), *(1,) * (x.dim() - 2), -1) for each in turn)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest over rows of |got - wanted| / |wanted|, lengths of vectors; rows that are NaN in `wanted` do not count."""
    got, wanted = (each.detach().double().cpu().flatten(1) for each in (got, wanted))
    error = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
    known = ~wanted.isnan().any(1)
    assert known.any(), "no row can be compared"
    return float(error[known].max())


def assert_near(got: dict[str, tuple[Tensor, ...]], wanted: dict[str, tuple[Tensor, ...]], bound: float) -> None:
    """Every output of every function within `bound` of what is wanted, relative to its row."""
    assert got.keys() == wanted.keys()
    for name, each in got.items():
        for place, (one, other) in enumerate(zip(each, wanted[name], strict=True)):
            assert one.shape == other.shape, f"{name}, output {place}: {tuple(one.shape)}, not {tuple(other.shape)}"
            error = relative_error(one, other)
            assert error <= bound, f"{name}, output {place}: differs by {error:.3g}, more than {bound:.3g}"


def assert_rows_alone(model: Model, given: Inputs) -> None:
    """Every function gives a row the same bits among 64 rows, among fewer, and in another order."""
    total = len(given.ids)
    backwards = torch.arange(total - 1, -1, -1, device=model.device)
    for name, function in functions(model).items():
        whole = function(given)
        turned = function(given.rows(backwards))
        for one, other in zip(whole, turned, strict=True):
            assert torch.equal(one, other[backwards]), f"{name}: the order of rows shows"
        for count in COUNTS:
            for one, other in zip(whole, function(given.rows(slice(count))), strict=True):
                assert torch.equal(one[:count], other), f"{name}: {count} rows differ from {total}"
