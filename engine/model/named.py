"""Configurations known by name, for planning and for weights made from a seed.

Holds the fields of their config.json and nothing else. A name is no directory: there are no weights, tokenizer or template behind it.

1. `glm-5.3` is the whole model.
2. `glm-5.3-slice` is what one card holds: its true widths and its first ten layers (three dense, seven MoE; selection groups {0}, {1},
   {2..5}, {6..9}) with the MTP block, and 64 of the 256 experts: 45.0 GiB in bf16, of which 36 GiB are routed experts.
3. `glm-5.3-slice-8` is that slice's first eight layers without the MTP block, 30.2 GiB: sixteen histories of a million rows fit beside it,
   98 GiB of blocks in RAM and 18.9 GiB on the card.
4. `glm-5.3-slice-int4` is the slice with routed experts, but the MTP block's, in four bits, groups of 64; `glm-5.3-slice-mix` also has
   attention, dense and shared MLPs in eight bits, as published mixes have. `glm-5.3-int4` and `glm-5.3-mix` are the whole model so.
Source: model.md, sections 1 and 4.3.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.model.quantisation import Scheme, described

__all__ = ["NAMED"]

_WHOLE: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "vocab_size": 154_880, "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True,
        "intermediate_size": 12_288, "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}, "max_position_embeddings": 1_048_576,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
        "eos_token_id": [154_820, 154_827, 154_829], "pad_token_id": 154_820,
    }
)  # fmt: skip

_SLICE: Mapping[str, Any] = MappingProxyType({**_WHOLE, "num_hidden_layers": 10, "n_routed_experts": 64})
_INT4 = (Scheme(4, 64, True, (r"re:.*\.mlp\.experts\..*",)),)
_MIX = (*_INT4, Scheme(8, 64, True, (r"re:.*\.self_attn\.[a-z_]*proj[a-z_]*$", r"re:.*\.mlp\.(shared_experts\.)?[a-z]*_proj$")))


def _quantised(config: Mapping[str, Any], schemes: tuple[Scheme, ...]) -> Mapping[str, Any]:
    """With the MTP block as it is."""
    mtp = rf"re:model\.layers\.{config['num_hidden_layers']}\..*"
    return MappingProxyType({**config, "quantization_config": described(schemes, (mtp, "lm_head"))})


NAMED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm-5.3": _WHOLE, "glm-5.3-slice": _SLICE,
        "glm-5.3-slice-8": MappingProxyType({**_SLICE, "num_hidden_layers": 8, "num_nextn_predict_layers": 0}),
        "glm-5.3-int4": _quantised(_WHOLE, _INT4), "glm-5.3-mix": _quantised(_WHOLE, _MIX),
        "glm-5.3-slice-int4": _quantised(_SLICE, _INT4), "glm-5.3-slice-mix": _quantised(_SLICE, _MIX),
    }
)  # fmt: skip
