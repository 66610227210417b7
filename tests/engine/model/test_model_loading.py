"""Loading checkpoints: every stored form gives the same weights, and every fault one line that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import BadModel
from engine.model import Model, load_model
from engine.model.files import TensorFiles
from tests.engine.model.model_weights import weights_of
from tests.engine.model.tiny_models import FP8_BLOCK, dequantised, quantised, random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config(num_hidden_layers=3, indexer_types=["full", "shared", "full"], n_routed_experts=4)
TENSORS = random_tensors(CONFIG, 1)
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


def _same(left: Model, right: Model) -> bool:
    one, other = weights_of(left), weights_of(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(TENSORS, CONFIG, tmp_path_factory.mktemp("plain"))


def test_shards_and_merged_experts_give_the_sameweights_of(plain: Path, tmp_path: Path) -> None:
    """One file or four, an expert a tensor or merged ones: all weights are equal."""
    first = load_model(plain)
    assert first.mtp is not None
    assert len(weights_of(first)) > 60
    assert _same(first, load_model(write_checkpoint(TENSORS, CONFIG, tmp_path / "shards", shards=4)))
    assert _same(first, load_model(write_checkpoint(TENSORS, CONFIG, tmp_path / "merged", merged=True)))
    assert _same(first, load_model(write_checkpoint(TENSORS, CONFIG, tmp_path / "both", merged=True, shards=3)))


@pytest.mark.parametrize(
    ("content", "ends"),
    [(None, (90, 92)), ("{}", (90, 92)), ('{"eos_token_id": 7}', (90, 92, 7)), ('{"eos_token_id": [92, 5, 90, 5]}', (90, 92, 5))],
)  # fmt: skip
def test_either_file_may_name_an_end(content: str | None, ends: tuple[int, ...], tmp_path: Path) -> None:
    """A text ends at the tokens that config.json names and at those that generation_config.json names."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path)
    if content is not None:
        (directory / "generation_config.json").write_text(content)
    assert load_model(directory).config.eos_token_ids == ends


def test_weights_are_cut_as_the_formulas_need(plain: Path) -> None:
    """UK arrives transposed, UV as stored, gate rows before up rows; router and bias in float32."""
    model = load_model(plain)
    layer = model.layers[1]
    both = TENSORS[KV_B].view(4, 32, 32)
    assert torch.equal(layer.mla.key_up, both[:, :16].transpose(1, 2))
    assert torch.equal(layer.mla.value_up, both[:, 16:])
    expert = "model.layers.1.mlp.experts.3."
    assert torch.equal(layer.mlp.gate_up[3, :24], TENSORS[f"{expert}gate_proj.weight"])
    assert torch.equal(layer.mlp.gate_up[3, 24:], TENSORS[f"{expert}up_proj.weight"])
    assert torch.equal(layer.mlp.down[3], TENSORS[f"{expert}down_proj.weight"])
    assert [each.full for each in model.row_layers] == [True, False, True, True]
    assert model.groups == ((0, 1), (2,), (3,))


def test_bfloat16_upcasts_exactly_and_may_be_kept(tmp_path: Path) -> None:
    """A bfloat16 checkpoint gives the rounded values in either dtype; router weight and bias stay float32 in both."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path, dtype=torch.bfloat16)
    upcast, kept = load_model(directory), load_model(directory, dtype=torch.bfloat16)
    assert torch.equal(upcast.head, TENSORS["lm_head.weight"].bfloat16().float())
    assert kept.head.dtype == torch.bfloat16
    assert kept.layers[1].mlp.router.dtype == kept.layers[1].mlp.bias.dtype == torch.float32
    assert torch.equal(kept.layers[1].mlp.bias, TENSORS["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert all(torch.equal(kept_one.float(), weights_of(upcast)[name]) for name, kept_one in weights_of(kept).items())


def test_block_fp8_equals_dequantisedweights_of(tmp_path: Path) -> None:
    """Block-FP8 weights are value times scale of their block, the ragged last ones included, whatever the exception list says."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path / "fp8", fp8=True, shards=2)
    by_hand = write_checkpoint(dequantised(quantised(TENSORS)), CONFIG, tmp_path / "plain")
    assert _same(load_model(directory), load_model(by_hand))
    assert TENSORS[KV_B].shape[0] % FP8_BLOCK[0] != 0


