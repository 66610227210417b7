"""Reading config.json: sharing rules, other names, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GlmMoeDsaConfig

from engine.errors import BadModel
from engine.model.config import ModelConfig
from tests.engine.model.tiny_models import tiny_config

GLM_5_FULL = [0, 1, 2, *range(6, 75, 4)]


def _published(**differing: Any) -> dict[str, Any]:
    """The fields that all four published models share, as their files have them."""
    return {
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": True, "rope_interleave": True,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu",
        "attention_bias": False, "rms_norm_eps": 1e-5, "vocab_size": 154880, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
        "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820, "max_position_embeddings": 202752, "head_dim": 64,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "ep_size": 1, "attention_dropout": 0.0,
    } | differing  # fmt: skip


def _glm_5_2(**differing: Any) -> dict[str, Any]:
    types = ["full" if layer in GLM_5_FULL else "shared" for layer in range(78)]
    return _published(
        index_topk_freq=4, index_skip_topk_offset=3, index_topk_pattern=None, indexer_types=types, index_share_for_mtp_iteration=True,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 75, head_dim=192, max_position_embeddings=1048576, moe_router_dtype="float32",
        rope_parameters={"rope_theta": 8e6, "rope_type": "default"}, **differing,
    )  # fmt: skip


def test_glm_5_has_an_indexer_in_every_layer() -> None:
    """Without sharing fields each of the 78 layers is full and a group of its own, and MTP steps select anew."""
    config = ModelConfig.read(_published())
    assert config.groups() == tuple((layer,) for layer in range(78))
    assert config.dense_layers == (True,) * 3 + (False,) * 75
    assert config.share_mtp_selection is False
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert (config.rope, config.scale, config.rope_theta, config.context_max) == (64, 0.0625, 1e6, 202752)


def test_glm_5_2_groups() -> None:
    """The published list gives 21 full layers and the groups {0}, {1}, {2..5}, {6..9}, ... {74..77}."""
    config = ModelConfig.read(_glm_5_2())
    assert [layer for layer in range(78) if config.full_layers[layer]] == GLM_5_FULL
    assert config.groups() == ((0,), (1,), *(tuple(range(start, start + 4)) for start in range(2, 78, 4)))
    assert config.share_mtp_selection is True


def test_list_and_schedule_give_the_same_layers() -> None:
    """For the published files the list, the pattern and frequency with offset agree."""
    letters = "".join("F" if layer in GLM_5_FULL else "S" for layer in range(78))
    by_list = ModelConfig.read(_glm_5_2()).full_layers
    assert ModelConfig.read(_glm_5_2() | {"indexer_types": None}).full_layers == by_list
    assert ModelConfig.read(_published(index_topk_pattern=letters)).full_layers == by_list
    assert ModelConfig.read(_published(index_topk_pattern=_glm_5_2()["indexer_types"])).full_layers == by_list


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(-1, 5)), st.one_of(st.none(), st.integers(0, 5)))
def test_schedule_is_transformers(layers: int, frequency: int | None, offset: int | None) -> None:
    """Frequency and offset, given or not, choose the layers that transformers chooses."""
    fields = {"index_topk_freq": frequency, "index_skip_topk_offset": offset}
    given_fields = {name: value for name, value in fields.items() if value is not None}
    theirs = GlmMoeDsaConfig(num_hidden_layers=layers, **given_fields)
    config = tiny_config(indexer_types=None, num_hidden_layers=layers, **given_fields)
    if theirs.indexer_types[0] == "shared":
        with pytest.raises(BadModel, match="layer 0 must be full"):
            ModelConfig.read(config)
        return
    assert ["full" if full else "shared" for full in ModelConfig.read(config).full_layers] == theirs.indexer_types


def test_list_wins_over_pattern_and_pattern_over_schedule() -> None:
    """The first rule that applies decides."""
    both = tiny_config(indexer_types=["full", "shared", "full", "shared"], index_topk_pattern="FFFF", index_topk_freq=4)
    assert ModelConfig.read(both).full_layers == (True, False, True, False)
    assert ModelConfig.read(both | {"indexer_types": None}).full_layers == (True,) * 4


def test_stage_inside_a_group() -> None:
    """A stage's groups hold its layers only; one that starts inside a group begins without the full layer."""
    config = ModelConfig.read(_glm_5_2())
    assert config.groups(range(1, 4)) == ((1,), (2, 3))
    assert config.groups(range(4, 8)) == ((4, 5), (6, 7))


def test_other_names() -> None:
    """Experts under other names, theta at top level, one end token as a number."""
    for name in ("num_local_experts", "num_experts"):
        assert ModelConfig.read(tiny_config(n_routed_experts=None, **{name: 8})).experts == 8
    assert ModelConfig.read(tiny_config(n_routed_experts=8, num_experts=60)).experts == 8
    assert ModelConfig.read(tiny_config(rope_parameters=None, rope_theta=5e4)).rope_theta == 5e4
    assert ModelConfig.read(tiny_config(rope_theta=5e4)).rope_theta == 1e6
    assert ModelConfig.read(tiny_config(eos_token_id=7)).eos_token_ids == (7,)
    assert ModelConfig.read(tiny_config(eos_token_id=None)).eos_token_ids == ()
    assert ModelConfig.read(tiny_config(mlp_layer_types=["sparse", "dense", "sparse", "dense"])).dense_layers == (False, True, False, True)


