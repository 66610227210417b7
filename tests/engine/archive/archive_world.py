"""Sessions as arrays of bytes, written to archives and read from them as the engine does, without an engine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy

from engine.archive.identity import Identity
from engine.archive.manifest import KeysAs, Manifest, RowsAs
from engine.archive.parts import Bytes, Part
from engine.archive.reader import Reader
from engine.archive.writer import Writer
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS, BlockLayout
from memory.append import blocks_of
from memory.row import KeyFormat, RowFormat, key_layout, row_layout

__all__ = ["Picture", "export", "identity", "read", "stage_of", "unit_rows"]

SESSION = "0123456789abcdef"
MAIN_LAYERS, INDEXERS, HIDDEN, VOCABULARY = 5, (0, 3), 6, 100
GROUPS = ((0, 1, 2), (3, 4), (5,))  # the MTP block is layer 5, and has an indexer


def identity(row: RowFormat = "q8g64", key: KeyFormat = "bf16") -> Identity:
    """Of a whole model of five layers and the MTP block."""
    rows, keys = row_layout(row, 20, 8), key_layout(key, 8)
    layout = BlockLayout(rows, keys, GROUPS)
    return Identity(
        architecture="a" * 32, model="tiny", main_layers=MAIN_LAYERS, indexer_layers=INDEXERS, first_layer=0, layers=6, with_mtp=True,
        weights=tuple(f"{layer:032x}" for layer in range(6)), tokenizer="b" * 64, template="c" * 64,
        rows_as=RowsAs(row, 20, 8, rows.row_bytes), keys_as=KeysAs(key, 8, keys.key_bytes), hidden_width=HIDDEN, vocabulary=VOCABULARY,
        context_max=5000, block_bytes=layout.block_bytes,
        parts=(Part("rows", 0, 0, 6, rows.row_bytes), Part("keys", layout.keys_offset, 0, 3, keys.key_bytes, keys.scale_bytes)),
    )  # fmt: skip


def stage_of(whole: Identity, layers: range) -> Identity:
    """Of a stage of it: its parts lie in blocks of its own size."""
    having = [number for number, layer in enumerate((*INDEXERS, MAIN_LAYERS)) if layer in layers]
    rows, keys = whole.parts
    keys_offset = len(layers) * BLOCK_ROWS * rows.unit_bytes
    return dataclasses.replace(
        whole, first_layer=layers.start, layers=len(layers), with_mtp=layers.stop > MAIN_LAYERS,
        weights=whole.weights[layers.start : layers.stop],
        parts=(
            dataclasses.replace(rows, first_layer=layers.start, layers=len(layers)),
            dataclasses.replace(keys, offset=keys_offset, first_layer=having[0], layers=len(having)),
        ),
        block_bytes=keys_offset + len(having) * BLOCK_ROWS * keys.unit_bytes,
    )  # fmt: skip


@dataclasses.dataclass
class Picture:
    """One session: rows uint8 [layers, rows, row_bytes] and keys, of the whole model, and its tokens."""

    rows: Bytes
    keys: Bytes
    tokens: list[int]
    hidden: bytes
    revision: int = 0

    @staticmethod
    def drawn(whole: Identity, rows: int, seed: int) -> "Picture":
        """Random bytes, NaN and all."""
        draw = numpy.random.default_rng(seed)
        sizes = [(part.layers, rows, part.unit_bytes) for part in whole.parts]
        values = [draw.integers(0, 256, size, dtype=numpy.uint8) for size in sizes]
        hidden = draw.standard_normal((HIDDEN_ROWS, HIDDEN)).astype("<f4").tobytes() if rows else b""
        return Picture(*values, draw.integers(0, VOCABULARY, rows + 1).tolist(), hidden)

    @property
    def count(self) -> int:
        return self.rows.shape[1]

    def cut(self, rows: int) -> "Picture":
        """Its first rows."""
        return Picture(self.rows[:, :rows], self.keys[:, :rows], self.tokens[: rows + 1], self.hidden, self.revision + 1)

    def then(self, more: "Picture") -> "Picture":
        """Another one's rows behind its own."""
        both = [numpy.concatenate(pair, axis=1) for pair in ((self.rows, more.rows), (self.keys, more.keys))]
        return Picture(*both, [*self.tokens[:-1], *more.tokens], more.hidden, self.revision + 1)

    def blocks(self, of: Identity, fill: int) -> list[Bytes]:
        """Blocks of a stage, with other bytes behind the last row."""
        made = [numpy.full(of.block_bytes, fill, numpy.uint8) for _ in range(blocks_of(self.count))]
        for part in of.parts:
            values = self.rows if part.kind == "rows" else self.keys
            for number, block in enumerate(made):
                some = values[part.first_layer : part.end_layer, BLOCK_ROWS * number : BLOCK_ROWS * (number + 1)]
                cut = part.unit_bytes - part.scale_bytes
                for plane, values_of in zip(
                    part.of(block, part.first_layer, part.layers), (some[..., :cut], some[..., cut:]), strict=False
                ):
                    plane[:, : some.shape[1]] = values_of
        return made


