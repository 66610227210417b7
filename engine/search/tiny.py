"""A tiny model of the architecture with random weights: what scenarios run.

Three layers that keep rows (a full one, one that shares its selection, the MTP block's), top-k 8, so that short histories already
overflow a selection and a hot cache. Weights are wide enough that a wrong row, key or position changes the logits.
Knows no scenarios. The directory is read once a process.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.glm import Model, load_model
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

__all__ = ["CONTEXT_MAX", "TOP_K", "VOCABULARY", "TinyModel"]

VOCABULARY = 64
TOP_K = 8
CONTEXT_MAX = 512
_CONFIG: dict[str, object] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "float32",
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": TOP_K, "indexer_types": ["full", "shared"],
    "intermediate_size": 32, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5,
    "rope_interleave": True, "indexer_rope_interleave": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "max_position_embeddings": CONTEXT_MAX, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "bos_token_id": None, "eos_token_id": [VOCABULARY - 1], "pad_token_id": VOCABULARY - 1, "head_dim": 16,
}  # fmt: skip


class TinyModel:
    """The model, its absent tokenizer and its absent template."""

    def __init__(self, seed: int = 5) -> None:
        with TemporaryDirectory(prefix="forebay-search-") as name:
            directory = Path(name)
            (directory / "config.json").write_text(json.dumps(_CONFIG))
            save_file(_tensors(ModelConfig.read(_CONFIG), seed), directory / "model.safetensors")
            self.model: Model = load_model(directory)
            self.tokenizer = Tokenizer.load(directory)
            self.template = ChatTemplate.load(directory)


def prompt(rows: int, seed: int) -> tuple[int, ...]:
    """`rows` token ids drawn from `seed`."""
    return tuple(torch.randint(0, VOCABULARY - 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist())


def _tensors(shape: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, float32."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int) -> Tensor:
        drawn: Tensor = torch.randn((out, into), generator=generator)
        drawn *= into**-0.5
        return drawn

    def norm(width: int) -> Tensor:
        return 1.0 + 0.25 * torch.randn((width,), generator=generator)

    def mlp(prefix: str, width: int) -> dict[str, Tensor]:
        widths = {"gate_proj": (width, shape.hidden), "up_proj": (width, shape.hidden), "down_proj": (shape.hidden, width)}
        return {f"{prefix}.{name}.weight": matrix(*sizes) for name, sizes in widths.items()}

    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden) * shape.hidden**0.5,
        "model.norm.weight": norm(shape.hidden),
        "lm_head.weight": 2.0 * matrix(shape.vocabulary, shape.hidden),
    }
    for layer in range(shape.layers + 1):
        block = f"model.layers.{layer}"
        full = layer == shape.layers or shape.full_layers[layer]
        sizes = _attention_sizes(shape, full=full)
        tensors |= {f"{block}.self_attn.{name}.weight": matrix(*size) if len(size) == 2 else norm(*size) for name, size in sizes.items()}
        if full:
            tensors[f"{block}.self_attn.indexer.k_norm.bias"] = 0.5 * torch.randn((shape.index_width,), generator=generator)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{name}.weight"] = norm(shape.hidden)
        if layer < shape.layers and shape.dense_layers[layer]:
            tensors |= mlp(f"{block}.mlp", shape.dense_width)
            continue
        tensors[f"{block}.mlp.gate.weight"] = 1.6 * matrix(shape.experts, shape.hidden)
        tensors[f"{block}.mlp.gate.e_score_correction_bias"] = 0.15 * torch.randn((shape.experts,), generator=generator)
        for expert in range(shape.experts):
            tensors |= mlp(f"{block}.mlp.experts.{expert}", shape.expert_width)
        tensors |= mlp(f"{block}.mlp.shared_experts", shape.shared_width)
    outer = f"model.layers.{shape.layers}"
    tensors |= {f"{outer}.{name}.weight": norm(shape.hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{outer}.eh_proj.weight"] = matrix(shape.hidden, 2 * shape.hidden)
    return tensors


def _attention_sizes(shape: ModelConfig, *, full: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's attention weights; one size: a norm."""
    sizes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (shape.query_latent, shape.hidden),
        "q_a_layernorm": (shape.query_latent,),
        "q_b_proj": (shape.heads * (shape.nope + shape.rope), shape.query_latent),
        "kv_a_proj_with_mqa": (shape.latent + shape.rope, shape.hidden),
        "kv_a_layernorm": (shape.latent,),
        "kv_b_proj": (shape.heads * (shape.nope + shape.value), shape.latent),
        "o_proj": (shape.hidden, shape.heads * shape.value),
    }
    if full:
        sizes |= {
            "indexer.wq_b": (shape.index_heads * shape.index_width, shape.query_latent),
            "indexer.wk": (shape.index_width, shape.hidden),
            "indexer.k_norm": (shape.index_width,),
            "indexer.weights_proj": (shape.index_heads, shape.hidden),
        }
    return sizes
