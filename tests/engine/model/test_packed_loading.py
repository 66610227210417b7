"""Packed weights are what their formats say they are, to the bit, and a damaged one is refused by its name."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import BadModel
from engine.model import Model, load_model
from engine.model.bytes import held_bytes
from engine.model.weights import WeightReader
from kernels.linear import GroupInt
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.model_weights import weights_of
from tests.engine.model.packed_models import Packed, awq, awq_config, compressed, compressed_config, write_packed
from tests.engine.model.tiny_models import packable_config, random_tensors, write_checkpoint

CONFIG = packable_config()
TENSORS = {
    name: tensor.bfloat16() if "bias" not in name or "indexer" in name else tensor for name, tensor in random_tensors(CONFIG, 1).items()
}
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
INT4 = {"num_bits": 4, "group_size": 64, "symmetric": True}


def _seed(module: str) -> int:
    return zlib.crc32(module.encode())


def _is_linear(module: str) -> bool:
    return not module.endswith((".mlp.gate", "embed_tokens", "lm_head", "weights_proj"))


def _compressed(bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> Callable[[str, int, int], Packed | None]:
    def pack(module: str, outputs: int, width: int) -> Packed | None:
        if not _is_linear(module):
            return None
        return compressed(outputs, width, bits=bits, group=group, symmetric=symmetric, dtype=dtype, seed=_seed(module))

    return pack


def _same(left: Model, right: Model) -> bool:
    one, other = weights_of(left), weights_of(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


FORMS = [
    (bits, group, symmetric, dtype)
    for bits, group, symmetric, dtype in (
        (4, 32, True, torch.bfloat16), (4, 64, False, torch.bfloat16), (4, 128, True, torch.float16), (4, 0, True, torch.bfloat16),
        (8, 32, False, torch.float16), (8, 64, True, torch.bfloat16), (8, 128, False, torch.float32), (8, 0, False, torch.bfloat16),
    )
]  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "symmetric", "dtype"), FORMS)
def test_compressed_weights_are_those_of_their_own_package(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every packed module, the MTP block's and the indexer's too, has the bits that compressed-tensors itself multiplies out."""
    scheme = {"num_bits": bits, "group_size": group or None, "symmetric": symmetric, "targets": ["Linear"]}
    pack = _compressed(bits, group, symmetric, dtype)
    plain = write_packed(TENSORS, CONFIG, compressed_config({"group_0": scheme}), tmp_path / "packed", pack)
    wanted = load_model(write_checkpoint({name: each.float() for name, each in plain.items()}, CONFIG, tmp_path / "plain"))
    assert _same(load_model(tmp_path / "packed"), wanted)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert f"model.layers.{CONFIG['num_hidden_layers']}.eh_proj.weight_packed" in stored
    assert (f"{EXPERT}.weight_zero_point" in stored) == (not symmetric)


def test_awq_weights_follow_the_definition(tmp_path: Path) -> None:
    """Eight outputs a word in AWQ's order, zeros packed alike, scales a group below the other: (code - zero) * scale in float16."""

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        return awq(outputs, width, group=64, dtype=torch.float16, seed=_seed(module)) if _is_linear(module) and outputs % 8 == 0 else None

    plain = write_packed(TENSORS, CONFIG, awq_config(64), tmp_path / "packed", pack)
    wanted = load_model(write_checkpoint({name: each.float() for name, each in plain.items()}, CONFIG, tmp_path / "plain"))
    assert _same(load_model(tmp_path / "packed"), wanted)


def test_modules_may_differ(tmp_path: Path) -> None:
    """A named module goes before a pattern, a pattern before the class; ignored ones and whole layers are plain; the first group wins."""
    named = f"{EXPERT.rsplit('.', 1)[0]}.down_proj"
    groups = {
        "class": {"num_bits": 8, "group_size": 32, "symmetric": False, "targets": ["Linear"]},
        "experts": {"num_bits": 4, "group_size": 64, "symmetric": True, "targets": [r"re:.*\.mlp\.experts\..*"]},
        "one": {"num_bits": 8, "group_size": 128, "symmetric": True, "targets": [named]},
        "late": {"num_bits": 4, "group_size": 128, "symmetric": True, "targets": [r"re:.*mlp\.experts.*"]},
    }
    packs = {"one": (8, 128, True), "experts": (4, 64, True), "class": (8, 32, False)}

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        if not _is_linear(module) or module.startswith("model.layers.4.") or ".layers.0." in module:
            return None
        bits, group, symmetric = packs["one" if module == named else "experts" if ".mlp.experts." in module else "class"]
        return compressed(outputs, width, bits=bits, group=group, symmetric=symmetric, dtype=torch.bfloat16, seed=_seed(module))

    ignore = ("lm_head", r"re:model\.layers\.4\..*", r"re:.*weights_proj")
    plain = write_packed(TENSORS, CONFIG, compressed_config(groups, ignore), tmp_path / "packed", pack)
    wanted = load_model(write_checkpoint({name: each.float() for name, each in plain.items()}, CONFIG, tmp_path / "plain"))
    assert _same(load_model(tmp_path / "packed"), wanted)


