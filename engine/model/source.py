"""Where a model's tensors come from: the files of a directory, or a seed.

Holds the `TensorSource` protocol and `open_source`, which chooses once. Knows no layer.

Invariants:
1. A name of `NAMED` stands for a directory only where no such directory exists, and only with random weights.
2. What random weights need is compared with what is free before anything is allocated.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.defaults import default_eos
from engine.errors import BadSetting, NotAdmitted
from engine.model.config import ModelConfig
from engine.model.files import TensorFiles
from engine.model.named import NAMED
from engine.model.random import RandomTensors
from engine.model.stored import has_mtp_block
from memory.host import available_bytes

__all__ = ["DTYPE_OF", "config_of", "LoadFormat", "ModelSource", "TensorSource", "check_room", "open_source"]

LoadFormat = Literal["auto", "random"]
DTYPE_OF: dict[str, torch.dtype | None] = {"auto": None, "f32": torch.float32, "bf16": torch.bfloat16}  # by the setting's name
_GIB = 2**30


class TensorSource(Protocol):
    """Names, shapes and contents of a checkpoint's tensors."""

    @property
    def borrowed(self) -> bool:
        """Whether tensors handed out belong to the source: who keeps one must copy it."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises BadModel where there is none of this name."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on whatever device the source has it."""
        ...

    def read_ahead(self, names: Collection[str]) -> None:
        """These tensors will be read soon; returns at once."""
        ...

    def close(self) -> None:
        """Nothing more is read."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model before its weights are read."""

    config: ModelConfig
    tensors: TensorSource
    dtype: torch.dtype  # that the model will compute in


def open_source(
    model: str | Path, load_format: LoadFormat, dtype: torch.dtype | None, device: torch.device, *, first_layer: int = 0
) -> ModelSource:
    """Find a model by directory or name; reads no weight but one norm of the stage's first layer.

    Args: dtype: None: float32 on the CPU; on a device bfloat16, unless the checkpoint stores float32.
    Raises: BadModel, BadSetting.
    """
    config = config_of(model, load_format)
    if load_format == "random":
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return ModelSource(config, RandomTensors(config, mtp=has_mtp_block(config), dtype=dtype, device=device), dtype)
    files = TensorFiles(model)
    return ModelSource(config, files, dtype or _stored_dtype(files, device, first_layer))


def check_room(model: str | Path, tensors: TensorSource, names: Collection[str], device: torch.device, share: float = 1.0) -> None:
    """Refuse random weights of which about `share` stays there and does not fit. Raises NotAdmitted with the numbers; files are read as far
    as they go."""
    if not isinstance(tensors, RandomTensors):
        return
    needed = share * sum(map(tensors.bytes_of, names))
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        other = "" if str(model) == "glm-5.3-slice" else "glm-5.3-slice or "
        raise NotAdmitted(
            f"random weights of {model} need {needed / _GIB:,.1f} GiB, and {free / _GIB:,.1f} GiB are free on {device}; "
            f"use {other}a config.json with fewer layers or experts"
        )


def config_of(model: str | Path, load_format: LoadFormat) -> ModelConfig:
    """What a model directory, or a named configuration, says of its shape. Raises BadModel, BadSetting."""
    fields = NAMED.get(str(model))
    if fields is not None and not Path(model).exists():
        if load_format != "random":
            raise BadSetting(f"{model} is a configuration without weights: add --load-format random, or name a model directory")
        return ModelConfig.read(fields)
    config = ModelConfig.read(model)
    ends = dict.fromkeys((*config.eos_token_ids, *default_eos(Path(model))))  # in order, each once
    return replace(config, eos_token_ids=tuple(ends))


def _stored_dtype(files: TensorFiles, device: torch.device, layer: int) -> torch.dtype:
    """What the model computes in: on a device float32 only where the norms, which no form of quantisation touches, are float32."""
    name = f"model.layers.{layer}.input_layernorm.weight"
    if device.type == "cpu" or (name in files.names and files.read(name).dtype == torch.float32):
        return torch.float32
    return torch.bfloat16
