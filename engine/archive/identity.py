"""What the sessions of an engine belong to: architecture, weights, formats, layers. An archive is of one identity.

Holds `Identity` and how a stage's is made. Knows no sessions and no files.

Invariants:
1. Weights are told apart by a sample, norms and the first output row of some products, of each layer by itself, in bfloat16: so equal
   weights are equal on any device and in any dtype, and a stage needs no other stage's.
2. Keys are counted among the layers with an indexer. A stage that starts inside a selection group has a key layer that no indexer writes.
Source: design, section 11.
"""

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from engine.archive.manifest import KeysAs, RowsAs
from engine.archive.parts import Part
from engine.model.glm import Model
from engine.model.layer import LayerWeights
from engine.model.moe import DenseWeights
from engine.model.split import PeerLayer
from engine.model.weights import Weight
from engine.stage import Stage
from kernels.layout import BlockLayout
from kernels.linear.block_fp8 import BlockFp8
from kernels.linear.group_int import GroupInt

__all__ = ["Identity", "identity_of"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one stage. Checksums are hexadecimal."""

    architecture: str
    model: str
    main_layers: int
    indexer_layers: tuple[int, ...]  # of the whole model, without the MTP block's
    first_layer: int
    layers: int  # the MTP block's among them
    with_mtp: bool
    weights: tuple[str, ...]  # a layer
    tokenizer: str
    template: str
    rows_as: RowsAs
    keys_as: KeysAs
    hidden_width: int
    vocabulary: int
    context_max: int
    parts: tuple[Part, Part]  # of a block: rows, keys
    block_bytes: int

    @property
    def keeps_hidden(self) -> bool:
        """Whether the stage has the model's last layer, whose states a session keeps."""
        return self.first_layer + self.layers >= self.main_layers


def identity_of(stage: Stage, *, model: str, tokenizer: str, template: str, context_max: int) -> Identity:
    """Of a stage. Reads a sample of its weights, so on a device it waits: call it beside the loop.

    Args: model: its name, for messages. tokenizer, template: SHA-256 of tokenizer.json and of the chat template's text.
    """
    weights, layout = stage.model, stage.layout
    config = weights.config
    full = tuple(layer for layer in range(config.layers) if config.full_layers[layer])
    with_mtp = weights.mtp is not None
    row, key = layout.row, layout.key
    return Identity(
        architecture=config.fingerprint(), model=model, main_layers=config.layers, indexer_layers=full, first_layer=stage.first_layer,
        layers=layout.layers, with_mtp=with_mtp, weights=tuple(map(_weights_checksum, weights.row_layers, _peer_layers(stage))),
        tokenizer=tokenizer, template=template,
        rows_as=RowsAs(row.encoding, row.latent, row.rope, row.row_bytes), keys_as=KeysAs(key.encoding, key.width, key.key_bytes),
        hidden_width=config.hidden, vocabulary=config.vocabulary, context_max=context_max,
        parts=_parts(weights, layout, full), block_bytes=layout.block_bytes,
    )  # fmt: skip


def _parts(model: Model, layout: BlockLayout, full: tuple[int, ...]) -> tuple[Part, Part]:
    """Rows and keys of a block; a first group without its full layer has no keys."""
    headless = 0 if model.row_layers[0].full else 1
    before = sum(1 for layer in full if layer < model.first_layer)
    rows = Part("rows", 0, model.first_layer, layout.layers, layout.row.row_bytes)
    key = layout.key
    return rows, Part("keys", layout.key_offset(headless), before, layout.key_layers - headless, key.key_bytes, key.scale_bytes)


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
