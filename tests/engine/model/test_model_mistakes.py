"""Known mistakes, made on purpose one at a time: each must move logits, or the parity tests prove nothing."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.model.indexer
import engine.model.mla
import engine.model.moe
from engine.model import MlaWeights, Model, MoeWeights, load_model
from engine.model.weights import WeightReader
from kernels.norm import rms_norm
from kernels.rope import rotate
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.parity import make_checkpoint, named, prompt_ids, transformers_logits

MOVED_MIN = 0.1  # a thousand times the parity tolerance

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]
MISTAKES: dict[str, tuple[str, Break]] = {}


def mistake(name: str, configuration: str = "shared") -> Callable[[Break], Break]:
    """Register a way to break the model, shown on a configuration."""

    def register(broken: Break) -> Break:
        MISTAKES[name] = (configuration, broken)
        return broken

    return register


def _half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over pairs (x[j], x[j + half]), as other models have it."""
    half = x.shape[-1] // 2
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    first, second, c, s = x[..., :half], x[..., half:], cos.view(shape), sin.view(shape)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


@mistake("dense attention")
def _dense(patch: Patch) -> None:
    def everything(self: FlatRun, layer: object, selection: Tensor, positions: Tensor, lowest: int) -> Tensor:
        keys = torch.arange(int(positions[-1]) + 1, dtype=torch.int32)
        return torch.where(keys[None] <= positions[:, None], keys[None], -1).to(torch.int32)

    patch.setattr(FlatRun, "selection_used", everything)


@mistake("shared layers dense")
def _shared_dense(patch: Patch) -> None:
    def everything(self: FlatRun, layer: object, selection: Tensor, positions: Tensor, lowest: int) -> Tensor:
        if layer.full:
            return selection
        keys = torch.arange(int(positions[-1]) + 1, dtype=torch.int32)
        return torch.where(keys[None] <= positions[:, None], keys[None], -1).to(torch.int32)

    patch.setattr(FlatRun, "selection_used", everything)


@mistake("top-k before the causal mask")
def _topk_first(patch: Patch) -> None:
    choose = FlatRun.choose

    def unmasked(self: FlatRun, scores: Tensor, positions: Tensor, lowest: int) -> Tensor:
        chosen = choose(self, scores, torch.full_like(positions, int(positions[-1])), lowest)
        return torch.where(chosen <= positions[:, None], chosen, -1).to(torch.int32)

    patch.setattr(FlatRun, "choose", unmasked)


@mistake("half-split RoPE in attention")
def _half_split_attention(patch: Patch) -> None:
    patch.setattr(engine.model.mla, "rotate", _half_split)


