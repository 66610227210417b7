"""Bytes of weights, tensor by tensor, as stored and as an engine holds them.

Knows names and shapes (`engine/model/stored.py`) and no contents.
1. `fp8` is the official block form: matrices of attention, indexer and MLPs in e4m3 with a float32 scale a block of 128 x 128. A
   config.json's own has its blocks, and not its `modules_to_not_convert`; other blocks are multiplied out where they are held.
2. `int4` and `int8` are what `forebay convert` makes by itself: routed experts so, with a bf16 scale a group, everything else and the MTP
   block in bf16. `mix` also has attention, dense and shared MLPs in eight bits, as published mixes have. A config.json's own packed form is
   counted by its own schemes.
3. An engine holds routers in float32, and in its own dtype what it cuts (kv_b) or no product reads packed; a checkpoint stores neither so.
Source: model.md, sections 4.1 to 4.3.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from engine.convert.recipe import Form, Recipe
from engine.errors import BadSetting
from engine.model.config import ModelConfig
from engine.model.quantisation import GROUPS, Quantisation, Scheme
from engine.model.stored import stored_shapes
from kernels.linear.block_fp8 import FP8_BLOCK
from kernels.linear.group_int import padded_width

__all__ = ["LayerBytes", "WeightForm", "checkpoint_bytes", "layer_bytes"]

Encoding: TypeAlias = Literal["f32", "bf16", "fp8", "int4", "int8", "mix"]

_BIAS = "e_score_correction_bias"
_PRODUCT = re.compile(r"(_proj|_proj_with_mqa|indexer\.wq_b|indexer\.wk)\.weight$")  # what the official form stores in e4m3 ...
_KEPT = ("weights_proj", "eh_proj")  # ... but for these
_OFFICIAL = (FP8_BLOCK, FP8_BLOCK)
_EXPERT = ".mlp.experts."
_HELD_PLAIN = ("kv_b_proj", "weights_proj", "eh_proj", "lm_head")  # multiplied out when they are read
_FORMS: Mapping[str, Mapping[str, Form]] = {
    "int4": {"experts": "int4"}, "int8": {"experts": "int8"}, "mix": {"experts": "int4", "mlp": "int8", "attention": "int8"},
}  # fmt: skip
# On both cards of a stage: what selections, rows, keys and routing are made from. Everything else of a matrix's kind is halved.
_BOTH = ("q_a_proj", "kv_a_proj", "indexer.", "mlp.gate.", "norm")


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How weights are stored. `group`: inputs that share a scale in integers. `quantisation`: a config.json's own form, if any."""

    encoding: Encoding
    group: int = 64
    quantisation: Quantisation | None = None

    def __post_init__(self) -> None:
        if self.encoding not in get_args(Encoding):
            raise BadSetting(f"--weights must be one of {', '.join(get_args(Encoding))}, not {self.encoding!r}")
        if self.group not in GROUPS:
            raise BadSetting(f"--weight-group must be one of {', '.join(map(str, GROUPS))}, not {self.group}")

    def packed(self, layers: int) -> Quantisation | None:
        """The config.json's own form, else which weights are packed integers, in a model of so many layers; None where none is."""
        if self.quantisation is not None or self.encoding not in _FORMS:
            return self.quantisation
        return Recipe(_FORMS[self.encoding], self.group).quantisation(layers)

    @property
    def left_plain(self) -> frozenset[str]:
        """Modules, or what they are in, that a config.json in block-FP8 leaves as they are."""
        own = self.quantisation
        return frozenset(own.ignored) if own is not None and own.method == "fp8" else frozenset()

    @property
    def named(self) -> str:
        """For people and JSON."""
        return self.encoding if self.quantisation is None else self.quantisation.method


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Of one layer, or of embedding, norm or head. `card`: what one card of the stage holds; `experts`: what of it is routed experts."""

    whole: int = 0
    card: int = 0
    experts: int = 0

    def __add__(self, other: "LayerBytes") -> "LayerBytes":
        return LayerBytes(self.whole + other.whole, self.card + other.card, self.experts + other.experts)


@lru_cache(maxsize=16)
def checkpoint_bytes(config: ModelConfig, form: WeightForm, *, mtp: bool) -> int:
    """Bytes of all tensors as a checkpoint stores them."""
    packed, plain = form.packed(config.layers), form.left_plain
    return sum(_bytes(name, shape, form, packed, plain, held=False) for name, shape in stored_shapes(config, mtp=mtp).items())


@lru_cache(maxsize=16)
def layer_bytes(config: ModelConfig, form: WeightForm, *, mtp: bool, cards: int) -> Mapping[str, LayerBytes]:
    """Bytes that an engine holds, by `embed`, `norm`, `head` and the layer's number (the MTP block's is the layer count).

    Args: cards: of a stage, 1 or 2.
    """
    held: dict[str, LayerBytes] = {}
    packed, plain = form.packed(config.layers), form.left_plain
    for name, shape in stored_shapes(config, mtp=mtp).items():
        parts = name.split(".")
        place = parts[2] if parts[1] == "layers" else {"embed_tokens": "embed", "norm": "norm", "weight": "head"}[parts[1]]
        whole = _bytes(name, shape, form, packed, plain, held=True)
        card = whole if len(shape) < 2 or any(part in name for part in _BOTH) else -(-whole // cards)
        held[place] = held.get(place, LayerBytes()) + LayerBytes(whole, card, card if _EXPERT in name else 0)
    return MappingProxyType(held)


def _bytes(
    name: str, shape: tuple[int, ...], form: WeightForm, packed: Quantisation | None, plain: frozenset[str], *, held: bool
) -> int:  # fmt: skip
    """Of one tensor. Args: plain: modules, or what they are in, that block-FP8 leaves as they are."""
    values = math.prod(shape)
    if name.endswith(_BIAS) or (held and ".mlp.gate." in name):
        return 4 * values
    scheme = packed.scheme_of(name.removesuffix(".weight")) if packed is not None and len(shape) == 2 else None
    if scheme is not None and not (held and any(part in name for part in _HELD_PLAIN)):
        return _packed_bytes(shape[0], shape[1], scheme, held=held)
    if form.encoding == "f32":
        return 4 * values
    quantised = form.encoding == "fp8" and _PRODUCT.search(name) is not None and not any(part in name for part in _KEPT)
    rows, columns = _OFFICIAL if packed is None else packed.block
    if not quantised or not plain.isdisjoint(_within(name)) or (held and ("kv_b_proj" in name or (rows, columns) != _OFFICIAL)):
        return 2 * values
    outputs, width = shape
    return values + 4 * -(-outputs // rows) * -(-width // columns)


def _within(name: str) -> Iterator[str]:
    """The module of a weight, and all that it is in."""
    return accumulate(name.removesuffix(".weight").split("."), "{}.{}".format)


def _packed_bytes(outputs: int, width: int, scheme: Scheme, *, held: bool) -> int:
    """Codes, scales of two bytes, and zeros: packed as codes are in a checkpoint, a byte each where they are held."""
    group = scheme.group or -(-width // 64) * 64
    if held:
        padded = padded_width(width, scheme.bits, group)
        return outputs * (padded * scheme.bits // 8 + -(-padded // group) * (2 if scheme.symmetric else 3))
    groups = -(-width // group)
    zeros = 0 if scheme.symmetric else 4 * -(-outputs * scheme.bits // 32) * groups
    return 4 * outputs * -(-width * scheme.bits // 32) + 2 * outputs * groups + zeros