def test_head_dim_has_no_influence() -> None:
    """`head_dim` may say anything, or nothing."""
    plain = ModelConfig.read(tiny_config(head_dim=None))
    for width in (64, 192, 7, "x"):
        assert ModelConfig.read(tiny_config(head_dim=width)) == plain


def test_unknown_fields_are_kept() -> None:
    """A field nobody reads is kept and changes nothing else."""
    config = ModelConfig.read(tiny_config(from_the_future={"a": 1}))
    assert config.extra["from_the_future"] == {"a": 1}
    assert "hidden_size" not in config.extra
    assert config.fingerprint() == ModelConfig.read(tiny_config()).fingerprint()


def test_fingerprint_follows_the_architecture_alone() -> None:
    """It is equal for two spellings of one model, and differs with any field that changes what a row means."""
    first = ModelConfig.read(_glm_5_2()).fingerprint()
    assert len(first) == 32
    assert ModelConfig.read(_glm_5_2() | {"indexer_types": None, "eos_token_id": 1, "max_position_embeddings": 5}).fingerprint() == first
    changed = [{"kv_lora_rank": 448}, {"rope_parameters": {"rope_theta": 8.1e6}}, {"indexer_types": ["full"] * 78}, {"rms_norm_eps": 1e-6}]
    assert len({first, *(ModelConfig.read(_glm_5_2() | change).fingerprint() for change in changed)}) == 5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "glm5_next"}, "model_type 'glm5_next'"),
    ({"model_type": None}, "model_type None"),
    ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    ({"topk_method": "greedy"}, "topk_method 'greedy'"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"rope_interleave": False}, "rope_interleave False"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave False"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
    ({"q_lora_rank": None}, "q_lora_rank is missing or null"),
    ({"hidden_size": None}, "hidden_size is missing or null"),
    ({"hidden_size": "48"}, "hidden_size must be a positive integer, not '48'"),
    ({"index_topk": 0}, "index_topk must be a positive integer, not 0"),
    ({"vocab_size": True}, "vocab_size must be a positive integer, not True"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}}, "rope_parameters.rope_type 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type 'linear'"),
    ({"rope_parameters": None}, "rope_theta must be a number above 1, not None"),
    ({"rope_parameters": []}, "rope_parameters must be an object"),
    ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types: layer 0 must be full"),
    ({"indexer_types": ["full"] * 3}, "indexer_types has 3 entries for 4 layers"),
    ({"indexer_types": ["full", "some", "full", "full"]}, "indexer_types[1] is 'some'"),
    ({"indexer_types": None, "index_topk_pattern": "FXSS"}, "index_topk_pattern[1] is 'X'"),
    ({"indexer_types": None, "index_topk_freq": "4"}, "index_topk_freq must be an integer"),
    ({"mlp_layer_types": ["dense", "sparse", "moe", "sparse"]}, "mlp_layer_types[2] is 'moe'"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace must be 0 or more"),
    ({"qk_rope_head_dim": 9}, "qk_rope_head_dim: 9 is odd"),
    ({"index_head_dim": 4}, "index_head_dim: 4 is less than qk_rope_head_dim 8"),
    ({"n_group": 3}, "n_group: 3 does not divide 8 experts"),
    ({"n_group": 8, "topk_group": 4}, "n_group: 8 leaves groups of fewer than two"),
    ({"n_group": 2, "topk_group": 3}, "topk_group: 3 exceeds n_group 2"),
    ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok: 3 exceeds the 2 experts"),
    ({"num_key_value_heads": 2}, "num_key_value_heads: 2 differs from num_attention_heads 4"),
    ({"eos_token_id": ["x"]}, "eos_token_id must hold token ids"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.quant_method 'gptq'"),
    ({"quantization_config": "int4"}, "quantization_config.quant_method 'int4'"),
    ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}, "quantization_config.fmt 'e5m2'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size must be two positive integers, not None"),
    ({"compression_config": {"format": "pack-quantized"}}, "quantization_config.quant_method None"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_refusals_name_the_field(changed: dict[str, Any], said: str) -> None:
    """What this engine would compute wrongly is refused in one line that names the field and its value."""
    config = tiny_config()
    for name, value in changed.items():
        config[name] = value
    with pytest.raises(BadModel) as refused:
        ModelConfig.read(config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_block_size_comes_from_the_config() -> None:
    """Block-FP8 files say how many rows and columns share a scale; others have the official 128 x 128."""
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32]}
    assert ModelConfig.read(tiny_config(quantization_config=quantised)).quantisation.block == (64, 32)
    assert ModelConfig.read(tiny_config()).quantisation.block == (128, 128)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not readable as JSON"), ("[1]", "must be an object, not list"), ("", "not readable as JSON"), ("\xff", "not readable as JSON")],
)
def test_broken_file_is_named(content: str, said: str, tmp_path: Path) -> None:
    """A config.json that is not a JSON object gives one line with the file's path."""
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadModel) as refused:
        ModelConfig.read(tmp_path)
    assert str(tmp_path / "config.json") in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_directory_or_file_may_be_missing(tmp_path: Path) -> None:
    """A missing directory and a directory without config.json are told apart; a file may be given instead of its directory."""
    with pytest.raises(BadModel, match="absent does not exist"):
        ModelConfig.read(tmp_path / "absent")
    with pytest.raises(BadModel, match=r"config\.json is missing"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert ModelConfig.read(tmp_path / "config.json") == ModelConfig.read(str(tmp_path)) == ModelConfig.read(tiny_config())