def test_merged_block_fp8_experts(tmp_path: Path) -> None:
    """Merged experts may be block-FP8 too, with a scale tensor of one more dimension."""
    stored = write_checkpoint(TENSORS, CONFIG, tmp_path / "merged", merged=True)
    file = stored / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj"
    scale = torch.rand(4, -(-48 // FP8_BLOCK[0]), -(-24 // FP8_BLOCK[1])) + 0.5
    tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].to(torch.float8_e4m3fn), scale
    save_file(tensors, file)
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(FP8_BLOCK)}
    (stored / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantisation}))
    expected = tensors[name].float() * scale[:, torch.arange(48)[:, None] // FP8_BLOCK[0], torch.arange(24)[None] // FP8_BLOCK[1]]
    assert torch.equal(load_model(stored).layers[1].mlp.down, expected)


def test_weights_survive_their_files(tmp_path: Path) -> None:
    """Weights are copies: a file that is overwritten after loading changes nothing."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path)
    model = load_model(directory)
    file = directory / "model.safetensors"
    with open(file, "r+b") as stored:
        stored.seek(-1000, 2)
        stored.write(b"\xff" * 1000)
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(model).values())


def test_mtp_block_is_there_when_its_projection_is(tmp_path: Path) -> None:
    """Without layer-3 tensors the model loads without the block, whatever the config says; copies of the head beside it are ignored."""
    without = random_tensors(CONFIG, 1, mtp=False)
    assert load_model(write_checkpoint(without, CONFIG, tmp_path / "without")).mtp is None
    copies = {"model.layers.3.embed_tokens.weight": torch.zeros(96, 48), "model.layers.3.shared_head.head.weight": torch.zeros(96, 48)}
    config = {name: value for name, value in CONFIG.items() if name != "num_nextn_predict_layers"}
    assert load_model(write_checkpoint(TENSORS | copies, config, tmp_path / "copies")).mtp is not None


def test_stage_reads_only_its_layers(tmp_path: Path) -> None:
    """A middle stage has no embedding, norm, head or MTP block, and never opens a file without its layers."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path)
    file_of = {name: f"{name.split('.')[2] if '.layers.' in name else 'outer'}.safetensors" for name in TENSORS}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in TENSORS.items() if file_of[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    whole = load_model(directory)
    last = load_model(directory, layers=range(2, 3))
    for file in ("0", "2", "3", "outer"):
        (directory / f"{file}.safetensors").unlink()
    middle = load_model(directory, layers=range(1, 2))
    assert (middle.embedding, middle.norm, middle.head, middle.mtp) == (None, None, None, None)
    assert middle.groups == ((0,),)
    assert middle.layers[0].layer == 1
    assert weights_of(middle.layers).keys() == weights_of([whole.layers[1]]).keys()
    assert torch.equal(middle.layers[0].mla.key_up, whole.layers[1].mla.key_up)
    assert last.embedding is not None, "the MTP block embeds tokens"
    assert last.groups == ((0,), (1,))


def test_progress_counts_every_tensor(plain: Path) -> None:
    """Progress rises by one a stored tensor and ends at the total."""
    seen: list[tuple[int, int]] = []
    load_model(plain, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(TENSORS)) for i in range(len(TENSORS))]


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


FAULTS: list[tuple[Callable[[dict[str, Tensor]], None], str]] = [
    (_without("model.norm.weight"), "tensor model.norm.weight is missing"),
    (_without("lm_head.weight"), "tensor lm_head.weight is missing"),
    (_without("model.layers.2.self_attn.indexer.k_norm.bias"), "model.layers.2.self_attn.indexer.k_norm.bias is missing"),
    (_without("model.layers.1.mlp.experts.2.up_proj.weight"), "model.layers.1.mlp.experts.2.up_proj.weight is missing"),
    (_without("model.layers.3.enorm.weight"), "model.layers.3.enorm.weight is missing"),
    (_without("model.layers.3.eh_proj.weight"), "belongs to an MTP block whose eh_proj.weight is missing"),
    (_with(KV_B, torch.zeros(128, 31)), f"{KV_B} has shape [128, 31]; the config asks for [128, 32]"),
    (_with("model.layers.0.input_layernorm.weight", torch.zeros(1, 48)), "input_layernorm.weight has shape [1, 48]"),
    (_with("model.layers.1.self_attn.indexer.wk.weight", torch.zeros(16, 48)), "model.layers.1.self_attn.indexer.wk.weight is unexpected"),
    (_with("model.layers.1.mlp.experts.4.up_proj.weight", torch.zeros(24, 48)), "experts.4.up_proj.weight is unexpected"),
    (_with("model.layers.0.self_attn.q_a_proj.bias", torch.zeros(32)), "model.layers.0.self_attn.q_a_proj.bias is unexpected"),
    (_with("model.layers.3.draft_head.weight", torch.zeros(2)), "model.layers.3.draft_head.weight is unexpected"),
    (_with("model.visual.weight", torch.zeros(2)), "model.visual.weight is unexpected"),
    (_with("model.layers.4.eh_proj.weight", torch.zeros(48, 96)), "model.layers.4.eh_proj.weight belongs to a second MTP block"),
    (_with("lm_head.weight", torch.zeros(96, 48, dtype=torch.int32)), "lm_head.weight is stored as int32"),
    (_with(KV_B, torch.zeros(128, 32).to(torch.float8_e4m3fn)), f"{KV_B} is stored as float8_e4m3fn and {KV_B}_scale_inv is missing"),
    (_with(f"{KV_B}_scale_inv", torch.ones(1, 1)), f"{KV_B} is stored as float32 but {KV_B}_scale_inv exists"),
    (_with("model.layers.1.mlp.gate.e_score_correction_bias", torch.zeros(4, dtype=torch.bfloat16)), "it must be float32"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_faulty_tensors_are_named(fault: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path) -> None:
    """A missing, extra, misshapen or wrongly stored tensor is refused in one line that names it."""
    tensors = dict(TENSORS)
    fault(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _refused(tmp_path, said)


@pytest.mark.parametrize("shape", [(6, 1), (7, 3), (8, 2), (7,)])
def test_misshapen_scales_are_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Scales that do not cover the weight block by block are refused."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path, fp8=True)
    tensors = load_file(directory / "model.safetensors")
    assert tensors[f"{KV_B}_scale_inv"].shape == (7, 2)
    tensors[f"{KV_B}_scale_inv"] = torch.ones(shape)
    save_file(tensors, directory / "model.safetensors")
    _refused(directory, f"tensor {KV_B}_scale_inv has shape {list(shape)}; blocks of 20 x 24 need [7, 2]")


def _refused(directory: Path, said: str, **options: Any) -> None:
    with pytest.raises(BadModel) as refused:
        load_model(directory, **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_broken_files_are_named(tmp_path: Path) -> None:
    """A truncated shard, a missing one, one that lacks what the index says, a bad index, no weights at all: one line each."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path / "model", shards=3)
    shard = directory / "model-00002-of-00003.safetensors"
    index = directory / "model.safetensors.index.json"
    content, listed = shard.read_bytes(), index.read_text()
    for kept in (len(content) - 1, 100, 3, 0):
        shard.write_bytes(content[:kept])
        _refused(directory, f"{shard} is truncated or not a safetensors file")
    shard.unlink()
    _refused(directory, f"{shard} is missing: model.safetensors.index.json names it")
    save_file({"other": torch.zeros(1)}, shard)
    _refused(directory, "in model-00002-of-00003.safetensors, which does not hold it")
    shard.write_bytes(content)
    index.write_text("{")
    _refused(directory, f"{index}: not readable as JSON")
    index.write_text("{}")
    _refused(directory, "weight_map must be an object")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model/model-00001-of-00003.safetensors"}}))
    _refused(directory, "weight_map[lm_head.weight] must be a plain file name")
    index.write_text(listed)
    assert load_model(directory).mtp is not None
    index.unlink()
    _refused(directory, "holds neither model.safetensors nor model.safetensors.index.json")
    _refused(tmp_path / "absent", "absent does not exist")


def test_index_decides_which_file_counts(tmp_path: Path) -> None:
    """A tensor that also lies in another file is read from the file the index names."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path, shards=2)
    file_of = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in file_of.values() if file != file_of["lm_head.weight"])
    tensors = load_file(directory / other)
    tensors["lm_head.weight"] = torch.zeros(96, 48)
    save_file(tensors, directory / other)
    assert torch.equal(load_model(directory).head, TENSORS["lm_head.weight"])


def test_files_hand_out_stored_tensors(plain: Path) -> None:
    """Names, shapes and contents are those that the file's own library reads."""
    files = TensorFiles(plain)
    with safe_open(plain / "model.safetensors", framework="pt") as stored:
        assert files.names == set(stored.keys())
    assert files.shape(KV_B) == (128, 32)
    assert torch.equal(files.read(KV_B), TENSORS[KV_B])


def test_latent_eps_is_a_setting(plain: Path) -> None:
    """The latent norms' eps comes from the caller and reaches every layer, the MTP block's included; the main eps does not change."""
    model = load_model(plain, latent_norm_eps=1e-5)
    assert {layer.mla.norm_eps for layer in model.row_layers} == {1e-5}
    assert {layer.mla.norm_eps for layer in load_model(plain).row_layers} == {1e-6}
    assert {layer.norm_eps for layer in model.row_layers} == {1e-5}
