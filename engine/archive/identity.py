"""What the sessions of an engine belong to: architecture, weights, formats, layers. An archive is of one identity.

Holds `Identity` and how a stage's is made. Knows no sessions and no files.

Invariants:
1. Weights are told apart by a sample, norms and the first output row of some products, of each layer by itself, in bfloat16: so equal
   weights are equal on any device and in any dtype, and a stage needs no other stage's.
2. Keys are counted among the layers with an indexer. A stage that starts inside a selection group has a key layer that no indexer writes.
Source: design, section 11.
"""

from dataclasses import dataclass

from engine.archive.checksums import weights_of
from engine.archive.manifest import KeysAs, RowsAs
from engine.archive.parts import Part
from engine.stage import Stage
from kernels.layout import BlockLayout

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
    parts: tuple[Part, ...]  # of a block: rows, keys; of several stages each one's
    block_bytes: int  # of all stages

    @property
    def keeps_hidden(self) -> bool:
        """Whether the stage has the model's last layer, whose states a session keeps."""
        return self.first_layer + self.layers >= self.main_layers


def identity_of(stage: Stage, *, model: str, tokenizer: str, template: str, context_max: int) -> Identity:
    """Of a stage, with all those before it. Reads a sample of its weights, so on a device it waits: call it beside the loop.

    Args: model: its name, for messages. tokenizer, template: SHA-256 of tokenizer.json and of the chat template's text.
    """
    config, layouts = stage.model.config, stage.layouts
    full = tuple(layer for layer in range(config.layers) if config.full_layers[layer])
    firsts = (*(one.first_layer for one in stage.before), stage.first_layer)
    row, key = stage.layout.row, stage.layout.key
    return Identity(
        architecture=config.fingerprint(), model=model, main_layers=config.layers, indexer_layers=full, first_layer=firsts[0],
        layers=sum(layout.layers for layout in layouts), with_mtp=stage.model.mtp is not None,
        weights=(*(checksum for one in stage.before for checksum in one.weights()), *weights_of(stage)),
        tokenizer=tokenizer, template=template,
        rows_as=RowsAs(row.encoding, row.latent, row.rope, row.row_bytes), keys_as=KeysAs(key.encoding, key.width, key.key_bytes),
        hidden_width=config.hidden, vocabulary=config.vocabulary, context_max=context_max,
        parts=tuple(part for number, layout in enumerate(layouts) for part in _parts(number, layout, firsts[number], full)),
        block_bytes=sum(layout.block_bytes for layout in layouts),
    )  # fmt: skip


def _parts(stage: int, layout: BlockLayout, first: int, full: tuple[int, ...]) -> tuple[Part, Part]:
    """Rows and keys of a stage's block; a first group without its full layer has no keys.

    Args: first: its first layer. full: of the model.
    """
    headless = 0 if first in full else 1
    before = sum(1 for layer in full if layer < first)
    rows, key = Part("rows", 0, first, layout.layers, layout.row.row_bytes, stage=stage), layout.key
    offset = layout.key_offset(headless)
    return rows, Part("keys", offset, before, layout.key_layers - headless, key.key_bytes, key.scale_bytes, stage)
