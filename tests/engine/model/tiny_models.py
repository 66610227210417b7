"""Tiny models of the architecture with weights that matter, and checkpoints of them in every stored form.

Default initialisation (std 0.02) makes attention nearly uniform and hides mistakes; the recipe here does not.
Source: model.md, sections 4 and 7.3.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.config import ModelConfig

__all__ = ["FP8_BLOCK", "dequantised", "packable_config", "quantised", "random_tensors", "tiny_config", "write_checkpoint"]

FP8_BLOCK = (20, 24)  # small and unlike, so that tiny weights have several blocks, the last ones ragged, and heads straddle them
_KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj")


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A config.json: four layers, groups {0}, {1, 2}, {3}, one dense layer; `overrides` replace fields, None removes one."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "float32",
        "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "index_n_heads": 12, "index_head_dim": 16, "index_topk": 8, "indexer_types": ["full", "full", "shared", "full"],
        "intermediate_size": 64, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5,
        "rope_interleave": True, "indexer_rope_interleave": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
        "bos_token_id": None, "eos_token_id": [90, 92], "pad_token_id": 90, "head_dim": 192,
    }  # fmt: skip
    config.update(overrides)
    return {name: value for name, value in config.items() if value is not None or name in ("bos_token_id",)}


def packable_config(**overrides: Any) -> dict[str, Any]:
    """A tiny config whose widths are multiples of 128."""
    widths = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128}
    return tiny_config(**widths | {"v_head_dim": 32, "n_routed_experts": 4} | overrides)


def random_tensors(config: Mapping[str, Any], seed: int, *, mtp: bool = True) -> dict[str, Tensor]:
    """Every tensor of such a checkpoint by its stored name, float32, one tensor an expert."""
    shape = ModelConfig.read(config)
    draw = _Draw(torch.Generator().manual_seed(seed))
    tensors = {
        "model.embed_tokens.weight": draw.normal(shape.vocabulary, shape.hidden),
        "model.norm.weight": draw.norm(shape.hidden),
        "lm_head.weight": 2.0 * draw.linear(shape.vocabulary, shape.hidden),
    }
    for layer in range(shape.layers + mtp):
        prefix = f"model.layers.{layer}."
        tensors |= _attention(draw, prefix, shape, full=layer == shape.layers or shape.full_layers[layer])
        dense = layer < shape.layers and shape.dense_layers[layer]
        if dense:
            tensors |= _mlp(draw, f"{prefix}mlp.", shape.hidden, shape.dense_width)
        else:
            tensors |= _moe(draw, f"{prefix}mlp.", shape)
    if mtp:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.{shape.layers}.{name}.weight"] = draw.norm(shape.hidden)
        tensors[f"model.layers.{shape.layers}.eh_proj.weight"] = draw.linear(shape.hidden, 2 * shape.hidden)
    return tensors


class _Draw:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def linear(self, out: int, into: int) -> Tensor:
        return self.normal(out, into) / into**0.5

    def norm(self, width: int) -> Tensor:
        return 1.0 + 0.25 * self.normal(width)


def _attention(draw: _Draw, prefix: str, shape: ModelConfig, *, full: bool) -> dict[str, Tensor]:
    query = shape.nope + shape.rope
    row = draw.linear(shape.latent + shape.rope, shape.hidden)
    row[: shape.latent] *= 0.03  # small before the norm, so that its eps shows
    tensors = {
        "input_layernorm.weight": draw.norm(shape.hidden),
        "post_attention_layernorm.weight": draw.norm(shape.hidden),
        "self_attn.q_a_proj.weight": 0.03 * draw.linear(shape.query_latent, shape.hidden),
        "self_attn.q_a_layernorm.weight": draw.norm(shape.query_latent),
        "self_attn.q_b_proj.weight": 1.6 * draw.linear(shape.heads * query, shape.query_latent),
        "self_attn.kv_a_proj_with_mqa.weight": row,
        "self_attn.kv_a_layernorm.weight": draw.norm(shape.latent),
        "self_attn.kv_b_proj.weight": draw.linear(shape.heads * (shape.nope + shape.value), shape.latent),
        "self_attn.o_proj.weight": draw.linear(shape.hidden, shape.heads * shape.value),
    }
    if full:
        tensors |= {
            "self_attn.indexer.wq_b.weight": draw.linear(shape.index_heads * shape.index_width, shape.query_latent),
            "self_attn.indexer.wk.weight": draw.linear(shape.index_width, shape.hidden),
            "self_attn.indexer.k_norm.weight": draw.norm(shape.index_width),
            "self_attn.indexer.k_norm.bias": 0.5 * draw.normal(shape.index_width),
            "self_attn.indexer.weights_proj.weight": draw.linear(shape.index_heads, shape.hidden),
        }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _mlp(draw: _Draw, prefix: str, hidden: int, width: int) -> dict[str, Tensor]:
    return {
        f"{prefix}gate_proj.weight": draw.linear(width, hidden),
        f"{prefix}up_proj.weight": draw.linear(width, hidden),
        f"{prefix}down_proj.weight": draw.linear(hidden, width),
    }


def _moe(draw: _Draw, prefix: str, shape: ModelConfig) -> dict[str, Tensor]:
    # Near the real band, where rounding the bias shows; below zero in a grouped model, where masking groups with 0 shows.
    middle = 6.9 if shape.expert_groups == 1 else -1.0
    tensors = {
        f"{prefix}gate.weight": 1.6 * draw.linear(shape.experts, shape.hidden),
        f"{prefix}gate.e_score_correction_bias": middle + 0.15 * draw.normal(shape.experts),
    }
    for expert in range(shape.experts):
        tensors |= _mlp(draw, f"{prefix}experts.{expert}.", shape.hidden, shape.expert_width)
    return tensors | _mlp(draw, f"{prefix}shared_experts.", shape.hidden, shape.shared_width)


def quantised(tensors: Mapping[str, Tensor], block: tuple[int, int] = FP8_BLOCK) -> dict[str, Tensor]:
    """The block-FP8 form: projections in float8 with a float32 scale a block, other tensors as they are."""
    stored: dict[str, Tensor] = {}
    rows, columns = block
    for name, tensor in tensors.items():
        if any(kept in name for kept in _KEPT):
            stored[name] = tensor
            continue
        out, into = tensor.shape
        scale = torch.empty(-(-out // rows), -(-into // columns))
        packed = torch.empty(out, into, dtype=torch.float8_e4m3fn)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = tensor[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scale[i, j] = part.abs().max() / 448.0
                packed[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = (part / scale[i, j]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = packed, scale
    return stored


def dequantised(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float32 tensors of any stored form, element by element from the definition: value times the scale of its block."""
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        plain[name] = tensor.to(torch.float32)
        scale = stored.get(f"{name}_scale_inv")
        if scale is not None:
            row = torch.arange(tensor.shape[0])[:, None] // FP8_BLOCK[0]
            column = torch.arange(tensor.shape[1])[None, :] // FP8_BLOCK[1]
            plain[name] = plain[name] * scale[row, column]
    return plain


