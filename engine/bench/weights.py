"""What rounding the packaged model's weights costs: held-out loss, and how often the same token is the likeliest.

Every form is a checkpoint that `forebay convert` makes, read back as the engine reads it on a CPU. Knows no engine: one pass over each row.

Invariants:
1. All forms are judged on the same rows, tokens and bytes; agreement is with the bf16 checkpoint, at every position behind the true text.
2. Two texts: "held out", files of the standard library that no model of ours was trained on, which the packaged one may have seen
   (docs/demo_model.md), and "unseen", pip's modules. A machine without pip judges the first alone.
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
from engine.demo_training.corpus import Stream, held_out_stream, outside_stream
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
    """One form on one text. `agreement`: share of positions whose likeliest token is bf16's."""

    form: str
    text: str
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


@dataclass(frozen=True, slots=True)
class _Text:
    """Rows [tokens] of one text, and the bytes of what is predicted in them."""

    name: str
    rows: list[Tensor]
    read: int


def _texts(tokenizer: Tokenizer, rows: int, tokens: int) -> list[_Text]:
    """`rows` rows of `tokens` tokens of each text, evenly spread over it."""
    held_out, token_bytes = held_out_stream(tokenizer)
    streams: dict[str, Stream] = {"held out": held_out, "unseen": outside_stream(tokenizer)}
    found = []
    for name, stream in streams.items():
        if len(stream) < tokens:
            continue
        starts = np.linspace(0, len(stream) - tokens, rows).astype(int)
        each = [torch.from_numpy(stream[start : start + tokens].astype(np.int64)) for start in starts]
        found.append(_Text(name, each, sum(int(token_bytes[row[1:].numpy()].sum()) for row in each)))
    return found


def _network(model: Path, recipe: Recipe | None, shape: Shape) -> tuple[Network, int]:
    """The model in a form, and the bytes of its files."""
    with TemporaryDirectory() as made:
        directory = model if recipe is None else Path(made)
        if recipe is not None:
            convert(model, directory, recipe)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        return network_of(_tensors(directory), shape).eval(), size


def judge(
    model: Path, rows: int, tokens: int, on_done: Callable[[str, int, int], None] = lambda title, done, total: None,
    shape: Shape | None = None,
) -> list[Judged]:  # fmt: skip
    """Judge every form of `RECIPES` on both texts: form by form, the texts of one form together.

    Args: shape: of the model; the packaged one's if None. Raises: BadModel, BadSetting.
    """
    texts = _texts(Tokenizer.from_file(str(model / "tokenizer.json")), rows, tokens)
    found: list[Judged] = []
    plain: dict[str, list[Tensor]] = {}
    done, total = 0, len(RECIPES) * sum(len(text.rows) for text in texts)
    for form, recipe in RECIPES.items():
        network, size = _network(model, recipe, shape or Shape())
        for text in texts:
            nats, likeliest = [], []
            for row in text.rows:
                one, top = _pass(network, row)
                nats.append(float(one.double().sum()))
                likeliest.append(top)
                done += 1
                on_done("rows", done, total)
            wanted = plain.setdefault(text.name, likeliest)
            same = torch.cat([one == other for one, other in zip(likeliest, wanted, strict=True)])
            lost, agreement = math.fsum(nats), float(same.double().mean())
            found.append(Judged(form, text.name, size, lost / text.read / math.log(2), lost / len(same), agreement, len(same)))
    return found


def _more(one: Judged, found: list[Judged]) -> float:
    """Share of bits that a form takes more than the first form does on the same text."""
    plain = next(other for other in found if other.text == one.text)
    return one.bits_a_byte / plain.bits_a_byte - 1


def table(found: list[Judged]) -> Table:
    """For people."""
    shown = Table(title="rounded weights", title_justify="left")
    for name in ("weights", "MB", "text", "bits a byte", "more than bf16", "likeliest token as bf16's"):
        shown.add_column(name)
    for one in found:
        more = f"{_more(one, found):+.2%}"
        shown.add_row(one.form, f"{one.file_bytes / 1e6:.1f}", one.text, f"{one.bits_a_byte:.4f}", more, f"{one.agreement:.2%}")
    return shown


def as_json(found: list[Judged], model: Path, tokens: int, machine: Mapping[str, Any]) -> dict[str, Any]:
    """For programs. The texts are those of the Python that `machine` names."""
    return {
        "version": 2, "kind": "weights", "machine": dict(machine), "model": model.name, "row_tokens": tokens, "group": _GROUP,
        "forms": [asdict(one) for one in found],
    }  # fmt: skip
