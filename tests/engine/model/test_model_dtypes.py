"""The model's functions in float32 and bfloat16 on the CPU, and block-FP8 weights kept as they are stored."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import BadModel
from engine.model import Model, load_model
from engine.model.source import open_source
from engine.model.weights import WeightReader
from kernels.linear import BlockFp8
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.model_weights import weights_of
from tests.engine.model.parity import make_checkpoint, named, prompt_ids, transformers_logits
from tests.engine.model.seams import Inputs, assert_near, assert_rows_alone, functions, plain, relative_error
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

WIDE = {"hidden_size": 160, "q_lora_rank": 136, "kv_lora_rank": 128, "moe_intermediate_size": 128, "intermediate_size": 200}


@pytest.fixture(scope="module")
def plain_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_checkpoint(random_tensors(config, 3), config, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def fp8_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 128, several to a weight, the last ones ragged."""
    config = tiny_config(**WIDE)
    return write_checkpoint(
        random_tensors(config, 3), config, tmp_path_factory.mktemp("fp8"), fp8=True, block=(128, 128), dtype=torch.bfloat16
    )


def _outputs(model: Model, given: Inputs) -> dict[str, tuple[Tensor, ...]]:
    return {name: function(given) for name, function in functions(model).items()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
def test_functions_follow_the_formulas(dtype: torch.dtype, bound: float, plain_directory: Path) -> None:
    """Every function is the formula on its weights: to float32 rounding, in bfloat16 within one percent of the row."""
    model = load_model(plain_directory, dtype=dtype)
    given = Inputs.drawn(model, 24)
    assert_near(_outputs(model, given), plain(model, given), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_know_their_company(dtype: torch.dtype, plain_directory: Path) -> None:
    """At 1 to 64 rows, in any order, every function gives a row the same bits, in bfloat16 too."""
    model = load_model(plain_directory, dtype=dtype)
    assert_rows_alone(model, Inputs.drawn(model, 64))


def test_outputs_have_the_models_dtype(plain_directory: Path) -> None:
    """A bfloat16 model computes in bfloat16 throughout but for the indexer's head weights; kept float32 states are taken as they are."""
    model = load_model(plain_directory, dtype=torch.bfloat16)
    given = Inputs.drawn(model, 5)
    for name, outputs in _outputs(model, given).items():
        wanted = [torch.bfloat16] * len(outputs)
        if name.endswith("index query"):
            wanted[1] = torch.float32
        assert [each.dtype for each in outputs] == wanted, name
    assert torch.equal(model.mtp_input(given.ids, given.x.float()), model.mtp_input(given.ids, given.x))


def test_a_bfloat16_run_stays_near_float32(tmp_path: Path) -> None:
    """A short bfloat16 prompt, in which nothing can be left out of a selection, is near the float32 one over the same weights."""
    chosen = named("ragged row groups")
    directory = make_checkpoint(tmp_path, chosen.name)
    ids = prompt_ids(chosen)[: chosen.config["index_topk"]]
    expected = transformers_logits(directory, ids)
    logits = FlatRun(load_model(directory, dtype=torch.bfloat16), 256).append(ids)
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()
    # An expert chosen otherwise moves a row; most rows have none.
    errors = [relative_error(one[None], other[None]) for one, other in zip(logits, expected, strict=True)]
    assert sorted(errors)[len(errors) // 2] <= 0.1


def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep block-FP8 on the CPU too, whose references dequantise it at each call."""
    monkeypatch.setattr(WeightReader, "_keeps_stored", lambda self: True)


def test_kept_fp8_weights_compute_what_dequantised_ones_do(fp8_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept as stored, block-FP8 weights give every function the bits of dequantised ones; kv_b is cut after dequantising."""
    apart = load_model(fp8_directory)
    _kept(monkeypatch)
    model = load_model(fp8_directory)
    given = Inputs.drawn(model, 12)
    one, other = _outputs(model, given), _outputs(apart, given)
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))
    layer, mtp = model.layers[2], model.row_layers[-1]
    for weight in (layer.mla.query_down, layer.mla.query_up, layer.mla.row_down, layer.mla.output, layer.mlp.gate_up, layer.mlp.down,  # type: ignore[union-attr]
                   layer.mlp.shared.gate, model.layers[0].mlp.gate, mtp.full_indexer.query_up, mtp.full_indexer.key_down):  # type: ignore[union-attr]  # fmt: skip
        assert isinstance(weight, BlockFp8)
    assert torch.equal(layer.mla.key_up, apart.layers[2].mla.key_up)
    assert torch.equal(layer.mla.value_up, apart.layers[2].mla.value_up)
    assert all(tensor.is_contiguous() for tensor in weights_of(model).values())


def test_experts_that_a_block_would_straddle_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the experts' width is no multiple of 128, gate and up are not kept joined in blocks; down is, and the sums are the same."""
    config = tiny_config(**WIDE | {"moe_intermediate_size": 136})
    directory = write_checkpoint(random_tensors(config, 3), config, tmp_path, fp8=True, block=(128, 128))
    apart = load_model(directory)
    _kept(monkeypatch)
    model = load_model(directory)
    moe = model.layers[1].mlp
    assert not isinstance(moe.gate_up, BlockFp8)  # type: ignore[union-attr]
    assert isinstance(moe.down, BlockFp8)
    given = Inputs.drawn(model, 6)
    assert torch.equal(model.layers[1].feed_forward(given.u), apart.layers[1].feed_forward(given.u))


def test_gate_and_up_stay_fp8_together_or_not_at_all(fp8_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch reads gate and up: where only one is stored block-FP8, both are plain, in dense, shared and routed MLPs."""
    stored = load_file(fp8_directory / "model.safetensors")
    for prefix in ("model.layers.0.mlp.", "model.layers.1.mlp.shared_experts.", "model.layers.1.mlp.experts.2."):
        name = f"{prefix}up_proj.weight"
        stored[name] = torch.zeros(stored[name].shape, dtype=torch.bfloat16)
        del stored[f"{name}_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((fp8_directory / "config.json").read_text())
    _kept(monkeypatch)
    dense, sparse, other = (layer.mlp for layer in load_model(tmp_path).layers[:3])
    for mlp in (dense, sparse.shared):  # type: ignore[union-attr]  # only layer 0 is dense
        assert isinstance(mlp.gate, torch.Tensor)  # type: ignore[union-attr]
        assert isinstance(mlp.up, torch.Tensor)  # type: ignore[union-attr]
        assert isinstance(mlp.down, BlockFp8)
    assert isinstance(sparse.gate_up, torch.Tensor)  # type: ignore[union-attr]
    assert float(sparse.gate_up[2, 128:].abs().max()) == 0  # type: ignore[union-attr]
    assert isinstance(other.gate_up, BlockFp8)  # type: ignore[union-attr]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
)
def test_fp8_that_is_not_finite_is_named(
    name: str, keeps: bool, fp8_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """An infinite or undefined scale, and a NaN of either sign as a value, are refused by the tensor's name, kept or multiplied out."""
    if keeps:
        _kept(monkeypatch)
    (tmp_path / "config.json").write_text((fp8_directory / "config.json").read_text())
    whole = load_file(fp8_directory / "model.safetensors")
    for part, place, value in (
        ("_scale_inv", (-1, -1), float("inf")), ("_scale_inv", (0, 0), float("nan")), ("", (-1, -1), 0x7F), ("", (0, 3), 0xFF),
    ):  # fmt: skip
        changed = whole[name + part].clone()
        (changed if part else changed.view(torch.uint8))[place] = value
        save_file(whole | {name + part: changed}, tmp_path / "model.safetensors")
        _refused(tmp_path, f"tensor {name}{part} holds values that are not finite")


def _refused(directory: Path, said: str) -> None:
    with pytest.raises(BadModel) as refused:
        load_model(directory)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keeps", [False, True])
def test_fp8_that_the_config_denies_is_named(
    keeps: bool, fp8_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Block-FP8 tensors under a config without quantisation or with another method are refused by both; a static activation scheme too."""
    if keeps:
        _kept(monkeypatch)
    config = json.loads((fp8_directory / "config.json").read_text())
    (tmp_path / "model.safetensors").hardlink_to(fp8_directory / "model.safetensors")
    own = config.pop("quantization_config")
    assert own["activation_scheme"] == "dynamic"
    integers = {"num_bits": 4, "group_size": 32, "symmetric": True}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": {"one": {"targets": [r"re:.*\.experts\..*"], "weights": integers}}}  # fmt: skip
    for described, said in (
        (None, "_scale_inv exists); quantization_config says none"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "_scale_inv exists); quantization_config says awq"),
        (packed, "_scale_inv exists); quantization_config says compressed-tensors"),
        (own | {"activation_scheme": "static"}, "quantization_config.activation_scheme 'static' is not supported, only 'dynamic'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | ({"quantization_config": described} if described else {})))
        _refused(tmp_path, said)
    del own["activation_scheme"], own["modules_to_not_convert"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    assert isinstance(load_model(tmp_path).layers[0].mla.output, BlockFp8 if keeps else Tensor)


def test_other_blocks_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are not 128 x 128 are no kernel's: such weights are multiplied out when they are read, on a device too."""
    config = tiny_config()
    directory = write_checkpoint(random_tensors(config, 3), config, tmp_path, fp8=True)
    reader: list[WeightReader] = []
    kept: Callable[[WeightReader, str], object] = WeightReader._kept
    monkeypatch.setattr(WeightReader, "_kept", lambda self, name: reader.append(self) or kept(self, name))
    load_model(directory)
    monkeypatch.setattr(reader[0], "_kind", type(reader[0]._kind)(torch.float32, torch.device("cuda")))
    assert kept(reader[0], "model.layers.0.self_attn.q_a_proj.weight") is None
    monkeypatch.setattr(reader[0], "_block", (128, 128))
    assert kept(reader[0], "model.layers.0.self_attn.q_a_proj.weight") == "fp8"


def test_a_device_computes_in_what_the_checkpoint_stores(tmp_path: Path) -> None:
    """Without a word the CPU takes float32; a device bfloat16, or float32 where norms are float32, by the stage's own layer."""
    config = tiny_config()
    tensors = random_tensors(config, 3)
    wide = write_checkpoint(tensors, config, tmp_path / "wide")
    narrow = write_checkpoint(tensors, config, tmp_path / "narrow", dtype=torch.bfloat16)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((wide / "config.json").read_text())
    device, cpu = torch.device("cuda"), torch.device("cpu")
    for directory, on_device in ((wide, torch.float32), (narrow, torch.bfloat16)):
        assert open_source(directory, "auto", None, cpu).dtype == torch.float32
        assert open_source(directory, "auto", None, device, first_layer=2).dtype == on_device
        assert open_source(directory, "auto", torch.bfloat16, cpu).dtype == torch.bfloat16
        assert open_source(directory, "auto", torch.float32, device).dtype == torch.float32
    assert open_source(tmp_path / "bare", "random", None, cpu).dtype == torch.float32
