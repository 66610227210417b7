"""A checkpoint converted is what its format's own package makes of it, is whole or not there, and says what it cannot do."""

import fcntl
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import engine.convert.checkpoint
from engine.commands.line import run_line
from engine.convert import Recipe, convert
from engine.convert.output import Output
from engine.errors import BadModel, BadSetting, ForebayError
from engine.model import load_model
from engine.model.config import ModelConfig
from engine.plan.weights import WeightForm, checkpoint_bytes
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.model_weights import weights_of
from tests.engine.model.tiny_models import packable_config, quantised, random_tensors, write_checkpoint

CONFIG = packable_config()
TENSORS = random_tensors(CONFIG, 5)
TENSORS["model.layers.1.mlp.experts.0.up_proj.weight"][3, :64] = 0  # a group of nothing
ALL: dict[str, Any] = {"experts": "int4", "mlp": "int8", "attention": "int8", "indexer": "int8", "router": "int8"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path_factory.mktemp("source"), dtype=torch.bfloat16, shards=2)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def _stored(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _own(weight: Tensor, bits: int, group: int) -> tuple[Mapping[str, Tensor], Tensor]:
    """What compressed-tensors itself makes of a weight: its parts, and the weight they stand for."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=bits, group_size=group, strategy="group", symmetric=True)
    groups = weight.float().unflatten(1, (-1, group))
    scale = calculate_qparams(groups.amin(-1), groups.amax(-1), args)[0].bfloat16()
    scale[groups.abs().amax(-1) == 0] = 1.0  # theirs is a tiny number; the values are 0 either way
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = PackedQuantizationCompressor.compress({"weight": weight.float(), "weight_scale": scale}, scheme)
    return parts, PackedQuantizationCompressor.decompress(parts, scheme)["weight"]


@pytest.mark.parametrize(("form", "group"), [("int4", 32), ("int4", 64), ("int8", 128)])
def test_integers_are_those_of_the_formats_own_package(form: str, group: int, source: Path, tmp_path: Path) -> None:
    """Routed experts alone have other bytes: the words and scales that compressed-tensors makes; it reads the config."""
    size = convert(source, tmp_path / "out", Recipe({"experts": form}, group))  # type: ignore[dict-item]  # a form
    before, after = _stored(source), _stored(tmp_path / "out")
    packed = [name.removesuffix("_packed") for name in after if name.endswith("weight_packed")]
    assert len(packed) == 3 * 4 * 3  # experts of three sparse layers; the MTP block stays
    for name in packed:
        assert ".mlp.experts." in name
        parts, _ = _own(before.pop(name), 4 if form == "int4" else 8, group)
        for part, wanted in parts.items():
            assert torch.equal(after.pop(f"{name.removesuffix('.weight')}.{part}"), wanted), (name, part)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert size == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    from compressed_tensors.quantization import QuantizationConfig

    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig(**described)
    assert read.config_groups["group_0"].weights.group_size == group
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_fp8_is_the_official_form(source: Path, tmp_path: Path) -> None:
    """Everything asked for in fp8 has the values and scales of its definition, block by block."""
    forms: dict[str, Any] = dict.fromkeys(("experts", "mlp", "attention", "indexer"), "fp8")
    convert(source, tmp_path, Recipe(forms, mtp=True))
    before, after = _stored(source), _stored(tmp_path)
    plain = {name: tensor.float() for name, tensor in before.items() if "weights_proj" not in name}
    for name, wanted in quantised(plain, (128, 128)).items():
        assert torch.equal(after[name].float(), wanted.float()), name
    assert load_model(tmp_path).mtp is not None
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.gate" in described["modules_to_not_convert"]


def test_every_kind_has_a_form_of_its_own(source: Path, tmp_path: Path) -> None:
    """Four-bit experts beside eight-bit everything, the MTP block too: the model has the values that the format's package reads."""
    convert(source, tmp_path / "out", Recipe(ALL, 32, mtp=True))
    plain = _stored(source)
    for name in list(plain):
        module = name.removesuffix(".weight")
        if plain[name].dim() != 2 or module.endswith(("embed_tokens", "lm_head", "eh_proj")):
            continue
        plain[name] = _own(plain[name], 4 if ".experts." in name and "shared" not in name else 8, 32)[1]
    wanted = load_model(write_checkpoint(plain, CONFIG, tmp_path / "plain"))
    got = load_model(tmp_path / "out")
    one, other = weights_of(got), weights_of(wanted)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert torch.isfinite(FlatRun(got, 64).append(torch.arange(30))).all()


def test_merged_experts_come_apart(source: Path, tmp_path: Path) -> None:
    """Experts stored in two tensors a layer are converted one by one, to the same words."""
    merged = write_checkpoint(TENSORS, CONFIG, tmp_path / "merged", dtype=torch.bfloat16, merged=True)
    convert(merged, tmp_path / "out", Recipe())
    convert(source, tmp_path / "wanted", Recipe())
    one, other = _stored(tmp_path / "out"), _stored(tmp_path / "wanted")
    kept = [name for name in other if ".experts." in name and "layers.4" not in name]
    assert all(torch.equal(one[name], other[name]) for name in kept)
    assert load_model(tmp_path / "out").mtp is not None


def test_a_stopped_conversion_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed within a file it leaves a directory that does not load; run again it makes what is missing or damaged, to the same bytes."""
    monkeypatch.setattr(engine.convert.checkpoint, "FILE_BYTES", 200_000)
    convert(source, tmp_path / "whole", Recipe())
    out, written = tmp_path / "out", 0
    write = Output.write_tensors

    def stopped(self: Output, file: str, tensors: Mapping[str, Tensor]) -> None:
        nonlocal written
        written += 1
        if written == 4:
            (out / f"{file}.partial").write_bytes(b"half of a file")
            raise KeyboardInterrupt
        write(self, file, tensors)

    monkeypatch.setattr(Output, "write_tensors", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, Recipe())
    with pytest.raises(BadModel):
        load_model(out)
    finished = sorted(out.glob("*.safetensors"))
    assert len(finished) == 3
    finished[0].write_bytes(finished[0].read_bytes()[:-5])
    kept = [path.stat().st_ino for path in finished[1:]]
    seen: list[tuple[int, int]] = []
    convert(source, out, Recipe(), lambda done, total: seen.append((done, total)))
    assert [path.stat().st_ino for path in finished[1:]] == kept, "a file that was whole was made again"
    files = {path.name: path.read_bytes() for path in out.iterdir() if not path.name.endswith(".partial")}
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert files == wanted
    assert seen[-1] == (len(TENSORS), len(TENSORS))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    convert(source, out, Recipe())  # nothing is left to do


def test_no_more_than_a_file_is_held(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are about as large as they may be, whatever the model's size: what is held in memory is one of them."""
    monkeypatch.setattr(engine.convert.checkpoint, "FILE_BYTES", 200_000)
    convert(source, tmp_path, Recipe())
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 5
    assert max(sizes) <= 220_000


def test_what_is_converted_is_let_go(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time do converted tensors take more than a file and one weight: a model's size does not count."""
    monkeypatch.setattr(engine.convert.checkpoint, "FILE_BYTES", 200_000)
    made, held, most, total = engine.convert.checkpoint._converted, 0, 0, 0

    def let_go(size: int) -> None:
        nonlocal held
        held -= size

    def converted(*given: Any) -> dict[str, Tensor]:
        nonlocal held, most, total
        tensors = made(*given)
        for tensor in tensors.values():
            weakref.finalize(tensor, let_go, tensor.nbytes)
            held += tensor.nbytes
            total += tensor.nbytes
        most = max(most, held)
        return tensors

    monkeypatch.setattr(engine.convert.checkpoint, "_converted", converted)
    convert(source, tmp_path, Recipe())
    largest = max(tensor.nbytes for tensor in _stored(tmp_path).values())
    assert most <= 200_000 + largest < total / 4


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"forms": {"experts": "int3"}}, "--weights must be one of int4, int8, fp8, bf16, not 'int3'"),
        ({"forms": {"experts": "int4", "attention": "q8"}}, "--attention must be one of"),
        ({"forms": {"experts": "int4", "attention": "fp8"}}, "fp8 and integers do not go into one checkpoint"),
        ({"forms": {"experts": "bf16"}}, "nothing would be converted"),
        ({"group": 48}, "--group must be one of 32, 64, 128, not 48"),
    ],
)
def test_recipes_that_make_no_sense(recipe: dict[str, Any], said: str) -> None:
    """A form or group nobody reads, two methods at once, and nothing at all are refused by flag."""
    with pytest.raises(BadSetting, match=said):
        Recipe(**recipe)


