"""Tiny checkpoints in each packed form, made without the code that reads them.

Words of compressed-tensors are packed and multiplied out by that package itself; AWQ's by loops over its definition.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("compressed_tensors")  # a machine for measuring has no need of it
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

__all__ = ["AWQ_ORDER", "Packed", "awq", "awq_config", "compressed", "compressed_config", "write_packed"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Packed = tuple[dict[str, Tensor], Tensor]  # what is stored by the last part of its name, and the weight it stands for


def _codes(generator: torch.Generator, outputs: int, width: int, bits: int) -> Tensor:
    """Every code there is, as far as they fit, then any: the lowest and the highest among them."""
    codes = torch.randint(0, 1 << bits, (outputs, width), generator=generator)
    every = torch.arange(1 << bits)[: codes.numel()]
    codes.view(-1)[: every.numel()] = every
    return codes


def compressed(outputs: int, width: int, *, bits: int, group: int, symmetric: bool, dtype: torch.dtype, seed: int) -> Packed:
    """A module of compressed-tensors: its parts, and what its own package multiplies them out to. `group` 0: one scale an output."""
    generator = torch.Generator().manual_seed(seed)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy))
    groups, middle = width // (group or width), 1 << (bits - 1)
    scale = (torch.rand((outputs, groups), generator=generator) + 0.1) / middle / width**0.5
    scale = scale.to(dtype)
    zero = torch.randint(-middle, middle, (outputs, groups), generator=generator).to(torch.int8)
    zero.view(-1)[:2] = torch.tensor([-middle, middle - 1])
    values = (_codes(generator, outputs, width, bits) - middle).float()
    spread = scale.float().repeat_interleave(group or width, 1)
    offset = 0 if symmetric else zero.float().repeat_interleave(group or width, 1)
    state = {"weight": (values - offset) * spread, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zero
    stored = PackedQuantizationCompressor.compress(state, scheme)
    return stored, PackedQuantizationCompressor.decompress(stored, scheme)["weight"]


def awq(outputs: int, width: int, *, group: int, dtype: torch.dtype, seed: int) -> Packed:
    """A module of AWQ's gemm order: words of eight outputs, of inputs one below the other."""
    generator = torch.Generator().manual_seed(seed)
    codes, zeros = _codes(generator, width, outputs, 4), _codes(generator, width // group, outputs, 4)
    scales = ((torch.rand((width // group, outputs), generator=generator) + 0.1) / 8 / width**0.5).to(dtype)
    weight = torch.empty((outputs, width), dtype=dtype)
    for value in range(width):
        weight[:, value] = (codes[value] - zeros[value // group]).to(dtype) * scales[value // group]
    return {"qweight": _awq_words(codes), "qzeros": _awq_words(zeros), "scales": scales}, weight


def _awq_words(codes: Tensor) -> Tensor:
    words = torch.zeros((codes.shape[0], codes.shape[1] // 8), dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, output in enumerate(AWQ_ORDER):
            words[:, word] |= codes[:, 8 * word + output] << 4 * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def compressed_config(groups: Mapping[str, Mapping[str, Any]], ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """quantization_config of groups: fields of `weights`, and `targets`."""
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(ignore),
        "config_groups": {
            name: {"targets": list(group["targets"]), "input_activations": None, "output_activations": None,
                   "weights": {"type": "int", "strategy": "group" if group["group_size"] else "channel"}
                   | {field: value for field, value in group.items() if field != "targets"}}
            for name, group in groups.items()
        },
    }  # fmt: skip


def awq_config(group: int = 64) -> dict[str, Any]:
    """quantization_config of AWQ."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["gate"],
    }


def write_packed(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], quantised: Mapping[str, Any], directory: Path,
    pack: Callable[[str, int, int], Packed | None],
) -> dict[str, Tensor]:  # fmt: skip
    """Write a directory in which `pack(module, outputs, width)` replaces weights. Returns: all weights, multiplied out."""
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        packed = pack(module, *tensor.shape) if tensor.dim() == 2 and name != module else None
        if packed is None:
            stored[name] = plain[name] = tensor
            continue
        parts, plain[name] = packed
        stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantised)}))
    save_file(stored, directory / "model.safetensors")
    return plain
