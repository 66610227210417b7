"""A stage's weights on two devices: half of the heads and experts, and of the width of every other MLP, is the peer's.

Holds `PeerModel` and what makes it of layers as they are read. The owner keeps everything that makes a row, a key, a query latent or a
choice, embedding, output head and the whole MTP block: what it alone computes needs no agreement. Knows no rows and no streams.

Invariants:
1. Nothing is cloned: on one device both parts are views of what was read; else each device holds its part alone, and what was read whole is
   let go layer by layer.
2. A part's heads, experts and widths are consecutive, the owner's first. Stored scales are cut at their blocks or groups only.
3. Both parts' outputs, added in float32, owner first, are the layer's: only the order of the sum over heads, experts and width differs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from engine.errors import BadSetting
from engine.model.config import ModelConfig
from engine.model.glm import Model
from engine.model.layer import LayerWeights
from engine.model.mla import Heads
from engine.model.moe import DenseWeights, MoeWeights, chosen_here
from engine.model.weights import Weight
from kernels.linear.block_fp8 import FP8_BLOCK, BlockFp8
from kernels.linear.group_int import GroupInt, chunk_units_of
from kernels.moe import experts
from kernels.rope import rope_table

__all__ = ["PeerExperts", "PeerLayer", "PeerModel", "Splitter", "parts_of", "split_model"]


W = TypeVar("W", bound=Weight)


@dataclass(frozen=True, slots=True)
class PeerExperts:
    """The peer's routed experts and its part of the shared one; the owner routes."""

    gate_up: Weight
    down: Weight
    shared: DenseWeights
    first: int

    def feed_chosen(self, y: Tensor, expert_of: Tensor, weight_of: Tensor) -> Tensor:
        """The output [T, H] of those of the chosen experts that are here, and of the shared one's part."""
        here = chosen_here(expert_of, weight_of, self.first, self.gate_up.shape[0])
        return experts(y, *here, self.gate_up, self.down) + self.shared.feed(y)


@dataclass(frozen=True, slots=True)
class PeerLayer:
    """The peer's part of a layer."""

    heads: Heads
    mlp: DenseWeights | PeerExperts

    def feed(self, y: Tensor, chosen: tuple[Tensor, Tensor] | None) -> Tensor:
        """Its part of what the MLP adds, [T, H], of the normed state y [T, H] and, where experts are, those that the owner chose."""
        if isinstance(self.mlp, DenseWeights):
            return self.mlp.feed(y)
        assert chosen is not None, "experts are chosen by the owner"
        return self.mlp.feed_chosen(y, *chosen)


