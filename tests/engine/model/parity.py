"""Configurations to compare on, and transformers' logits for them.

For every test that compares this engine with transformers: the seeds here were searched so that the smallest gap at a selection's
edge and in routing exceeds 5e-5 (with rounded rows: and no stored value lies at a rounding boundary), else the comparison is a coin toss;
`test_model_parity.py` checks that they still do.
Source: model.md, section 7.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.utils import logging as transformers_logging

from tests.engine.model.tiny_models import dequantised, random_tensors, tiny_config, with_merged_experts, write_checkpoint

__all__ = ["Configuration", "configurations", "make_checkpoint", "named", "prompt_ids", "transformers_logits", "transformers_model"]

Rows = Literal["f32", "bf16", "q8g64"]
Keys = Literal["f32", "bf16", "e4m3"]
transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class Configuration:
    """One model, prompt and row format to compare on. Index keys are float32 unless `keys` says otherwise."""

    name: str
    seed: int
    prompt_tokens: int
    config: dict[str, Any] = field(default_factory=tiny_config)
    rows: Rows = "f32"
    keys: Keys = "f32"
    shards: int = 1
    merged: bool = False
    fp8: bool = False
    stored: torch.dtype = torch.float32


_SMALL = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "kv_lora_rank": 24, "first_k_dense_replace": 0}


def configurations() -> list[Configuration]:
    """Every configuration that parity is promised on."""
    odd = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40, "index_head_dim": 24, "num_attention_heads": 5,
           "num_key_value_heads": 5, "hidden_size": 40, "q_lora_rank": 28}  # fmt: skip
    return [
        Configuration("shared", 3, 96),
        Configuration("every layer full", 3, 90, tiny_config(indexer_types=None, num_hidden_layers=3, first_k_dense_replace=0)),
        Configuration("frequency and offset", 11, 100, tiny_config(
            indexer_types=None, index_topk_freq=3, index_skip_topk_offset=1, num_hidden_layers=5, index_topk=16, first_k_dense_replace=3)),
        Configuration("grouped routing", 15, 90, tiny_config(
            n_routed_experts=12, n_group=3, topk_group=2, num_experts_per_tok=3, index_topk_pattern="FSFS", indexer_types=None)),
        Configuration("two shared experts", 18, 80, tiny_config(n_shared_experts=2, routed_scaling_factor=1.7, norm_topk_prob=False)),
        Configuration("odd widths", 23, 100, tiny_config(**odd), shards=3),
        Configuration("ragged row groups", 4, 120, tiny_config(kv_lora_rank=100, index_topk=16), stored=torch.bfloat16),
        Configuration("small theta", 11, 90, tiny_config(
            rope_parameters=None, rope_theta=1e4, mlp_layer_types=["dense", "dense", "sparse", "dense"]), merged=True),
        Configuration("block fp8", 21, 90, tiny_config(**odd), fp8=True, shards=2),
        Configuration("bf16 rows", 292, 64, tiny_config(**_SMALL), rows="bf16"),
        Configuration("q8g64 rows", 292, 80, tiny_config(**_SMALL), rows="q8g64"),
        Configuration("q8g64 ragged rows", 345, 80, tiny_config(**{**_SMALL, "kv_lora_rank": 72}), rows="q8g64"),
        Configuration("q8g64 rows, bf16 keys", 7, 80, tiny_config(**_SMALL), rows="q8g64", keys="bf16"),
        Configuration("q8g64 rows, e4m3 keys", 7, 80, tiny_config(**_SMALL), rows="q8g64", keys="e4m3"),
    ]  # fmt: skip


def named(name: str) -> Configuration:
    """The configuration of this name."""
    return next(each for each in configurations() if each.name == name)


def prompt_ids(configuration: Configuration) -> Tensor:
    """The configuration's prompt, int64 [prompt_tokens]."""
    generator = torch.Generator().manual_seed(1000 + configuration.seed)
    return torch.randint(0, configuration.config["vocab_size"], (configuration.prompt_tokens,), generator=generator)


def make_checkpoint(directory: Path, name: str) -> Path:
    """Write the named configuration's model below `directory`. Returns its folder."""
    chosen = named(name)
    tensors = random_tensors(chosen.config, chosen.seed)
    return write_checkpoint(
        tensors, chosen.config, directory / name.replace(" ", "-"),
        shards=chosen.shards, merged=chosen.merged, fp8=chosen.fp8, dtype=chosen.stored,
    )  # fmt: skip


def transformers_logits(directory: Path, ids: Tensor, rows: Rows = "f32", keys: Keys = "f32") -> Tensor:
    """Transformers' logits, float32 [T, V], for a whole prompt of ids, int64 [T], with its stored rows rounded as `rows` says."""
    model = transformers_model(directory)
    with torch.no_grad():
        cache = _RoundedCache(rows, keys, config=model.config)
        logits: Tensor = model(input_ids=ids[None], cache=cache, use_cache=True).logits[0]
    return logits


