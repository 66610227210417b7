"""The demo model's numbers, and the config.json they make.

Holds: `Shape` and `config_of`. Knows no tensors and no training.

1. `config_of(Shape())` has every field that published GLM-5.2 files have, with this model's values.
2. Widths keep the architecture's relations: query/key width is nope + rope, RoPE dims are first in the indexer, last in the query.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["STOP_TOKENS", "Shape", "config_of"]

STOP_TOKENS = (2027, 2034, 2036)  # <|endoftext|>, <|user|>, <|observation|> of the demo tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths and counts of one `glm_moe_dsa` model with one MTP block. All are plain counts of numbers, heads, layers or tokens."""

    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 8
    dense_layers: int = 1
    heads: int = 8
    query_latent: int = 192
    latent: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 32
    dense_width: int = 384
    experts: int = 8
    experts_a_token: int = 2
    expert_width: int = 96
    routed_factor: float = 2.5
    index_heads: int = 4
    index_width: int = 64
    picks: int = 256
    full_layers: tuple[int, ...] = (0, 4)
    theta: float = 1e6
    positions_max: int = 131_072
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        assert 0 in self.full_layers, "layer 0 selects: a shared layer has nothing to share before it"
        assert self.value <= self.nope + self.rope, "values are padded to the query width for fused attention"
        assert self.rope <= self.index_width, "the indexer rotates its first rope dims"

    @property
    def query(self) -> int:
        """Query and key width of a head."""
        return self.nope + self.rope


def config_of(shape: Shape) -> dict[str, Any]:
    """The contents of config.json for `shape`, Hugging Face field names."""
    layers = range(shape.layers)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": list(STOP_TOKENS),
        "pad_token_id": STOP_TOKENS[0],
        "ep_size": 1,
        "first_k_dense_replace": shape.dense_layers,
        "head_dim": shape.rope,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "index_head_dim": shape.index_width,
        "index_n_heads": shape.index_heads,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 1,
        "index_topk": shape.picks,
        "index_topk_freq": shape.full_layers[1] if len(shape.full_layers) > 1 else shape.layers,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if layer in shape.full_layers else "shared" for layer in layers],
        "initializer_range": 0.02,
        "intermediate_size": shape.dense_width,
        "kv_lora_rank": shape.latent,
        "max_position_embeddings": shape.positions_max,
        "mlp_layer_types": ["dense" if layer < shape.dense_layers else "sparse" for layer in layers],
        "moe_intermediate_size": shape.expert_width,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_a_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": shape.query_latent,
        "qk_head_dim": shape.query,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "rms_norm_eps": shape.norm_eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "routed_scaling_factor": shape.routed_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": shape.value,
        "vocab_size": shape.vocabulary,
    }
