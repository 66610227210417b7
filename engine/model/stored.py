"""Names and shapes of the tensors that a checkpoint of the architecture stores, one an expert.

Holds `stored_shapes`, and `packed_shapes` of a checkpoint whose weights are packed integers. Knows no contents.
Source: model.md, sections 4.1 and 4.3.
"""

from engine.errors import BadModel, shown
from engine.model.config import ModelConfig
from engine.model.quantisation import Quantisation

__all__ = ["Shapes", "has_mtp_block", "packed_shapes", "stored_shapes"]

Shapes = dict[str, tuple[int, ...]]


def has_mtp_block(config: ModelConfig) -> bool:
    """Whether a checkpoint made after this config has the MTP block: unless `num_nextn_predict_layers` is 0. Raises BadModel above 1."""
    blocks = config.extra.get("num_nextn_predict_layers")
    if blocks not in (None, 0, 1):
        raise BadModel(f"config.json: num_nextn_predict_layers {shown(blocks)} is not supported, only 0 or 1")
    return blocks != 0


def stored_shapes(config: ModelConfig, *, mtp: bool) -> Shapes:
    """Shape of every tensor by its name, in the order of the model; `mtp`: with the MTP block."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocabulary, config.hidden),
        "model.norm.weight": (config.hidden,),
        "lm_head.weight": (config.vocabulary, config.hidden),
    }
    for layer in range(config.layers + mtp):
        main = layer < config.layers
        prefix = f"model.layers.{layer}."
        parts = {"input_layernorm.weight": (config.hidden,), "post_attention_layernorm.weight": (config.hidden,), **_attention(config)}
        if not main or config.full_layers[layer]:
            parts |= _indexer(config)
        parts |= _mlp("mlp.", config.hidden, config.dense_width) if main and config.dense_layers[layer] else _experts(config)
        if not main:
            parts |= {f"{name}.weight": (config.hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            parts["eh_proj.weight"] = (config.hidden, 2 * config.hidden)
        shapes |= {prefix + name: shape for name, shape in parts.items()}
    return shapes


def packed_shapes(shapes: Shapes, quantisation: Quantisation) -> Shapes:
    """Shapes of what compressed-tensors stores in place of each weight that has a scheme: words, scales, the shape, maybe zeros.

    Raises BadModel where a group does not divide a width.
    """
    packed: Shapes = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        scheme = quantisation.scheme_of(module) if len(shape) == 2 else None
        if scheme is None:
            packed[name] = shape
            continue
        outputs, width = shape
        group = scheme.group or width
        if width % group:
            raise BadModel(f"tensor {name}: groups of {group} do not divide the width {width}")
        packed[f"{module}.weight_packed"] = (outputs, -(-width * scheme.bits // 32))
        packed[f"{module}.weight_scale"] = (outputs, width // group)
        packed[f"{module}.weight_shape"] = (2,)
        if not scheme.symmetric:
            packed[f"{module}.weight_zero_point"] = (-(-outputs * scheme.bits // 32), width // group)
    return packed


def _attention(config: ModelConfig) -> Shapes:
    heads = config.heads
    return {
        "self_attn.q_a_proj.weight": (config.query_latent, config.hidden),
        "self_attn.q_a_layernorm.weight": (config.query_latent,),
        "self_attn.q_b_proj.weight": (heads * (config.nope + config.rope), config.query_latent),
        "self_attn.kv_a_proj_with_mqa.weight": (config.latent + config.rope, config.hidden),
        "self_attn.kv_a_layernorm.weight": (config.latent,),
        "self_attn.kv_b_proj.weight": (heads * (config.nope + config.value), config.latent),
        "self_attn.o_proj.weight": (config.hidden, heads * config.value),
    }


def _indexer(config: ModelConfig) -> Shapes:
    return {
        "self_attn.indexer.wq_b.weight": (config.index_heads * config.index_width, config.query_latent),
        "self_attn.indexer.wk.weight": (config.index_width, config.hidden),
        "self_attn.indexer.k_norm.weight": (config.index_width,),
        "self_attn.indexer.k_norm.bias": (config.index_width,),
        "self_attn.indexer.weights_proj.weight": (config.index_heads, config.hidden),
    }


def _experts(config: ModelConfig) -> Shapes:
    shapes: Shapes = {
        "mlp.gate.weight": (config.experts, config.hidden),
        "mlp.gate.e_score_correction_bias": (config.experts,),
    }
    for expert in range(config.experts):
        shapes |= _mlp(f"mlp.experts.{expert}.", config.hidden, config.expert_width)
    return shapes | _mlp("mlp.shared_experts.", config.hidden, config.shared_width)


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