@mistake("half-split RoPE in the indexer")
def _half_split_indexer(patch: Patch) -> None:
    def first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = 2 * cos.shape[-1]
        return torch.cat((_half_split(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)

    patch.setattr(engine.model.indexer, "rotate_first", first)


@mistake("RoPE on the last indexer dims")
def _last_dims(patch: Patch) -> None:
    def last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kept = x.shape[-1] - 2 * cos.shape[-1]
        return torch.cat((x[..., :kept], rotate(x[..., kept:], cos, sin)), dim=-1)

    patch.setattr(engine.model.indexer, "rotate_first", last)


@mistake("raw query latent into the indexer")
def _raw_latent(patch: Patch) -> None:
    # Its size alone could not change a selection; each dim's norm weight does.
    patch.setattr(FlatRun, "index_latent", lambda self, layer, u, qr: u @ layer.mla.query_down.T)


@mistake("RMSNorm for k_norm")
def _rms_keys(patch: Patch) -> None:
    patch.setattr(engine.model.indexer, "layer_norm", lambda x, weight, bias, eps: rms_norm(x, weight, eps) + bias)


@mistake("no bias in k_norm")
def _no_bias(patch: Patch) -> None:
    real = engine.model.indexer.layer_norm
    patch.setattr(engine.model.indexer, "layer_norm", lambda x, weight, bias, eps: real(x, weight, torch.zeros_like(bias), eps))


def _scores_by(patch: Patch, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Score with a formula of products [T, I, keys] and head weights [T, I]."""
    real = FlatRun.scores

    def scored(self: FlatRun, local: int, query: Tensor, head_weights: Tensor, keys: int) -> Tensor:
        out = real(self, local, query, head_weights, keys)
        products = torch.einsum("tid,kd->tik", query, self.keys_of(local, keys))
        out[:, :keys] = formula(products, head_weights)
        return out

    patch.setattr(FlatRun, "scores", scored)


@mistake("no ReLU in scores")
def _no_relu(patch: Patch) -> None:
    _scores_by(patch, lambda products, weights: (products * weights[..., None]).sum(1))


@mistake("no head weights in scores")
def _no_head_weights(patch: Patch) -> None:
    _scores_by(patch, lambda products, weights: products.relu().sum(1))


@mistake("scores clamped at zero")
def _clamped(patch: Patch) -> None:
    _scores_by(patch, lambda products, weights: (products.relu() * weights[..., None]).sum(1).relu())


@mistake("latent not normed")
def _raw_row(patch: Patch) -> None:
    def raw(self: MlaWeights, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = u @ self.row_down.T
        latents = self.row_norm.shape[0]
        return both[:, :latents], engine.model.mla.rotate(both[:, latents:], cos, sin)

    patch.setattr(MlaWeights, "project_row", raw)


@mistake("RoPE key normed with the latent")
def _normed_key(patch: Patch) -> None:
    def together(self: MlaWeights, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = u @ self.row_down.T
        latents = self.row_norm.shape[0]
        weight = torch.cat((self.row_norm, torch.ones(both.shape[1] - latents)))
        normed = rms_norm(both, weight, self.norm_eps)
        return normed[:, :latents], engine.model.mla.rotate(normed[:, latents:], cos, sin)

    patch.setattr(MlaWeights, "project_row", together)


def _scaled_by(patch: Patch, width: Callable[[Model], int]) -> None:
    start = FlatRun.__init__

    def started(self: FlatRun, model: Model, *args: int, **options: str) -> None:
        start(self, model, *args, **options)
        self.scale = width(model) ** -0.5

    patch.setattr(FlatRun, "__init__", started)


@mistake("softmax scale without RoPE dims")
def _nope_scale(patch: Patch) -> None:
    _scaled_by(patch, lambda model: model.config.nope)


@mistake("softmax scale of the absorbed query")
def _absorbed_scale(patch: Patch) -> None:
    _scaled_by(patch, lambda model: model.config.latent + model.config.rope)


@mistake("softmax scale of head_dim")
def _head_dim_scale(patch: Patch) -> None:
    _scaled_by(patch, lambda model: 192)


def _routed_by(patch: Patch, **changed: Callable[[MoeWeights], object]) -> None:
    """Feed with some fields of the MoE weights replaced."""
    feed = MoeWeights.feed
    patch.setattr(
        MoeWeights, "feed", lambda self, y: feed(dataclasses.replace(self, **{name: change(self) for name, change in changed.items()}), y)
    )


def _rerouted(**changed: object) -> Callable[[MoeWeights], object]:
    return lambda moe: dataclasses.replace(moe.routing, **changed)


@mistake("no correction bias")
def _no_correction(patch: Patch) -> None:
    _routed_by(patch, bias=lambda moe: torch.zeros_like(moe.bias))


@mistake("correction bias in bfloat16")
def _rounded_bias(patch: Patch) -> None:
    _routed_by(patch, bias=lambda moe: moe.bias.bfloat16().float())


@mistake("router in bfloat16")
def _rounded_router(patch: Patch) -> None:
    def rounded(y: Tensor, router: Tensor, bias: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        score = torch.sigmoid(y.bfloat16() @ router.bfloat16().T)
        expert_of = (score + bias.bfloat16()).topk(options["experts_per_token"]).indices
        weight_of = score.gather(1, expert_of).float()
        return expert_of, weight_of / weight_of.sum(-1, keepdim=True) * options["factor"]

    patch.setattr(engine.model.moe, "route", rounded)


@mistake("biased scores as expert weights")
def _biased_weights(patch: Patch) -> None:
    real = engine.model.moe.route

    def biased(y: Tensor, router: Tensor, bias: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        expert_of, _ = real(y, router, bias, **options)
        weight_of = (torch.sigmoid(y @ router.T) + bias).gather(1, expert_of)
        return expert_of, weight_of / weight_of.sum(-1, keepdim=True) * 2.5

    patch.setattr(engine.model.moe, "route", biased)


@mistake("expert weights not normalised")
def _unnormalised(patch: Patch) -> None:
    _routed_by(patch, routing=_rerouted(normalise=False))


@mistake("no routed factor")
def _no_factor(patch: Patch) -> None:
    _routed_by(patch, routing=_rerouted(factor=1.0))


@mistake("factor on the shared expert")
def _factor_on_shared(patch: Patch) -> None:
    _routed_by(patch, shared=lambda moe: dataclasses.replace(moe.shared, down=moe.shared.down * moe.routing.factor))


@mistake("routing groups ignored", "grouped routing")
def _no_groups(patch: Patch) -> None:
    _routed_by(patch, routing=_rerouted(groups=1, groups_kept=1))


@mistake("masked groups set to zero", "grouped routing")
def _groups_at_zero(patch: Patch) -> None:
    def zeroed(y: Tensor, router: Tensor, bias: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        score = torch.sigmoid(y @ router.T)
        choice = (score + bias).view(len(y), options["groups"], -1)
        best = choice.topk(2).values.sum(-1).topk(options["groups_kept"]).indices
        kept = torch.zeros(choice.shape[:2]).scatter(1, best, 1.0).bool()
        masked = choice.masked_fill(~kept[..., None], 0.0).flatten(1)
        expert_of = masked.topk(options["experts_per_token"]).indices
        weight_of = score.gather(1, expert_of)
        return expert_of, weight_of / weight_of.sum(-1, keepdim=True) * options["factor"]

    patch.setattr(engine.model.moe, "route", zeroed)


@mistake("last scale row lost", "block fp8")
def _lost_scale_row(patch: Patch) -> None:
    real = WeightReader._dequantised

    def shifted(self: WeightReader, tensor: Tensor, scale_name: str) -> Tensor:
        weight = real(self, tensor, scale_name)
        ragged = tensor.shape[0] % self._block[0]
        if "kv_a_proj" in scale_name and ragged:
            scale = self._files.read(scale_name).repeat_interleave(self._block[1], -1)[:, : tensor.shape[1]]
            weight[-ragged:] = tensor[-ragged:].float() * scale[-2]
        return weight

    patch.setattr(WeightReader, "_dequantised", shifted)


@mistake("scales applied after the head cut", "block fp8")
def _scales_after_cut(patch: Patch) -> None:
    real = WeightReader._dequantised

    def per_head(self: WeightReader, tensor: Tensor, scale_name: str) -> Tensor:
        if "kv_b_proj" not in scale_name:
            return real(self, tensor, scale_name)
        real(self, tensor, scale_name)
        scale = self._files.read(scale_name).repeat_interleave(self._block[1], -1)[:, : tensor.shape[1]]
        heads = tensor.float().view(5, -1, tensor.shape[1])  # blocks counted anew from each head's first row
        blocks = -(-heads.shape[1] // self._block[0])
        index = (torch.arange(5)[:, None] * blocks + torch.arange(heads.shape[1])[None] // self._block[0]).clamp(max=len(scale) - 1)
        return (heads * scale[index]).flatten(0, 1)

    patch.setattr(WeightReader, "_dequantised", per_head)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    root = tmp_path_factory.mktemp("mistakes")
    made = {}
    for name in sorted({configuration for configuration, _ in MISTAKES.values()}):
        directory = make_checkpoint(root, name)
        made[name] = (directory, transformers_logits(directory, prompt_ids(named(name))))
    return made


def _largest_difference(configuration: str, references: dict[str, tuple[Path, Tensor]], rows: int = 1000, **options: float) -> float:
    directory, expected = references[configuration]
    ids = prompt_ids(named(configuration))[:rows]
    logits = FlatRun(load_model(directory, **options), 256).append(ids)
    return float((logits - expected[:rows]).abs().max())


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_shows(name: str, references: dict[str, tuple[Path, Tensor]], monkeypatch: Patch) -> None:
    """A model with this one mistake differs from transformers by a thousand times the tolerance and more."""
    configuration, broken = MISTAKES[name]
    broken(monkeypatch)
    assert _largest_difference(configuration, references) > MOVED_MIN


def test_eps_of_the_latent_norms_shows(references: dict[str, tuple[Path, Tensor]]) -> None:
    """The serving engines' eps of 1e-5 in the latent norms moves logits even on a prompt of four tokens."""
    assert _largest_difference("shared", references, rows=4) <= 1e-4
    assert _largest_difference("shared", references, rows=4, latent_norm_eps=1e-5) > 0.01


def test_indexer_mistakes_hide_in_short_prompts(references: dict[str, tuple[Path, Tensor]], monkeypatch: Patch) -> None:
    """Up to top-k tokens a broken indexer changes nothing, which is why every prompt here is longer."""
    for name in ("no ReLU in scores", "half-split RoPE in the indexer", "dense attention"):
        MISTAKES[name][1](monkeypatch)
    assert _largest_difference("shared", references, rows=8) <= 1e-4
    assert _largest_difference("shared", references) > MOVED_MIN


def test_unbroken_model_agrees(references: dict[str, tuple[Path, Tensor]]) -> None:
    """Without a mistake the same comparison is within tolerance on every configuration used here."""
    for configuration in references:
        assert _largest_difference(configuration, references) <= 1e-4
