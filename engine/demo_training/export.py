"""Network to and from a checkpoint directory in Hugging Face layout: bf16 safetensors, one tensor an expert.

Does not know: training, the tokenizer's contents (its files are copied).

1. Everything is bfloat16 on disk except the router's correction bias, which is float32.
2. `load` returns what was saved, widened to float32 without loss: evaluation sees the weights that ship.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.demo_training.network import Network
from engine.demo_training.shape import STOP_TOKENS, Shape, config_of

__all__ = ["TOKENIZER_FILES", "checkpoint_tensors", "load", "network_of", "save"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GENERATION = {"do_sample": True, "eos_token_id": list(STOP_TOKENS), "pad_token_id": STOP_TOKENS[0], "temperature": 0.8, "top_p": 0.95}
_STACKED = re.compile(r"(.*\.experts)\.(gate_proj|up_proj|down_proj)$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def checkpoint_tensors(network: Network) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its published name, on the CPU, in its dtype on disk."""
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        value = value.detach().cpu()
        if name.endswith("e_score_correction_bias"):
            tensors[name] = value.float().contiguous()
        elif stacked := _STACKED.match(name):
            for expert, weight in enumerate(value):
                tensors[f"{stacked[1]}.{expert}.{stacked[2]}.weight"] = weight.to(torch.bfloat16).contiguous()
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    return tensors


def save(network: Network, directory: Path, tokenizer: Path) -> None:
    """Write the checkpoint into `directory`; `tokenizer` is the directory whose tokenizer files are copied."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(network), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_of(network.shape), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if directory.resolve() != tokenizer.resolve():
            shutil.copyfile(tokenizer / name, directory / name)


def load(directory: Path, shape: Shape, dtype: torch.dtype = torch.float32) -> Network:
    """The network of a checkpoint written by `save`. Raises RuntimeError, naming the tensors, if they do not fit `shape`."""
    return network_of(load_file(directory / "model.safetensors"), shape, dtype)


def network_of(tensors: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype = torch.float32) -> Network:
    """The network of a checkpoint's tensors by their published names. Raises RuntimeError as `load`."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        if match := _EXPERT.match(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value.float()
        else:
            state[name] = value.float()
    for name, parts in experts.items():
        state[name] = torch.stack([parts[expert] for expert in sorted(parts)])
    network = Network(shape, dtype)
    network.load_state_dict(state)
    return network