def write_checkpoint(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    directory: Path,
    *,
    shards: int = 1,
    merged: bool = False,
    fp8: bool = False,
    block: tuple[int, int] = FP8_BLOCK,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Hugging Face directory: several files with an index when `shards` > 1, merged experts, block-FP8, or another dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    described = dict(config)
    stored = {name: tensor if "correction_bias" in name else tensor.to(dtype) for name, tensor in tensors.items()}
    if fp8:
        stored = quantised(stored, block)
        described["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
            "modules_to_not_convert": ["model.layers.0.self_attn.indexers_proj"],
        }  # fmt: skip
    if merged:
        stored = with_merged_experts(stored)
    (directory / "config.json").write_text(json.dumps(described))
    stored = {name: tensor.contiguous().clone() for name, tensor in stored.items()}
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return directory
    file_of = {name: f"model-{1 + i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in sorted(set(file_of.values())):
        save_file({name: stored[name] for name in stored if file_of[name] == file}, directory / file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def with_merged_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with each layer's experts in two: gate_up_proj [E, 2F, H], gate rows first, and down_proj [E, H, F]."""
    merged = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] for name in tensors if ".mlp.experts." in name}):
        experts = len([name for name in tensors if name.startswith(f"{prefix}.experts.") and name.endswith("down_proj.weight")])

        def each(kind: str, prefix: str = prefix, experts: int = experts) -> list[Tensor]:
            return [tensors[f"{prefix}.experts.{expert}.{kind}_proj.weight"] for expert in range(experts)]

        merged[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(each("gate"), each("up"), strict=True)])
        merged[f"{prefix}.experts.down_proj"] = torch.stack(each("down"))
    return merged
