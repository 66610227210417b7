"""What rounding the packaged model's weights costs: held-out loss, and how often the same token is the likeliest.

Every form is a checkpoint that `forebay convert` makes, read back as the engine reads it on a CPU. Knows no engine: one pass over each row.

Invariants:
1. All forms are judged on the same rows, tokens and bytes; agreement is with the bf16 checkpoint, at every position behind the true text.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from engine.convert import Recipe, convert
from engine.convert.recipe import Form
from engine.demo_training.corpus import held_out_stream
from engine.demo_training.export import network_of
from engine.demo_training.network import Network
from engine.demo_training.shape import Shape
from engine.model.source import open_source
from engine.model.stored import stored_shapes
from engine.model.weights import WeightReader

__all__ = ["RECIPES", "Judged", "as_json", "judge", "table"]

_GROUP = 32  # divides the widths of the packaged model


def _everything(form: Form) -> Recipe:
    return Recipe(dict.fromkeys(("experts", "mlp", "attention", "indexer"), form), _GROUP)


RECIPES: Mapping[str, Recipe | None] = {
    "bf16": None,
    "fp8 experts": Recipe({"experts": "fp8"}),
    "int8 experts": Recipe({"experts": "int8"}, _GROUP),
    "int4 experts": Recipe({"experts": "int4"}, _GROUP),
    "fp8 everything": _everything("fp8"),
    "int8 everything": _everything("int8"),
    "int4 everything": _everything("int4"),
    "int4 experts, int8 rest": Recipe({"experts": "int4", "mlp": "int8", "attention": "int8", "indexer": "int8"}, _GROUP),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One form. `agreement`: share of positions whose likeliest token is bf16's."""

    form: str
    file_bytes: int
    bits_a_byte: float
    nats_a_token: float
    agreement: float
    tokens: int


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Every weight as the engine reads it on a CPU, float32."""
    source = open_source(directory, "auto", torch.float32, torch.device("cpu"))
    reader = WeightReader(source.tensors, dtype=torch.float32, device=torch.device("cpu"), quantisation=source.config.quantisation, total=0)
    return {name: reader.take_f32(name, *shape) for name, shape in stored_shapes(source.config, mtp=True).items()}


@torch.no_grad()
def _pass(network: Network, row: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each token after the first, and the likeliest token at each place before the last."""
    out = network(row[None], torch.arange(len(row))[None], sparse=True, depths=0)
    logits = network.logits(out.state)[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, row[1:], reduction="none"), logits.argmax(-1)


def judge(
    model: Path, rows: int, tokens: int, on_done: Callable[[str, int, int], None] = lambda title, done, total: None,
    shape: Shape | None = None,
) -> list[Judged]:  # fmt: skip
    """Judge every form of `RECIPES` on `rows` rows of `tokens` tokens, evenly spread over the held-out files of this Python's library.

    Args: shape: of the model; the packaged one's if None. Raises: BadModel, BadSetting.
    """
    stream, token_bytes = held_out_stream(Tokenizer.from_file(str(model / "tokenizer.json")))
    starts = np.linspace(0, len(stream) - tokens, rows).astype(int)
    texts = [torch.from_numpy(stream[start : start + tokens].astype(np.int64)) for start in starts]
    read = sum(int(token_bytes[text[1:].numpy()].sum()) for text in texts)
    found: list[Judged] = []
    wanted: list[Tensor] = []
    for number, (form, recipe) in enumerate(RECIPES.items()):
        with TemporaryDirectory() as made:
            directory = model if recipe is None else Path(made)
            if recipe is not None:
                convert(model, directory, recipe)
            size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
            network = network_of(_tensors(directory), shape or Shape()).eval()
        passed = [_pass(network, text) for text in texts]
        likeliest = [top for _, top in passed]
        wanted = wanted or likeliest
        nats = float(torch.cat([each for each, _ in passed]).double().sum())
        same = torch.cat([one == other for one, other in zip(likeliest, wanted, strict=True)])
        found.append(Judged(form, size, nats / read / math.log(2), nats / len(same), float(same.double().mean()), len(same)))
        on_done("forms", number + 1, len(RECIPES))
    return found


def table(found: list[Judged]) -> Table:
    """For people."""
    shown = Table(
        "weights", "MB", "bits a byte", "more than bf16", "likeliest token as bf16's", title="rounded weights", title_justify="left"
    )
    for one in found:
        more = one.bits_a_byte / found[0].bits_a_byte - 1
        shown.add_row(one.form, f"{one.file_bytes / 1e6:.1f}", f"{one.bits_a_byte:.4f}", f"{more:+.2%}", f"{one.agreement:.2%}")
    return shown


def as_json(found: list[Judged], model: Path, tokens: int, machine: Mapping[str, Any]) -> dict[str, Any]:
    """For programs."""
    return {
        "version": 1, "kind": "weights", "machine": dict(machine), "model": model.name, "row_tokens": tokens, "group": _GROUP,
        "forms": [asdict(one) for one in found],
    }  # fmt: skip
