"""What tells one layer's weights from another's: a sample of them, in bfloat16, the same on any device and in any dtype. Holds nothing."""

import torch
import xxhash
from torch import Tensor

from engine.model.layer import LayerWeights
from engine.model.moe import DenseWeights
from engine.model.split import PeerLayer
from engine.model.weights import Weight
from engine.stage import Stage
from kernels.linear.block_fp8 import BlockFp8
from kernels.linear.group_int import GroupInt

__all__ = ["weights_of"]


def weights_of(stage: Stage) -> tuple[str, ...]:
    """A checksum of each layer that keeps rows of one stage, in order. It waits for a device."""
    return tuple(map(_weights_checksum, stage.model.row_layers, _peer_layers(stage)))


def _peer_layers(stage: Stage) -> list[PeerLayer | None]:
    """The peer's part of each layer that keeps rows; of the MTP block it has none."""
    whole: list[PeerLayer | None] = [None] * len(stage.model.row_layers)
    return whole if stage.peer is None else [*stage.peer.model.layers, *whole[len(stage.peer.model.layers) :]]


def _weights_checksum(layer: LayerWeights, peer: PeerLayer | None) -> str:
    """xxh3_128 of the sample of one layer's weights, the same wherever parts of it lie."""
    mla = layer.mla
    sampled = (layer.input_norm, layer.output_norm, mla.query_down, mla.query_norm, mla.row_down, mla.row_norm)
    rows = [_first_row(weight) for weight in sampled]
    others = (None, None) if peer is None else (peer.heads.output, _dense_down(peer))
    for own, its in zip((mla.output, layer.mlp.down), others, strict=True):
        row = _first_row(own)
        rows.append(row if its is None else torch.cat([row, _first_row(its).to(row.device)]))
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(row.to(torch.bfloat16).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _dense_down(peer: PeerLayer) -> Weight | None:
    """The rest of a dense layer's row; the first expert is the owner's, whole."""
    return peer.mlp.down if isinstance(peer.mlp, DenseWeights) else None


def _first_row(weight: Weight) -> Tensor:
    """f32 [width]: the first output's row, of the first expert where there are several; a norm whole."""
    if isinstance(weight, BlockFp8):
        values, scales = weight.values.flatten(0, -2), weight.scales.flatten(0, -2)
        return BlockFp8(values[:1].contiguous(), scales[:1].contiguous()).dequantised(torch.float32)[0]
    if isinstance(weight, GroupInt):
        units, scales = weight.units.flatten(0, -2), weight.scales.flatten(0, -2)
        zeros = None if weight.zeros is None else weight.zeros.flatten(0, -2)[:1]
        return GroupInt(units[:1], scales[:1], zeros, weight.bits, weight.group, weight.width).dequantised(torch.float32)[0]
    return weight.flatten(0, -2)[0].float() if weight.dim() > 1 else weight.float()