def transformers_model(directory: Path, *, with_mtp_layer: bool = False) -> GlmMoeDsaForCausalLM:
    """The directory's model in float32 with eager attention, its stored weights dequantised here.

    with_mtp_layer: the MTP block's decoder layer as one more layer, full and sparse.
    """
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    stored: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    plain = dequantised(stored)
    if not any(name.endswith("experts.gate_up_proj") for name in plain):
        plain = with_merged_experts(plain)
    parsed = GlmMoeDsaConfig(**config)
    layers = parsed.num_hidden_layers
    if with_mtp_layer:
        config |= {"indexer_types": [*parsed.indexer_types, "full"], "mlp_layer_types": [*parsed.mlp_layer_types, "sparse"]}
        config["num_hidden_layers"] = layers + 1
        parsed = GlmMoeDsaConfig(**config)
    else:
        plain = {name: tensor for name, tensor in plain.items() if not name.startswith(f"model.layers.{layers}.")}
    parsed._attn_implementation = "eager"
    parsed._experts_implementation = "eager"
    model = GlmMoeDsaForCausalLM(parsed).to(torch.float32).eval()
    outside = [name for name in plain if any(part in name for part in ("enorm", "hnorm", "eh_proj", "shared_head"))]
    model.load_state_dict({name: tensor for name, tensor in plain.items() if name not in outside}, strict=True)
    return model


class _RoundedCache(DynamicCache):
    """Transformers' cache whose rows and index keys go through the stored form's rounding on their way in."""

    def __init__(self, rows: Rows, keys: str, **options: Any) -> None:
        super().__init__(**options)
        self._rows = rows
        self._keys = keys

    def update(self, latent: Tensor, rope: Tensor, layer: int, *rest: Any, **options: Any) -> Any:
        return super().update(*rounded_row(latent, rope, self._rows), layer, *rest, **options)

    def update_indexer(self, keys: Tensor, *rest: Any, **options: Any) -> Any:
        return super().update_indexer(rounded_key(keys, self._keys), *rest, **options)


def rounded_key(keys: Tensor, form: str) -> Tensor:
    """Index keys [..., Di], float32, after being stored as `form` and read back."""
    if form == "f32":
        return keys
    if form == "bf16":
        return keys.to(torch.bfloat16).to(torch.float32)
    scale = keys.abs().amax(-1, keepdim=True) / 448.0
    return (keys / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


def key_gap(keys: Tensor, form: str) -> float:
    """`rounding_gap` of index keys."""
    if form == "f32":
        return float("inf")
    if form == "bf16":
        return tie_distance(keys, torch.bfloat16)
    scale = keys.abs().amax(-1, keepdim=True) / 448.0
    steps = keys.abs() / scale
    spacing = torch.exp2(steps.clamp(min=2.0**-6).log2().floor() - 3)
    fraction = steps / spacing
    distance = (((fraction - fraction.floor()) - 0.5).abs() * spacing * scale).masked_fill(spacing * scale < 1e-4, float("inf"))
    return float(distance.min())


def rounded_row(latent: Tensor, rope: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Latents [..., R] and rotated keys [..., Dr], float32, after being stored as `rows` and read back."""
    if rows == "f32":
        return latent, rope
    key = rope.to(torch.bfloat16).to(torch.float32)
    if rows == "bf16":
        return latent.to(torch.bfloat16).to(torch.float32), key
    restored = [_q8(group) for group in latent.split(64, dim=-1)]
    return torch.cat(restored, dim=-1), key


def _q8(group: Tensor) -> Tensor:
    """Symmetric int8 with one float16 scale, amax / 127; the quantiser uses the rounded scale."""
    scale = (group.abs().amax(-1, keepdim=True) / 127.0).to(torch.float16).to(torch.float32)
    steps = torch.where(scale > 0, group / torch.where(scale > 0, scale, 1.0), 0.0).round().clamp(-127, 127)
    return steps * scale


def rounding_gap(latent: Tensor, rope: Tensor, rows: Rows) -> float:
    """Smallest distance from a value that is about to be stored to the nearest point where its rounding flips.

    Values so small that a flip moves them by less than 1e-4 do not count: a flip of theirs is within tolerance.
    """
    if rows == "f32":
        return float("inf")
    if rows == "bf16":
        return min(tie_distance(latent, torch.bfloat16), tie_distance(rope, torch.bfloat16))
    gaps = [tie_distance(rope, torch.bfloat16)]
    for group in latent.split(64, dim=-1):
        amax = group.abs().amax(-1, keepdim=True) / 127.0
        scale = amax.to(torch.float16).to(torch.float32)
        steps = group / scale
        gaps.append(float((((steps - steps.floor()) - 0.5).abs() * scale).min()))
        gaps.append(127 * tie_distance(amax, torch.float16, flip_min=0.0))
    return min(gaps)


def tie_distance(x: Tensor, dtype: torch.dtype, *, flip_min: float = 1e-4) -> float:
    """Smallest distance to a midpoint between neighbours of `dtype`, among values whose neighbours lie at least `flip_min` apart."""
    bits = {torch.float16: 10, torch.bfloat16: 7}[dtype]
    _, exponent = torch.frexp(x)
    spacing = torch.ldexp(torch.ones_like(x), exponent - 1 - bits)
    steps = x / spacing
    distance = ((steps - steps.floor()) - 0.5).abs() * spacing
    return float(distance.masked_fill(spacing < flip_min, float("inf")).min())
