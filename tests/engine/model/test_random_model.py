"""Named configurations and random weights: true sizes, the same bits every time, refused in one line where they make no sense."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.model.source
from engine.errors import BadModel, BadSetting, ForebayError, NotAdmitted
from engine.model import Model, ModelConfig, load_model
from engine.model.named import NAMED
from engine.model.random import RandomTensors
from engine.model.stored import has_mtp_block, stored_shapes
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.model_weights import weights_of
from tests.engine.model.tiny_models import random_tensors, tiny_config

CPU = torch.device("cpu")


def _directory(path: Path, **overrides: object) -> Path:
    """A directory that holds a config.json and nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    return path


def _random(path: Path, **options: object) -> Model:
    return load_model(_directory(path), load_format="random", **options)  # type: ignore[arg-type]


def test_the_whole_model_has_the_published_size() -> None:
    """glm-5.3 comes to the tensor and element counts published for the checkpoint, its MTP block's to the counts computed for it."""
    config = ModelConfig.read(NAMED["glm-5.3"])
    shapes = stored_shapes(config, mtp=True)
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (59_585, 753_329_940_480)
    block = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.78.")}
    assert (len(block), sum(map(math.prod, block.values()))) == (791, 9_952_920_576)
    assert [layer for layer, full in enumerate(config.full_layers) if full] == [0, 1, *range(2, 78, 4)]


def test_the_slice_is_the_first_layers_of_the_whole() -> None:
    """The slice differs from the whole model in layers and experts alone, and fits one card in bf16 with room for a cache."""
    whole, part = ModelConfig.read(NAMED["glm-5.3"]), ModelConfig.read(NAMED["glm-5.3-slice"])
    assert part.groups() == ((0,), (1,), (2, 3, 4, 5), (6, 7, 8, 9)) == whole.groups(range(10))
    assert part.dense_layers == whole.dense_layers[:10] == (True,) * 3 + (False,) * 7
    assert has_mtp_block(part)
    large, small = stored_shapes(whole, mtp=True), stored_shapes(part, mtp=False)
    assert all(large[name] == shape for name, shape in small.items() if ".gate." not in name)
    assert part.experts == 64
    assert 2 * sum(map(math.prod, stored_shapes(part, mtp=True).values())) < 50 * 10**9
    assert whole.fingerprint() != part.fingerprint()


@pytest.mark.parametrize("overrides", [{}, {"indexer_types": None, "index_topk_freq": 2}, {"n_shared_experts": 2}])
def test_names_are_those_of_a_checkpoint(overrides: dict[str, object]) -> None:
    """What is drawn has the names and shapes of what such a checkpoint stores, with the MTP block and without."""
    config = tiny_config(**overrides)
    for mtp in (False, True):
        stored = {name: tuple(tensor.shape) for name, tensor in random_tensors(config, 0, mtp=mtp).items()}
        assert stored_shapes(ModelConfig.read(config), mtp=mtp) == stored


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_bits_every_time_and_in_every_stage(tmp_path: Path) -> None:
    """Two loads give equal weights; a stage holds what the whole holds of its layers; no two tensors are alike."""
    whole = _random(tmp_path)
    assert _equal(weights_of(whole), weights_of(_random(tmp_path)))
    middle, last = _random(tmp_path, layers=range(1, 3)), _random(tmp_path, layers=range(3, 4))
    assert _equal(weights_of(middle.layers), weights_of(whole.layers[1:3]))
    assert _equal(weights_of([last.layers, last.mtp, last.head]), weights_of([whole.layers[3:], whole.mtp, whole.head]))
    assert (middle.embedding, middle.mtp, last.first_layer) == (None, None, 3)
    assert not torch.equal(whole.layers[1].mla.key_up, whole.layers[2].mla.key_up)
    experts = whole.layers[1].mlp.gate_up  # type: ignore[union-attr]  # layer 1 is not dense
    assert len({tuple(expert.flatten()[:8].tolist()) for expert in experts}) == len(experts)  # type: ignore[union-attr]


def test_weights_are_the_models_own_and_contiguous(tmp_path: Path) -> None:
    """Every weight is contiguous, in the dtype asked for (routers and their biases in float32), and begins where no other does."""
    model = _random(tmp_path, dtype=torch.bfloat16)
    weights = weights_of(model)
    assert all(tensor.is_contiguous() for tensor in weights.values())
    wide = {name for name, tensor in weights.items() if tensor.dtype != torch.bfloat16}
    assert all(name.endswith((".router", "mlp.bias", "frequencies")) for name in wide)
    assert all(weights[name].dtype == torch.float32 for name in wide)
    alone = {
        name: tensor for name, tensor in weights.items() if not re.fullmatch(r".*layers?(\.\d+)?\.down", name)
    }  # of which parts are views
    assert len({tensor.data_ptr() for tensor in alone.values()}) == len(alone)


def test_the_file_decides_about_the_mtp_block(tmp_path: Path) -> None:
    """num_nextn_predict_layers of 0 leaves the block out, silence means one, more are refused by name."""
    none = _directory(tmp_path / "none", num_nextn_predict_layers=0)
    assert load_model(none, load_format="random").mtp is None
    silent = _directory(tmp_path / "silent", num_nextn_predict_layers=None)
    assert load_model(silent, load_format="random").mtp is not None
    with pytest.raises(BadModel, match="num_nextn_predict_layers 2"):
        load_model(_directory(tmp_path / "two", num_nextn_predict_layers=2), load_format="random")


