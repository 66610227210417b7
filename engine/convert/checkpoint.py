"""One checkpoint made into another, tensor by tensor. Holds `convert`."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.convert.output import Output, fingerprint
from engine.convert.quantise import packed_integers, scaled_fp8
from engine.convert.recipe import Form, Recipe
from engine.errors import BadModel, BadSetting
from engine.model.config import ModelConfig
from engine.model.fields import read_json
from engine.model.files import TensorFiles
from engine.model.glm import check_names

__all__ = ["FILE_BYTES", "convert"]

FILE_BYTES = 1 << 30  # of tensors in one file; what is held in memory
_VERSION = 1
_MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor of the output's plain form: where it is in the source, and what becomes of it."""

    name: str
    stored: str  # in the source
    shape: tuple[int, ...]
    form: Form
    expert: int = -1  # of a merged tensor; else -1
    half: int = -1  # 0 and 1: gate and up rows of a merged tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors of the output."""
        module = self.name.removesuffix(".weight")
        if self.form in ("int4", "int8"):
            return tuple(f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape"))
        return (self.name, f"{self.name}_scale_inv") if self.form == "fp8" else (self.name,)

    @property
    def bytes(self) -> int:
        """Of the output, about."""
        return math.prod(self.shape) * {"int4": 1, "int8": 2, "fp8": 2, "bf16": 4}[self.form] // 2


def convert(model: Path, directory: Path, recipe: Recipe, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Write `model`'s checkpoint into `directory` in the recipe's forms, going on with what is there.

    Args: progress: called with (weights done, weights in all).
    Returns: bytes of the output's tensors.
    Raises: BadModel: the source is no whole checkpoint of plain floats, or groups do not divide a width. BadSetting: the directory holds
    something else, or cannot be written.
    """
    raw, config = read_json(_config_file(model)), ModelConfig.read(model)
    if config.quantisation.method != "none":
        raise BadModel(f"{model} is quantised already ({config.quantisation.method}); convert the bf16 checkpoint")
    if directory.resolve() == model.resolve():
        raise BadSetting("the output must be another directory than the model's")
    files = TensorFiles(model)
    check_names(files.names, config.layers)
    weights = list(_weights(files, config, recipe))
    shards = list(_shards(weights))
    plan = {"version": _VERSION, "kind": "convert", "source": fingerprint(model), "recipe": asdict(recipe), "files": len(shards)}
    output = Output(directory, plan)
    try:
        file_of: dict[str, str] = {}
        done = 0
        for number, shard in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            names = [name for weight in shard for name in weight.names]
            if not output.has(file, names):
                tensors: dict[str, Tensor] = {}
                for number_in, weight in enumerate(shard):
                    tensors |= _converted(files, weight, recipe.group)
                    progress(done + number_in, len(weights))
                output.write_tensors(file, tensors)
            file_of |= dict.fromkeys(names, file)
            done += len(shard)
            progress(done, len(weights))
        _copy_others(model, output)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        output.write_json("model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": file_of})
        plain = [weight.name.removesuffix(".weight") for weight in weights if weight.form == "bf16" and len(weight.shape) == 2]
        output.write_json("config.json", raw | {"quantization_config": recipe.described(config.layers, plain)})
        return size
    finally:
        output.close()


def _config_file(model: Path) -> Path:
    if not model.is_dir():
        raise BadModel(f"model directory {model} does not exist")
    return model / "config.json"


def _weights(files: TensorFiles, config: ModelConfig, recipe: Recipe) -> Iterator[_Weight]:
    """In the order of layers, merged experts apart where they are converted."""
    for stored in sorted(files.names, key=_order):
        shape = files.shape(stored)
        merged = _MERGED.fullmatch(stored)
        if merged is not None and recipe.form_of(f"{merged[1]}.0.gate_proj", config.layers) != "bf16":
            yield from _apart(stored, merged[1], merged[2], shape, config, recipe)
            continue
        module = stored.removesuffix(".weight")
        form: Form = recipe.form_of(module, config.layers) if len(shape) == 2 and module != stored else "bf16"
        yield _checked(_Weight(stored, stored, shape, form), recipe)


def _apart(
    stored: str, prefix: str, part: str, shape: tuple[int, ...], config: ModelConfig, recipe: Recipe
) -> Iterator[_Weight]:  # fmt: skip
    """The experts of one merged tensor [experts, outputs, width]."""
    form = recipe.form_of(f"{prefix}.0.gate_proj", config.layers)
    for expert in range(shape[0]):
        if part == "down_proj":
            yield _checked(_Weight(f"{prefix}.{expert}.down_proj.weight", stored, shape[1:], form, expert), recipe)
            continue
        for half, name in enumerate(("gate", "up")):
            yield _checked(
                _Weight(f"{prefix}.{expert}.{name}_proj.weight", stored, (shape[1] // 2, shape[2]), form, expert, half), recipe
            )  # fmt: skip


def _checked(weight: _Weight, recipe: Recipe) -> _Weight:
    if weight.form in ("int4", "int8") and weight.shape[1] % recipe.group:
        raise BadModel(f"tensor {weight.stored}: groups of {recipe.group} do not divide the width {weight.shape[1]}; use --group 32")
    return weight


def _order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Layers by number, experts too; what is in no layer first."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return int(layer[1]) if layer else -1, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _shards(weights: list[_Weight]) -> Iterator[list[_Weight]]:
    """Consecutive weights of FILE_BYTES at most, but at least one."""
    shard: list[_Weight] = []
    held = 0
    for weight in weights:
        if shard and held + weight.bytes > FILE_BYTES:
            yield shard
            shard, held = [], 0
        shard.append(weight)
        held += weight.bytes
    if shard:
        yield shard


def _converted(files: TensorFiles, weight: _Weight, group: int) -> dict[str, Tensor]:
    """A weight's tensors in the output."""
    tensor = files.read(weight.stored)
    if tensor.dtype not in _FLOATS:
        raise BadModel(f"tensor {weight.stored} is stored as {str(tensor.dtype).removeprefix('torch.')}; convert the bf16 checkpoint")
    if weight.expert >= 0:
        tensor = tensor[weight.expert]
    if weight.half >= 0:
        tensor = tensor[weight.half * weight.shape[0] : (weight.half + 1) * weight.shape[0]]
    if weight.form == "bf16":
        return {weight.name: tensor.contiguous()}
    if not bool(torch.isfinite(tensor).all()):
        raise BadModel(f"tensor {weight.stored} holds values that are not finite")
    module = weight.name.removesuffix(".weight")
    parts = scaled_fp8(tensor) if weight.form == "fp8" else packed_integers(tensor, 4 if weight.form == "int4" else 8, group)
    return {f"{module}.{part}": each for part, each in parts.items()}


def _copy_others(model: Path, output: Output) -> None:
    """Tokenizer, template, generation settings: every file that is no weights and not config.json."""
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in ("config.json", "convert.json") and not path.name.endswith(_NOT_COPIED):
            output.write_bytes(path.name, path.read_bytes())