def test_what_cannot_be_converted_is_one_line(source: Path, tmp_path: Path) -> None:
    """Another conversion's directory, one of other things, the source itself, a quantised or odd source: refused, nothing written."""

    def refused(error: type[ForebayError], said: str, model: Path, out: Path, recipe: Recipe | None = None) -> None:
        with pytest.raises(error, match=said) as found:
            convert(model, out, recipe or Recipe())
        assert "\n" not in str(found.value)

    done = tmp_path / "done"
    convert(source, done, Recipe())
    refused(BadSetting, "with other options", source, done, Recipe({"experts": "int8"}))
    refused(BadModel, "is quantised already", done, tmp_path / "again")
    refused(BadSetting, "another directory than the model's", source, source)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    refused(BadSetting, "is not empty and holds no conversion", source, other)
    odd = write_checkpoint(
        random_tensors(packable_config(moe_intermediate_size=96), 1), packable_config(moe_intermediate_size=96), tmp_path / "odd"
    )
    refused(BadModel, "groups of 64 do not divide the width 96", odd, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    refused(BadModel, "does not exist", tmp_path / "absent", tmp_path / "never")
    held = os.open(done / "convert.json", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    refused(BadSetting, "another process converts into", source, done)
    os.close(held)
    (done / "convert.json").write_text("{")
    refused(BadSetting, "remove .* and begin anew", source, done)


def test_a_nan_is_named(tmp_path: Path) -> None:
    """A weight that is not finite has no nearest code: refused with its name."""
    tensors = dict(TENSORS)
    name = "model.layers.2.mlp.experts.1.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    model = write_checkpoint(tensors, CONFIG, tmp_path / "model")
    with pytest.raises(BadModel, match=f"tensor {name} holds values that are not finite"):
        convert(model, tmp_path / "out", Recipe())


async def _no_server(*_: object) -> None:
    raise AssertionError("nothing is served")


def test_the_command_converts(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`forebay convert MODEL OUT` with flags for each kind says where the result is and how large."""
    line = ["convert", str(source), str(tmp_path / "out"), "--weights", "int8", "--group", "128", "--attention", "int4", "--mtp"]
    assert run_line(line, {}, _no_server) == 0  # type: ignore[arg-type]  # not used
    assert str(tmp_path / "out") in capsys.readouterr().out
    stored = _stored(tmp_path / "out")
    assert stored["model.layers.4.mlp.experts.1.up_proj.weight_packed"].shape == (128, 32)
    assert stored["model.layers.2.self_attn.o_proj.weight_packed"].shape == (128, 16)
    with pytest.raises(BadSetting, match="--group"):
        run_line([*line[:3], "--group", "many"], {}, _no_server)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_the_plan_counts_what_a_conversion_writes(form: str, source: Path, tmp_path: Path) -> None:
    """The bytes that forebay plan gives a checkpoint in a form are those of the tensors written, to the byte."""
    kinds = ("experts", "mlp", "attention", "indexer") if form == "fp8" else ("experts",)
    convert(source, tmp_path, Recipe(dict.fromkeys(kinds, form), mtp=form == "fp8"))  # type: ignore[arg-type]  # a form
    written = sum(tensor.nbytes for name, tensor in _stored(tmp_path).items() if not name.endswith("weight_shape"))
    config = ModelConfig.read(packable_config())
    planned = checkpoint_bytes(config, WeightForm(form), mtp=True)  # type: ignore[arg-type]
    if form == "fp8":  # the official form leaves the indexer's head weights as they are
        heads = [name for name in TENSORS if name.endswith("weights_proj.weight")]
        planned += sum(4 - TENSORS[name].numel() for name in heads)
    assert written == planned