def test_widths_follow_the_recipe() -> None:
    """Spread of what is drawn: small before a latent norm but for the RoPE key, wide where choices are made, biases in their band."""
    config = ModelConfig.read(tiny_config(hidden_size=128, q_lora_rank=64, kv_lora_rank=64, n_routed_experts=64))
    tensors = RandomTensors(config, mtp=True, dtype=torch.float32, device=CPU)
    layer, half = "model.layers.3.", 128**-0.5
    row = tensors.read(f"{layer}self_attn.kv_a_proj_with_mqa.weight")
    bias = tensors.read(f"{layer}mlp.gate.e_score_correction_bias")
    norm = tensors.read("model.norm.weight")
    for got, wanted in (
        (tensors.read("model.embed_tokens.weight").std(), 1.0), (tensors.read("lm_head.weight").std(), 2 * half),
        (tensors.read(f"{layer}self_attn.q_a_proj.weight").std(), 0.03 * half),
        (tensors.read(f"{layer}self_attn.q_b_proj.weight").std(), 0.2),
        (row[:64].std(), 0.03 * half), (row[64:].std(), half), (tensors.read(f"{layer}mlp.gate.weight").std(), 1.6 * half),
        (tensors.read(f"{layer}mlp.experts.7.down_proj.weight").std(), 24**-0.5), (norm.std(), 0.25), (norm.mean(), 1.0),
        (bias.mean(), 6.9), (bias.std(), 0.15), (tensors.read(f"{layer}self_attn.indexer.k_norm.bias").std(), 0.5),
    ):  # fmt: skip
        assert float(got) == pytest.approx(wanted, rel=0.4)
    grouped = ModelConfig.read(tiny_config(n_group=2, n_routed_experts=64))
    drawn = RandomTensors(grouped, mtp=True, dtype=torch.bfloat16, device=CPU).read(f"{layer}mlp.gate.e_score_correction_bias")
    assert (drawn.dtype, bool((drawn < 0).all())) == (torch.float32, True)


def test_a_random_model_runs_deep(tmp_path: Path) -> None:
    """Ten random layers and the MTP block give finite logits of a useful spread, and another token gives other logits."""
    directory = _directory(
        tmp_path, num_hidden_layers=10, indexer_types=None, index_topk_freq=4, index_skip_topk_offset=3, first_k_dense_replace=3
    )
    model = load_model(directory, load_format="random")
    ids = torch.arange(60) % 90
    run = FlatRun(model, 128)
    logits = run.append(ids)
    assert torch.isfinite(logits).all()
    assert 0.5 < float(logits.std()) < 10
    assert len(set(logits.argmax(-1).tolist())) > 10
    drafts = run.append_mtp(ids[1:], run.hidden[:-1], 1)
    assert torch.isfinite(drafts).all()
    changed = ids.clone()
    changed[3] += 1
    assert float((FlatRun(model, 128).append(changed)[-1] - logits[-1]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("model", "options", "error", "said"),
    [
        ("glm-5.3", {}, BadSetting, "glm-5.3 is a configuration without weights: add --load-format random"),
        ("glm-5.3-slice", {}, BadSetting, "glm-5.3-slice is a configuration without weights"),
        ("glm-5.3", {"load_format": "random"}, NotAdmitted, "random weights of glm-5.3 need 2,806.4 GiB, and 30.0 GiB are free on cpu"),
        ("glm-5.3", {"load_format": "random", "dtype": torch.bfloat16}, NotAdmitted, "need 1,403.4 GiB"),
        ("glm-5.3-slice", {"load_format": "random", "dtype": torch.bfloat16}, NotAdmitted, "need 45.0 GiB"),
        ("glm-5.4", {"load_format": "random"}, BadModel, "glm-5.4 does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    model: str, options: dict[str, object], error: type[ForebayError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without weights, weights without room, a name nobody knows: refused with numbers before a byte is drawn."""
    monkeypatch.setattr(engine.model.source, "available_bytes", lambda: 30 * 2**30)
    monkeypatch.setattr(RandomTensors, "read", lambda self, name: pytest.fail(f"{name} was drawn"))
    with pytest.raises(error) as refused:
        load_model(model, **options)  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


class _Drawn(Exception):
    """The first tensor was asked for."""


def test_a_stage_of_a_large_model_needs_only_its_own_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dense layer of the whole model is not refused for the memory of all of it, nor for a byte more than it takes."""

    def read(self: RandomTensors, name: str) -> Tensor:
        raise _Drawn(name)

    monkeypatch.setattr(RandomTensors, "read", read)
    # From the widths: attention, indexer, MLP, and the norms.
    attention = 2048 * 6144 + 16_384 * 2048 + 576 * 6144 + 28_672 * 512 + 6144 * 16_384 + 2048 + 512
    needed = 2 * (attention + 4096 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144 + 3 * 12_288 * 6144 + 2 * 6144)
    for free, raised in ((needed, _Drawn), (needed - 1, NotAdmitted)):
        monkeypatch.setattr(engine.model.source, "available_bytes", lambda free=free: free)
        with pytest.raises(raised):
            load_model("glm-5.3", load_format="random", dtype=torch.bfloat16, layers=range(1, 2))


def test_a_directory_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a directory of a known name exists, it is what the name means."""
    _directory(tmp_path / "glm-5.3")
    monkeypatch.chdir(tmp_path)
    assert load_model("glm-5.3", load_format="random").config.hidden == 48


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    """Progress rises by one a tensor and ends at the total, as for files."""
    seen: list[tuple[int, int]] = []
    _random(tmp_path, progress=lambda done, total: seen.append((done, total)))
    count = len(random_tensors(tiny_config(), 0))
    assert seen == [(i + 1, count) for i in range(count)]
