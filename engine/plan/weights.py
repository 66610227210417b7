"""Bytes of weights, tensor by tensor, as stored and as an engine holds them.

Knows names and shapes (`engine/model/stored.py`) and no contents.
1. `fp8` is the official block form: matrices of attention, indexer and MLPs in e4m3 with a float32 scale a block of 128 x 128.
2. `int4` is the published mix of four-bit routed experts (a float16 scale a group of inputs) with everything else as in `fp8`.
3. An engine holds routers in float32 and kv_b, which it cuts per head, in its own dtype; a checkpoint stores neither so.
Source: model.md, sections 4.1 to 4.3.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from engine.errors import BadSetting
from engine.model.config import ModelConfig
from engine.model.stored import stored_shapes
from kernels.linear.block_fp8 import FP8_BLOCK

__all__ = ["LayerBytes", "WeightForm", "checkpoint_bytes", "layer_bytes"]

Encoding: TypeAlias = Literal["f32", "bf16", "fp8", "int4"]

_BIAS = "e_score_correction_bias"
_PRODUCT = re.compile(r"(_proj|_proj_with_mqa|indexer\.wq_b|indexer\.wk)\.weight$")  # what the official form stores in e4m3 ...
_KEPT = ("weights_proj", "eh_proj")  # ... but for these
_EXPERT = ".mlp.experts."
# On both cards of a stage: what selections, rows, keys and routing are made from. Everything else of a matrix's kind is halved.
_BOTH = ("q_a_proj", "kv_a_proj", "indexer.", "mlp.gate.", "norm")


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How weights are stored. `group`: inputs that share a scale in `int4`."""

    encoding: Encoding
    group: int = 64

    def __post_init__(self) -> None:
        if self.encoding not in get_args(Encoding):
            raise BadSetting(f"--weights must be one of {', '.join(get_args(Encoding))}, not {self.encoding!r}")
        if self.group < 1:
            raise BadSetting(f"--weight-group must be at least 1, not {self.group}")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Of one layer, or of embedding, norm or head. `card`: what one card of the stage holds; `experts`: what of it is routed experts."""

    whole: int = 0
    card: int = 0
    experts: int = 0

    def __add__(self, other: "LayerBytes") -> "LayerBytes":
        return LayerBytes(self.whole + other.whole, self.card + other.card, self.experts + other.experts)


def checkpoint_bytes(config: ModelConfig, form: WeightForm, *, mtp: bool) -> int:
    """Bytes of all tensors as a checkpoint stores them."""
    return sum(_bytes(name, shape, form, held=False) for name, shape in stored_shapes(config, mtp=mtp).items())


@lru_cache(maxsize=16)
def layer_bytes(config: ModelConfig, form: WeightForm, *, mtp: bool, cards: int) -> Mapping[str, LayerBytes]:
    """Bytes that an engine holds, by `embed`, `norm`, `head` and the layer's number (the MTP block's is the layer count).

    Args: cards: of a stage, 1 or 2.
    """
    held: dict[str, LayerBytes] = {}
    for name, shape in stored_shapes(config, mtp=mtp).items():
        parts = name.split(".")
        place = parts[2] if parts[1] == "layers" else {"embed_tokens": "embed", "norm": "norm", "weight": "head"}[parts[1]]
        whole = _bytes(name, shape, form, held=True)
        card = whole if len(shape) < 2 or any(part in name for part in _BOTH) else -(-whole // cards)
        held[place] = held.get(place, LayerBytes()) + LayerBytes(whole, card, card if _EXPERT in name else 0)
    return MappingProxyType(held)


def _bytes(name: str, shape: tuple[int, ...], form: WeightForm, *, held: bool) -> int:
    values = math.prod(shape)
    if name.endswith(_BIAS) or form.encoding == "f32" or (held and ".mlp.gate." in name):
        return 4 * values
    quantised = form.encoding in ("fp8", "int4") and _PRODUCT.search(name) is not None and not any(part in name for part in _KEPT)
    if not quantised or (held and "kv_b_proj" in name):
        return 2 * values
    outputs, width = shape
    if form.encoding == "int4" and _EXPERT in name:
        return -(-values // 2) + 2 * outputs * -(-width // form.group)
    return values + 4 * -(-outputs // FP8_BLOCK) * -(-width // FP8_BLOCK)