@dataclass(frozen=True, slots=True)
class PeerModel:
    """The peer's part of a stage's main layers, in local order."""

    config: ModelConfig
    layers: list[PeerLayer]
    frequencies: Tensor  # [Dr / 2] float32
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.frequencies.device

    @property
    def heads(self) -> int:
        """Of each layer."""
        return self.layers[0].heads.key_up.shape[0]

    def of(self, layers: range) -> "PeerModel":
        """The peer's part of one stage, of a model that is whole: the same weights, none of them copied."""
        assert len(self.layers) == self.config.layers, "not a whole model"
        return replace(self, layers=self.layers[layers.start : layers.stop])

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Model.rope`."""
        return rope_table(positions, self.frequencies, self.dtype)


class Splitter:
    """Takes layers one by one, as they are read: returns the owner's part of each and keeps the peer's."""

    def __init__(self, device: torch.device) -> None:
        """Args: device: the peer's."""
        self._device = device
        self._layers: list[PeerLayer] = []

    def take(self, layer: LayerWeights) -> LayerWeights:
        """The owner's part of a main layer. Raises BadSetting: it cannot be cut."""
        mla, peer_heads = self._heads(layer)
        mlp, peer_mlp = self._mlp(layer)
        self._layers.append(PeerLayer(peer_heads, peer_mlp))
        own = replace(layer.mla, query_up=mla.query_up, key_up=mla.key_up, value_up=mla.value_up, output=mla.output)
        return replace(layer, mla=own, mlp=mlp)

    def peer_of(self, model: Model) -> PeerModel:
        """The peer's part of a model, all of whose layers were taken."""
        assert len(self._layers) == len(model.layers), f"{len(self._layers)} layers were taken of {len(model.layers)}"
        peer = PeerModel(model.config, self._layers, model.frequencies.to(self._device), model.dtype)
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)  # what was copied here is read by streams that know nothing of it
        return peer

    def _heads(self, layer: LayerWeights) -> tuple[Heads, Heads]:
        heads = layer.mla.heads
        count, value = heads.value_up.shape[:2]
        if count < 2:
            raise BadSetting("one attention head cannot be split over two devices; leave --peer out")
        query = heads.query_up.shape[0] // count
        middle = _middle(
            count, math.lcm(-(-_row_step(heads.query_up) // query), -(-_column_step(heads.output) // value)), "attention heads"
        )
        cuts = []
        for first, end in ((0, middle), (middle, count)):
            cuts.append(
                Heads(
                    query_up=self._held(_rows(heads.query_up, first * query, end * query), first),
                    key_up=self._held(heads.key_up[first:end], first),
                    value_up=self._held(heads.value_up[first:end], first),
                    output=self._held(_columns(heads.output, first * value, end * value), first),
                )
            )
        return cuts[0], cuts[1]

    def _mlp(self, layer: LayerWeights) -> tuple[DenseWeights | MoeWeights, DenseWeights | PeerExperts]:
        mlp = layer.mlp
        if isinstance(mlp, DenseWeights):
            return self._dense(mlp)
        shared, peer_shared = self._dense(mlp.shared)
        count = mlp.gate_up.shape[0]
        middle = _middle(count, 1, "routed experts")
        cuts = [
            [self._held(_outer(weight, first, end), first) for weight in (mlp.gate_up, mlp.down)]
            for first, end in ((0, middle), (middle, count))
        ]
        owner = replace(mlp, gate_up=cuts[0][0], down=cuts[0][1], shared=shared)
        return owner, PeerExperts(cuts[1][0], cuts[1][1], peer_shared, middle)

    def _dense(self, mlp: DenseWeights) -> tuple[DenseWeights, DenseWeights]:
        width = mlp.down.shape[1]
        middle = _middle(width, math.lcm(_row_step(mlp.gate), _column_step(mlp.down)), "values of an MLP's width")
        parts = []
        for first, end in ((0, middle), (middle, width)):
            gate, up = (self._held(_rows(weight, first, end), first) for weight in (mlp.gate, mlp.up))
            parts.append(DenseWeights(gate, up, self._held(_columns(mlp.down, first, end), first)))
        return parts[0], parts[1]

    def _held(self, part: W, first: int) -> W:
        """A part where it stays: the owner's where it is, as a copy of its own if the rest leaves, so that the whole can be let go."""
        here = part.values.device if isinstance(part, BlockFp8) else part.device
        if here == self._device:
            return part
        return _moved(part, self._device if first else here)


def split_model(model: Model, device: torch.device) -> tuple[Model, PeerModel]:
    """A model that was loaded whole, on two devices; the given one stays whole. Raises BadSetting: it cannot be cut."""
    splitter = Splitter(device)
    owner = replace(model, layers=[splitter.take(layer) for layer in model.layers])
    return owner, splitter.peer_of(owner)


def parts_of(load: Callable[..., Model], weights: Model | None, peer: torch.device | None) -> tuple[Model, PeerModel | None]:
    """The weights that `load` reads, unless some were loaded before: whole, or what the stage's device and its peer have of them.

    Raises BadSetting: they cannot be cut; and what `load` raises.
    """
    if peer is None:
        return weights or load(), None
    if weights is not None:
        assert weights.layers[0].mla.key_up.shape[0] == weights.config.heads, "a part of a model cannot be cut again"
        return split_model(weights, peer)
    splitter = Splitter(peer)
    owner = load(part_of=splitter.take)
    return owner, splitter.peer_of(owner)


def _middle(count: int, step: int, what: str) -> int:
    """Where to cut `count` things into nearly equal parts, at a multiple of `step`; both parts have some."""
    middle = max(step, (count + step) // (2 * step) * step)
    if middle >= count:
        raise BadSetting(f"{count} {what} cannot be split over two devices in steps of {step}; leave --peer out")
    return middle


def _row_step(weight: Weight) -> int:
    """Outputs between places where a weight may be cut."""
    return FP8_BLOCK if isinstance(weight, BlockFp8) else 1


def _column_step(weight: Weight) -> int:
    """Inputs between places where a weight may be cut."""
    if isinstance(weight, GroupInt):
        return math.lcm(weight.group, chunk_units_of(weight.group) * (16 // weight.bits))
    return FP8_BLOCK if isinstance(weight, BlockFp8) else 1


def _outer(weight: Weight, first: int, end: int) -> Weight:
    """Experts [first, end)."""
    if isinstance(weight, BlockFp8):
        return BlockFp8(weight.values[first:end], weight.scales[first:end])
    return weight[first:end]


def _rows(weight: Weight, first: int, end: int) -> Weight:
    """Outputs [first, end)."""
    if isinstance(weight, BlockFp8):
        return BlockFp8(weight.values[first:end], weight.scales[first // FP8_BLOCK : -(-end // FP8_BLOCK)])
    return weight[first:end]


def _columns(weight: Weight, first: int, end: int) -> Weight:
    """Inputs [first, end). Where a form must be contiguous it is copied: rows of the whole lie apart."""
    if isinstance(weight, Tensor):
        return weight[:, first:end]
    if isinstance(weight, BlockFp8):
        scales = weight.scales[:, first // FP8_BLOCK : -(-end // FP8_BLOCK)]
        return BlockFp8(weight.values[:, first:end].contiguous(), scales.contiguous())
    units = weight.units[:, first * weight.bits // 16 : -(-end * weight.bits // 16) if end < weight.width else None]
    groups = slice(first // weight.group, end // weight.group if end < weight.width else None)
    zeros = None if weight.zeros is None else weight.zeros[:, groups].contiguous()
    return GroupInt(units.contiguous(), weight.scales[:, groups].contiguous(), zeros, weight.bits, weight.group, end - first)


def _moved(part: W, device: torch.device) -> W:
    """A contiguous copy on a device."""

    def copy(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)

    moved: Weight
    if isinstance(part, BlockFp8):
        moved = BlockFp8(copy(part.values), copy(part.scales))
    elif isinstance(part, GroupInt):
        zeros = None if part.zeros is None else copy(part.zeros)
        moved = GroupInt(copy(part.units), copy(part.scales), zeros, part.bits, part.group, part.width)
    else:
        moved = copy(part)
    return cast(W, moved)
