"""manifest.json: everything an archive is but the bytes of its rows and keys.

Holds the wire types, `encode` and `decode`. Knows no files and no engine.

Invariants:
1. The body is covered by a checksum over its bytes as written; so is every segment, by way of its pieces' checksums.
2. The version is looked at before anything else: a newer archive is called newer, not damaged.
3. Layers are the model's own numbers. Keys are counted among the layers that have an indexer, the MTP block's last.
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import xxhash

from engine.errors import ArchiveRefused

__all__ = ["MANIFEST_BYTES_MAX", "VERSION", "Checksum", "KeysAs", "Kind", "Manifest", "RowsAs", "Segment", "decode", "encode"]

FORMAT: Final = "forebay archive"
VERSION: Final = 1
MANIFEST_BYTES_MAX: Final = 1 << 28  # a million tokens and the checksums of their blocks take 10 MiB

Kind: TypeAlias = Literal["rows", "keys"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]  # xxh3_128 of bytes


class RowsAs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a row is encoded (`docs/archive.md`)."""

    encoding: Literal["q8g64", "bf16", "f32"]
    latent: Positive  # values
    rope: Positive  # values
    row_bytes: Positive


class KeysAs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an index key is encoded."""

    encoding: Literal["bf16", "f32", "e4m3"]
    width: Positive  # values
    key_bytes: Positive


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file, named for its kind and checksum: rows or keys of some layers at some positions, in pieces of 64 positions."""

    kind: Kind
    first_layer: Count  # of keys: counted among the layers with an indexer
    layers: Positive
    first_row: Count  # a multiple of 64
    rows: Positive  # in the file
    counted: Positive  # of them, the first so many are the session's
    checksum: Checksum  # of the pieces' checksums, 16 bytes each, in order
    pieces: tuple[Checksum, ...]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.kind}-{self.checksum}.bin"

    @property
    def end_row(self) -> int:
        """The position behind the last that counts."""
        return self.first_row + self.counted


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One session of some consecutive layers."""

    session: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    revision: Count
    architecture: Checksum
    model: Annotated[str, msgspec.Meta(max_length=1000)]  # its directory's name; nothing depends on it
    main_layers: Positive  # of the whole model, without the MTP block
    indexer_layers: tuple[Count, ...]  # of the whole model, without the MTP block's
    first_layer: Count
    layers: Positive  # archived here; layer `main_layers` is the MTP block
    mtp_rows: bool
    weights: tuple[Checksum, ...]  # of a sample of each archived layer's weights
    tokenizer: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    template: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    rows_as: RowsAs
    keys_as: KeysAs
    tokens: tuple[Token, ...]
    rows: Count  # positions with rows; the last token may have none yet
    hidden_width: Positive
    hidden_from: Count  # the first position whose state is among the hidden ones; `rows` where none is
    hidden: bytes  # f32 [16, hidden_width] little-endian, the state of row p at p % 16; empty without rows or without the last layer
    segments: tuple[Segment, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all rows and keys that count."""
        return sum(segment.layers * segment.counted * self.unit_bytes(segment.kind) for segment in self.segments)

    def unit_bytes(self, kind: Kind) -> int:
        """Bytes of one row, or of one key."""
        return self.rows_as.row_bytes if kind == "rows" else self.keys_as.key_bytes


class _Probe(msgspec.Struct):
    """What every version has."""

    format: str
    version: int


class _Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    checksum: Checksum
    body: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Outer(FORMAT, VERSION, xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body)))


def decode(written: bytes, where: str) -> Manifest:
    """A manifest, sound in itself as far as its bytes go; `checks.py` judges what it says.

    Args: where: the archive, for messages.
    Raises: ArchiveRefused: damaged, or newer.
    """
    try:
        try:
            probe = msgspec.json.decode(written, type=_Probe)
        except msgspec.ValidationError:
            probe = _Probe("", 0)
        if probe.format != FORMAT:
            raise ArchiveRefused("damaged", where, "its manifest.json is not one of a Forebay archive")
        if probe.version > VERSION:
            raise ArchiveRefused("newer", where, f"it has format version {probe.version}, and this program reads up to {VERSION}")
        outer = msgspec.json.decode(written, type=_Outer)
        if outer.version != VERSION:
            raise ArchiveRefused("damaged", where, f"there is no format version {outer.version}")
        body = bytes(outer.body)
        if xxhash.xxh3_128_hexdigest(body) != outer.checksum:
            raise ArchiveRefused("damaged", where, "its manifest.json differs from its checksum")
        return msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = " ".join(str(error).split())
        raise ArchiveRefused("damaged", where, f"its manifest.json cannot be read: {shown[:200]}") from error
