"""Whether a manifest is consistent in itself, and whether its session can live in an engine. Knows no files.

Invariants:
1. In a checked manifest every (layer, row) of the session is in exactly one segment, and every (indexer layer, key) too.
2. Whatever is refused is refused before a byte of memory is taken for it.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from engine.archive.identity import Identity
from engine.archive.manifest import Kind, Manifest, Segment
from engine.archive.parts import segment_checksum
from engine.errors import ArchiveReason, ArchiveRefused, NeverFits
from kernels.layout import BLOCK_ROWS, HIDDEN_ROWS

__all__ = ["check", "check_fits", "keys_of"]

KINDS: Final[tuple[Kind, ...]] = ("rows", "keys")


def keys_of(indexer_layers: Iterable[int], main_layers: int, layers: range) -> range:
    """The keys of some layers, as a manifest counts them: among the layers with an indexer, the MTP block's last."""
    having = [*indexer_layers, main_layers]
    held = [number for number, layer in enumerate(having) if layer in layers]
    return range(held[0], held[-1] + 1) if held else range(0)


def check(manifest: Manifest, where: str) -> None:
    """Raise ArchiveRefused (damaged) unless the manifest is consistent."""
    end = manifest.first_layer + manifest.layers
    with_last = end >= manifest.main_layers
    hidden_bytes = 4 * HIDDEN_ROWS * manifest.hidden_width if manifest.rows and with_last else 0
    wrong = (
        (manifest.rows > len(manifest.tokens), f"{manifest.rows} rows of {len(manifest.tokens)} tokens"),
        (end > manifest.main_layers + 1, f"layers up to {end - 1} of a model of {manifest.main_layers}"),
        (manifest.mtp_rows != (end == manifest.main_layers + 1), "it contradicts itself about rows of the MTP block"),
        (len(manifest.weights) != manifest.layers, f"checksums of {len(manifest.weights)} layers' weights, of {manifest.layers}"),
        (any(a >= b for a, b in pairwise((*manifest.indexer_layers, manifest.main_layers))), "its indexer layers are in no order"),
        (not max(0, manifest.rows - HIDDEN_ROWS) <= manifest.hidden_from <= manifest.rows, f"hidden states from {manifest.hidden_from} on"),
        (len(manifest.hidden) != hidden_bytes, f"hidden states of {len(manifest.hidden)} bytes, not {hidden_bytes}"),
    )
    for is_wrong, why in wrong:
        if is_wrong:
            raise ArchiveRefused("damaged", where, why)
    for segment in manifest.segments:
        _check_segment(segment, where)
    layers = range(manifest.first_layer, end)
    for kind in KINDS:
        held = layers if kind == "rows" else keys_of(manifest.indexer_layers, manifest.main_layers, layers)
        _check_tiles([segment for segment in manifest.segments if segment.kind == kind], held, manifest.rows, where)


def _check_segment(segment: Segment, where: str) -> None:
    whole = segment.counted <= segment.rows and segment.first_row % BLOCK_ROWS == 0
    if not whole or len(segment.pieces) != -(-segment.rows // BLOCK_ROWS):
        raise ArchiveRefused("damaged", where, f"{segment.name} has {segment.rows} rows from {segment.first_row}, {segment.counted} count")
    if segment_checksum(segment.pieces) != segment.checksum:
        raise ArchiveRefused("damaged", where, f"{segment.name} is not named for its pieces")


def _check_tiles(segments: list[Segment], held: range, rows: int, where: str) -> None:
    """Every layer of `held` has each of `rows` positions once."""
    for layer in held:
        row = 0
        for segment in sorted(segments, key=lambda one: one.first_row):
            if not segment.first_layer <= layer < segment.first_layer + segment.layers:
                continue
            if segment.first_row != row or (segment.end_row != rows and segment.end_row % BLOCK_ROWS):
                raise ArchiveRefused("damaged", where, f"layer {layer} has row {min(row, segment.first_row)} twice or not at all")
            row = segment.end_row
        if row != rows:
            raise ArchiveRefused("damaged", where, f"layer {layer} has {row} of {rows} rows")
    for segment in segments:
        if segment.first_layer >= held.stop or segment.first_layer + segment.layers <= held.start:
            raise ArchiveRefused("damaged", where, f"{segment.name} has no layer of it")


def check_fits(manifest: Manifest, identity: Identity, where: str) -> None:
    """Whether the session can live in an engine. Raises ArchiveRefused (foreign, format); NeverFits: it is longer than a session here."""
    first, end = identity.first_layer, identity.first_layer + identity.layers
    held = range(manifest.first_layer, manifest.first_layer + manifest.layers)
    wrong: list[tuple[bool, ArchiveReason, str]] = [
        (manifest.architecture != identity.architecture, "foreign", f"its architecture is that of {manifest.model}, not {identity.model}"),
        (manifest.hidden_width != identity.hidden_width, "foreign", f"hidden states have {manifest.hidden_width} values"),
        (manifest.tokenizer != identity.tokenizer, "foreign", "its tokens are of another tokenizer.json"),
        (manifest.rows_as != identity.rows_as, "format", f"rows are {_shown(manifest.rows_as)}, here {_shown(identity.rows_as)}"),
        (manifest.keys_as != identity.keys_as, "format", f"index keys are {_shown(manifest.keys_as)}, here {_shown(identity.keys_as)}"),
        (identity.with_mtp and not manifest.mtp_rows and end == held.stop + 1, "format", "it lacks rows of the MTP block, which is loaded"),
        (first not in held or end - 1 not in held, "format", f"it has layers {held.start} to {held.stop - 1}, not {first} to {end - 1}"),
    ]  # fmt: skip
    for is_wrong, reason, why in wrong:
        if is_wrong:
            raise ArchiveRefused(reason, where, why)
    for layer, weights in enumerate(identity.weights, first):
        if manifest.weights[layer - held.start] != weights:
            raise ArchiveRefused("foreign", where, f"layer {layer} has other weights here")
    strange = max(manifest.tokens, default=0)
    if strange >= identity.vocabulary:
        raise ArchiveRefused("foreign", where, f"token {strange} is outside the vocabulary of {identity.vocabulary}")
    if len(manifest.tokens) > identity.context_max:
        raise NeverFits(
            f"the archive has {len(manifest.tokens)} tokens, and a session may hold {identity.context_max}; raise --context-max"
        )


def _shown(format_: object) -> str:
    return ", ".join(str(getattr(format_, name)) for name in getattr(format_, "__struct_fields__", ()))