def unit_rows(blocks: Sequence[Bytes], part: Part, rows: int) -> Bytes:
    """uint8 [layers, rows, unit_bytes] of blocks."""
    if not blocks:
        return numpy.zeros((part.layers, 0, part.unit_bytes), numpy.uint8)
    whole = [numpy.concatenate(part.of(block, part.first_layer, part.layers), axis=2) for block in blocks]
    return numpy.concatenate(whole, axis=1)[:, :rows]


def export(path: Path, of: Identity, picture: Picture, *, session: str = SESSION, segment_blocks: int = 3, fill: int = 0xEE) -> Writer:
    """As the engine does, a block at a time. Returns the writer, closed."""
    writer = Writer(path, of, session)
    try:
        blocks, rows = picture.blocks(of, fill), picture.count
        same = writer.same(0, blocks[: writer.may_have], rows)
        writer.keep(min(rows, BLOCK_ROWS * same))
        for first in range(same, len(blocks), segment_blocks):
            stop = min(first + segment_blocks, len(blocks))
            writer.begin_segment(first, min(rows, BLOCK_ROWS * stop) - BLOCK_ROWS * first)
            for number in reversed(range(first, stop)):
                writer.write(number, [blocks[number]])
            writer.end_segment()
        writer.commit(
            Manifest(
                session=session, revision=picture.revision, architecture=of.architecture, model=of.model, main_layers=of.main_layers,
                indexer_layers=of.indexer_layers, first_layer=of.first_layer, layers=of.layers, mtp_rows=of.with_mtp, weights=of.weights,
                tokenizer=of.tokenizer, template=of.template, rows_as=of.rows_as, keys_as=of.keys_as, tokens=tuple(picture.tokens),
                rows=rows, hidden_width=of.hidden_width, hidden_from=max(0, rows - HIDDEN_ROWS),
                hidden=picture.hidden if of.keeps_hidden else b"", segments=writer.segments,
            )
        )  # fmt: skip
    finally:
        writer.close()
    return writer


def read(path: Path, of: Identity, *, batch: int = 2) -> tuple[Manifest, dict[str, Bytes]]:
    """Manifest and rows and keys, uint8 [layers, rows, unit_bytes] of a stage."""
    reader = Reader(path, of)
    try:
        manifest = reader.manifest
        blocks = [numpy.full(of.block_bytes, 0x77, numpy.uint8) for _ in range(blocks_of(manifest.rows))]
        for first in range(0, len(blocks), batch):
            reader.read(first, blocks[first : first + batch])
    finally:
        reader.close()
    return manifest, {part.kind: unit_rows(blocks, part, manifest.rows) for part in of.parts}