def test_packed_weights_stay_packed_where_products_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept, a model computes the multiplied-out one's bits (scales are powers of two: no rounding), in its packed bytes."""

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        if not _is_linear(module):
            return None
        made = compressed(outputs, width, bits=4, group=64, symmetric=False, dtype=torch.bfloat16, seed=_seed(module))[0]
        made["weight_scale"] = torch.exp2(made["weight_scale"].float().log2().round()).bfloat16()
        return made, torch.empty(0)

    scheme = {"num_bits": 4, "group_size": 64, "symmetric": False, "targets": ["Linear"]}
    write_packed(TENSORS, CONFIG, compressed_config({"group_0": scheme}), tmp_path, pack)
    apart = load_model(tmp_path)
    monkeypatch.setattr(WeightReader, "_keeps_stored", lambda self: True)
    kept = load_model(tmp_path)
    moe = kept.layers[1].mlp
    for weight in (moe.gate_up, moe.down, moe.shared.gate, kept.layers[0].mlp.up, kept.layers[2].mla.output):  # type: ignore[union-attr]
        assert isinstance(weight, GroupInt)
    assert held_bytes(moe.gate_up) == 4 * 2 * 128 * (2 * 256 // 4 + 4 * 2 + 4)  # type: ignore[union-attr]  # padded from 128 to 256
    ids = torch.arange(40) % 90
    assert torch.equal(FlatRun(kept, 64).append(ids), FlatRun(apart, 64).append(ids))


def test_gate_and_up_stay_packed_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch reads gate and up, and all experts: where one has another form, or scales of another dtype, all are multiplied out."""
    groups = {"group_0": INT4 | {"targets": ["Linear"]}}

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        if not _is_linear(module) or module in (EXPERT, "model.layers.0.mlp.up_proj"):
            return None
        return compressed(outputs, width, bits=4, group=64, symmetric=True, dtype=torch.bfloat16, seed=_seed(module))

    write_packed(TENSORS, CONFIG, compressed_config(groups), tmp_path, pack)
    monkeypatch.setattr(WeightReader, "_keeps_stored", lambda self: True)
    model = load_model(tmp_path)
    assert isinstance(model.layers[0].mlp.gate, Tensor)  # type: ignore[union-attr]
    assert isinstance(model.layers[1].mlp.gate_up, Tensor)  # type: ignore[union-attr]
    assert isinstance(model.layers[1].mlp.down, GroupInt)
    assert isinstance(model.layers[2].mlp.gate_up, GroupInt)  # type: ignore[union-attr]


def test_scales_of_two_dtypes_are_as_good_where_products_read_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert, one gate with float16 scales among bfloat16 ones: multiplied out with their neighbours, the values a CPU reads."""
    halves = ("model.layers.2.mlp.experts.1.down_proj", "model.layers.0.mlp.gate_proj")

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        dtype = torch.float16 if module in halves else torch.bfloat16
        made = compressed(outputs, width, bits=4, group=64, symmetric=True, dtype=dtype, seed=_seed(module))
        return made if _is_linear(module) else None

    plain = write_packed(TENSORS, CONFIG, compressed_config({"group_0": INT4 | {"targets": ["Linear"]}}), tmp_path, pack)
    apart = load_model(tmp_path)
    monkeypatch.setattr(WeightReader, "_keeps_stored", lambda self: True)
    kept = load_model(tmp_path)
    for model in (apart, kept):
        down = model.layers[2].mlp.down
        assert isinstance(down, Tensor)
        for expert in range(4):
            assert torch.equal(down[expert], plain[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"].float())
        for part in ("gate", "up"):
            assert torch.equal(getattr(model.layers[0].mlp, part), plain[f"model.layers.0.mlp.{part}_proj.weight"].float())
    assert isinstance(kept.layers[1].mlp.down, GroupInt)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with asymmetric four-bit experts in groups of 64."""
    directory = tmp_path_factory.mktemp("packed")
    scheme = INT4 | {"symmetric": False, "targets": [r"re:.*\.experts\..*"]}

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        if ".experts." not in module:
            return None
        return compressed(outputs, width, bits=4, group=64, symmetric=False, dtype=torch.bfloat16, seed=_seed(module))

    write_packed(TENSORS, CONFIG, compressed_config({"group_0": scheme}), directory, pack)
    return directory


def _refused(directory: Path, said: str) -> None:
    with pytest.raises(BadModel) as refused:
        load_model(directory)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def _with(part: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        if tensor is None:
            del tensors[f"{EXPERT}.{part}"]
        else:
            tensors[f"{EXPERT}.{part}"] = tensor

    return change


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.weight_scale"][3, 1] = float("inf")


FAULTS: list[tuple[Callable[[dict[str, Tensor]], None], str]] = [
    (_with("weight_packed", torch.zeros((128, 15), dtype=torch.int32)), "weight_packed has shape [128, 15]; the config asks for [128, 16]"),
    (_with("weight_packed", torch.zeros((128, 16))), "weight_packed is stored as float32; expected int32"),
    (_with("weight_packed", None), f"tensor {EXPERT}.weight_packed is missing, and so is a plain {EXPERT}.weight"),
    (_with("weight_scale", None), f"{EXPERT}.weight_scale is missing"),
    (_with("weight_scale", torch.ones((128, 4))), "weight_scale has shape [128, 4]; the config asks for [128, 2]"),
    (_with("weight_scale", torch.ones((128, 2), dtype=torch.int32)), "weight_scale is stored as int32; expected bfloat16 or float16"),
    (_nan, f"tensor {EXPERT}.weight_scale holds values that are not finite"),
    (_with("weight_zero_point", None), f"{EXPERT}.weight_zero_point is missing"),
    (_with("weight_zero_point", torch.zeros((128, 2), dtype=torch.int32)), "weight_zero_point has shape [128, 2]"),
    (_with("weight_shape", torch.tensor([128, 64])), "weight_shape says [128, 64]; the config asks for [128, 128]"),
    (_with("weight_g_idx", torch.zeros(128, dtype=torch.int32)), f"{EXPERT}.weight_g_idx is unexpected"),
    (_with("weight", torch.zeros((128, 128))), f"{EXPERT}.weight is unexpected"),
    (_with("qweight", torch.zeros((128, 16), dtype=torch.int32)), f"{EXPERT}.qweight is unexpected"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_damaged_packs_are_named(fault: Callable[[dict[str, Tensor]], None], said: str, packed: Path, tmp_path: Path) -> None:
    """A part that is missing, misshapen, of another dtype or not finite, or one too many: one line with its name."""
    tensors = load_file(packed / "model.safetensors")
    fault(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    _refused(tmp_path, said)


def _group(**weights: Any) -> dict[str, Any]:
    described = compressed_config({"group_0": INT4 | {"targets": ["Linear"]}})
    described["config_groups"]["group_0"]["weights"] |= weights
    return described


UNKNOWN: list[tuple[Any, str]] = [
    ({"quant_method": "gptq", "bits": 4}, "quantization_config.quant_method 'gptq' is not supported"),
    ({"quant_method": "modelopt"}, "quant_method 'modelopt'"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups must be an object"),
    (_group(num_bits=3), "group_0.weights.num_bits 3 is not supported, only 4 and 8"),
    (_group(type="float"), "weights.type 'float'"),
    (_group(group_size=48), "group_0.weights.group_size 48"),
    (_group(strategy="tensor"), "weights.strategy 'tensor'"),
    (_group(actorder="group"), "weights.actorder 'group'"),
    (_group(symmetric=1), "weights.symmetric must be true or false"),
    (_group() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (_group() | {"ignore": ["re:("]}, "is no regular expression"),
    (_group() | {"ignore": "lm_head"}, "ignore must be a list of names"),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "awq", "bits": 8, "group_size": 64}, "bits 8 is not supported, only 4"),
    ({"quant_method": "awq", "bits": 4}, "group_size None"),
]


@pytest.mark.parametrize(("described", "said"), UNKNOWN, ids=[said for _, said in UNKNOWN])
def test_unknown_forms_are_refused_by_name(described: Any, said: str, packed: Path, tmp_path: Path) -> None:
    """A method, format or field that would mean other weights is refused in one line, before a tensor is read."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": described}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    _refused(tmp_path, said)


def test_what_config_and_tensors_contradict_is_named(packed: Path, tmp_path: Path) -> None:
    """Packed tensors without a scheme, of another method, or of a width that groups do not divide: one line with the tensor."""
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors")
    for described, said in (
        (None, "is packed as compressed-tensors does; quantization_config says none"),
        (awq_config(), "is packed as compressed-tensors does; quantization_config says awq"),
        (compressed_config({"group_0": INT4 | {"targets": [r"re:.*down_proj"]}}), "quantization_config has no scheme for"),
        (
            compressed_config({"group_0": INT4 | {"num_bits": 8, "targets": ["Linear"]}}),
            "weight_packed has shape [128, 16]; the config asks for [128, 32]",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | ({"quantization_config": described} if described else {})))
        _refused(tmp_path, said)


@pytest.fixture(scope="module")
def awq_packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What a checkpoint stores with a layer's four-bit experts in AWQ's form, zeros among them."""

    def pack(module: str, outputs: int, width: int) -> Packed | None:
        return awq(outputs, width, group=64, dtype=torch.bfloat16, seed=_seed(module)) if ".layers.1.mlp.experts." in module else None

    directory = tmp_path_factory.mktemp("awq")
    write_packed(TENSORS, CONFIG, awq_config(), directory, pack)
    return load_file(directory / "model.safetensors")


def _write_awq(directory: Path, stored: dict[str, Tensor], *, zeros: bool) -> None:
    save_file(stored, directory / "model.safetensors")
    described = awq_config() | {"zero_point": zeros}
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": described}))


def test_zeros_that_the_config_denies_are_named(packed: Path, awq_packed: dict[str, Tensor], tmp_path: Path) -> None:
    """Stored zeros beside a config that says symmetric are refused by both sides; without them an AWQ weight is its code less 8."""
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors")
    described = compressed_config({"group_0": INT4 | {"targets": [r"re:.*\.experts\..*"]}})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": described}))
    _refused(tmp_path, "weight_zero_point holds zeros, and quantization_config says that there are none: symmetric is true")
    _write_awq(tmp_path, awq_packed, zeros=False)
    _refused(tmp_path, ".qzeros holds zeros, and quantization_config says that there are none: zero_point is false")
    eights = {name: torch.full_like(each, 0x88888888 - (1 << 32)) for name, each in awq_packed.items() if name.endswith("qzeros")}
    _write_awq(tmp_path, awq_packed | eights, zeros=True)
    wanted = load_model(tmp_path).layers[1].mlp.gate_up  # type: ignore[union-attr]
    _write_awq(tmp_path, {name: each for name, each in awq_packed.items() if name not in eights}, zeros=False)
    assert torch.equal(load_model(tmp_path).layers[1].mlp.gate_up, wanted)  # type: ignore[union-attr]


def test_missing_words_of_awq_are_named(awq_packed: dict[str, Tensor], tmp_path: Path) -> None:
    """A module whose words are not there is named as its format calls them."""
    _write_awq(tmp_path, {name: each for name, each in awq_packed.items() if name != f"{EXPERT}.qweight"}, zeros=True)
    _refused(tmp_path, f"tensor {EXPERT}.qweight is missing, and so is a plain {EXPERT}.weight")


def test_random_weights_may_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn by a config that says four bits, experts stay packed, are the same again, and spread as plain ones do."""
    for symmetric in (True, False):
        scheme = INT4 | {"symmetric": symmetric, "targets": [r"re:.*\.experts\..*"]}
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": compressed_config({"group_0": scheme})}))
        plain = load_model(tmp_path, load_format="random")
        with monkeypatch.context() as patched:
            patched.setattr(WeightReader, "_keeps_stored", lambda self: True)
            kept = load_model(tmp_path, load_format="random").layers[1].mlp
        assert isinstance(kept.gate_up, GroupInt)  # type: ignore[union-attr]
        assert torch.equal(kept.gate_up.dequantised(torch.float32), plain.layers[1].mlp.gate_up)  # type: ignore[union-attr]
        assert float(plain.layers[1].mlp.down.std()) == pytest.approx(128**-0.5, rel=0.1)  # type: ignore[union-attr]
        assert (kept.gate_up.zeros is None) == symmetric  # type: ignore[union-attr]
        assert torch.isfinite(FlatRun(plain, 64).append(torch.arange(30))).all()
